"""The exact area resize, against rational arithmetic and against Gymnasium's wrapper."""

import math
from fractions import Fraction
from functools import cache

import ale_py
import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.spec import AtariEnvironment, SeedsSpec
from capsule.training.environments import make_environment
from capsule.training.environments.preprocessing import SIDE, AreaResize
from capsule.training.state.streams import make_streams

SIZES = [(210, 160), (250, 160), (214, 160), (220, 160), (230, 160), (84, 84)]


def areas(size):
    """Overlap of each output pixel with each input pixel, in input pixels: ``[84][size]``."""
    scale = Fraction(size, SIDE)
    return [
        [max(Fraction(0), min(i + 1, (j + 1) * scale) - max(i, j * scale)) for i in range(size)]
        for j in range(SIDE)
    ]


@cache
def integer_areas(size):
    """``areas`` in the unit that makes all of them integers; returns both."""
    rows = areas(size)
    unit = math.lcm(*(area.denominator for row in rows for area in row))
    return np.array([[int(area * unit) for area in row] for row in rows], np.int64), unit


def exact_sums(image):
    """The area means of an image times a unit, as integers; returns both."""
    (left, row_unit), (right, column_unit) = map(integer_areas, image.shape)
    unit = Fraction(math.prod(image.shape), SIDE * SIDE) * row_unit * column_unit
    assert unit.denominator == 1
    return left @ image.astype(np.int64) @ right.T, int(unit)


def rounded_half_to_even(sums, unit):
    quotient, rest = np.divmod(sums, unit)
    up = (2 * rest > unit) | ((2 * rest == unit) & (quotient % 2 == 1))
    return (quotient + up).astype(np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_every_atari_screen_size_is_resized_exactly(height, width):
    image = np.random.default_rng(height).integers(0, 256, (height, width), dtype=np.uint8)
    resized = AreaResize(height, width)(image)
    assert (resized.dtype, resized.shape) == (np.uint8, (SIDE, SIDE))
    np.testing.assert_array_equal(resized, rounded_half_to_even(*exact_sums(image)))


def test_the_unit_of_the_usual_screen_is_200():
    _, unit = exact_sums(np.zeros((210, 160), np.uint8))
    assert unit == 200


def test_every_possible_sum_is_rounded_half_to_even():
    for unit in (200, 5000, 4600, 4280, 2200):
        sums = np.arange(255 * unit + 1)
        floats = np.rint(sums.astype(np.float32) / np.float32(unit)).astype(np.uint8)
        np.testing.assert_array_equal(floats, rounded_half_to_even(sums, unit))


@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 3, 17, 256]))
@settings(deadline=None, max_examples=25)
def test_images_full_of_ties_are_resized_exactly(seed, levels):
    random = np.random.default_rng(seed)
    image = (random.integers(0, levels, (210, 160)) * (255 // (levels - 1))).astype(np.uint8)
    sums, unit = exact_sums(image)
    np.testing.assert_array_equal(AreaResize(210, 160)(image), rounded_half_to_even(sums, unit))


@pytest.mark.parametrize("level", [0, 1, 127, 254, 255])
def test_a_flat_image_stays_flat(level):
    assert (AreaResize(210, 160)(np.full((210, 160), level, np.uint8)) == level).all()


def test_sizes_beyond_exact_float32_sums_are_refused():
    with pytest.raises(ValueError, match="1009x1013"):
        AreaResize(1009, 1013)


def oracle(identifier):
    """Gymnasium's preprocessing around a newly loaded game, without any randomness.

    ALE keeps traces of earlier episodes, even over a seeded reset; so each episode gets its own.
    """
    gymnasium.register_envs(ale_py)
    game = gymnasium.make(
        identifier, frameskip=1, repeat_action_probability=0.0, full_action_space=False
    )
    return gymnasium.wrappers.AtariPreprocessing(game, noop_max=0, terminal_on_life_loss=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Breakout", "Pong", "Seaquest"])
def test_atari_agrees_with_gymnasiums_wrapper(name):
    """Rewards, ends and pixels are equal, but for exact ties, which OpenCV rounds either way."""
    spec = AtariEnvironment(suite="atari", game=name.lower(), noop_max=0, clip_rewards=False)
    streams = make_streams(SeedsSpec(root=5))
    ours = make_environment(spec, streams, training=True)
    compared, running = 0, False
    for action in streams["exploration"].integers(ours.actions, 600).tolist():
        if not running:
            theirs = oracle(f"ALE/{name}-v5")
            np.testing.assert_array_equal(ours.reset(), theirs.reset()[0])
        transition = ours.step(action)
        expected, reward, terminated, truncated, _ = theirs.step(action)
        assert (transition.reward, transition.game_reward) == (reward, reward)
        assert (transition.terminal, truncated) == (terminated, False)
        if not terminated:  # a step cut short is where the wrapper shows an older frame
            compared += 1
            assert_equal_but_for_ties(transition.frame, expected, theirs.obs_buffer[0])
        running = not transition.ended
    assert compared > 500


def assert_equal_but_for_ties(frame, expected, screen):
    wrong = frame != expected
    if wrong.any():
        sums, unit = exact_sums(screen)
        assert (2 * (sums[wrong] % unit) == unit).all()
        assert (np.abs(frame.astype(int) - expected.astype(int))[wrong] == 1).all()
