"""Unrolls: their streams and digests; sampling of actions, stacking of frames."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.experiment.spec import SeedsSpec
from capsule.training.acting.inference import sample
from capsule.training.impala.actors.actor_worker import UnrollWorker
from capsule.training.impala.actors.unrolls import Unroll, stacked, stream_profiles
from capsule.training.state.streams import Stream
from tests.training.impala.actors.conftest import SEEDS, play, settings_of

pytestmark = pytest.mark.usefixtures("one_thread")


def test_streams_belong_to_one_actor_each_and_an_action_takes_one_draw():
    settings = settings_of(length=6)
    (made,) = play(UnrollWorker(settings, range(3)), range(3), [0], settings)
    profiles = {
        profile.name: profile
        for actor, _, after in made
        for profile in stream_profiles(SEEDS, actor, after)
    }
    assert len({profile.key for profile in profiles.values()}) == 9
    for actor in range(3):
        unroll = made[actor].experience
        assert profiles[f"exploration/{actor}"].draws == unroll.acted.sum()
        assert profiles[f"environment/{actor}"].draws == (unroll.ages == 0).sum()
        assert profiles[f"no-op/{actor}"].seed == 5
    another = replace(settings, seeds=SeedsSpec(root=4))
    ((other,),) = play(UnrollWorker(another, [0]), [0], [0], another)
    assert other.experience.digest() != made[0].experience.digest()


def test_a_digest_is_of_every_part():
    settings = settings_of()
    (((_, unroll, _),),) = play(UnrollWorker(settings, [0]), [0], [0], settings)
    digests = {unroll.digest()}
    parts = {name: part for name, part in unroll._asdict().items() if np.size(part)}
    assert set(unroll._fields) - set(parts) == {"instructions"}  # there are none here
    for name, part in parts.items():
        changed = np.array(part).copy()
        changed.reshape(-1).view(np.uint8)[-1] ^= 1
        value = changed.tolist() if isinstance(part, list) else changed
        digests.add(unroll._replace(**{name: value}).digest())
    assert len(digests) == 1 + len(parts)
    assert unroll._replace(state=unroll.state.copy()).digest() in digests


# --- sampling -------------------------------------------------------------------------------------


def inverse(probabilities, uniform):
    """Return the first action whose cumulated probability exceeds that share of all of it."""
    total, target = 0.0, uniform * sum(probabilities)
    for action, probability in enumerate(probabilities):
        total += probability
        if total > target:
            return action
    raise AssertionError("no action")


WEIGHTS = st.lists(
    st.sampled_from([0.0, 1e-45, 1e-30, 0.25, 0.5, 1.0]) | st.floats(0, 1, width=32),
    min_size=1,
    max_size=18,
).filter(any)
LAST = 1 - 2.0**-53


@given(WEIGHTS, st.sampled_from([0.0, 2.0**-53, 0.25, 0.5, LAST]) | st.floats(0, LAST))
def test_an_action_is_where_the_distribution_function_passes(weights, uniform):
    probabilities = np.array(weights, np.float32)
    action = sample(probabilities, uniform)
    assert action == inverse(probabilities.astype(float).tolist(), uniform)
    assert probabilities[action] > 0


def test_borders_belong_to_the_action_that_begins_there():
    probabilities = np.array([0, 0.25, 0, 0.5, 0.25, 0], np.float32)
    borders = {0.0: 1, 0.25: 3, 0.75: 4, LAST: 4}
    for uniform, action in borders.items():
        assert sample(probabilities, uniform) == action
    assert sample(probabilities, np.nextafter(0.25, 0)) == 1
    assert sample(probabilities, np.nextafter(0.75, 0)) == 3


def test_actions_are_as_frequent_as_they_are_probable():
    probabilities = np.array([0.1, 0.6, 0.3], np.float32)
    uniforms = Stream("exploration", 1).uniforms(20_000)
    counts = np.bincount([sample(probabilities, uniform) for uniform in uniforms.tolist()])
    np.testing.assert_allclose(counts / 20_000, probabilities, atol=0.01)


# --- stacking -------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(0, 6), st.lists(st.integers(1, 4), min_size=4, max_size=4))
def test_frames_of_an_earlier_episode_are_zeros(stack, before, lengths):
    """Frames are numbered through; an unroll begins ``before`` steps into an episode."""
    ages = [before, *[age for length in lengths for age in range(length)]]
    rows = len(ages)
    frames = np.arange(1, stack + rows, dtype=np.uint8).reshape(-1, 1)
    others = dict.fromkeys(Unroll._fields, np.zeros(0))
    unroll = Unroll(**others | {"frames": frames, "ages": np.array(ages)})
    found = stacked([unroll, unroll], stack)
    assert found.shape == (rows, 2, stack, 1)
    assert found.dtype == np.uint8
    for row, age in enumerate(ages):
        expected = [row + stack - back if back <= age else 0 for back in range(stack - 1, -1, -1)]
        assert found[row, 0, :, 0].tolist() == found[row, 1, :, 0].tolist() == expected
