"""MinAtar games against their package: frames, sticky actions, the step limit."""

import subprocess
import sys

import numpy as np
import pytest

from capsule.experiment.errors import CapsuleError
from capsule.training.environments.minatar import _game_module
from capsule.training.state.streams import Stream
from tests.training.conftest import ROOT
from tests.training.environments.conftest import MINATAR, make, some_actions


def test_minatar_frames_are_the_games_channels():
    spec = MINATAR[1].model_copy(update={"sticky_action_probability": 0.0})
    environment, streams = make(spec, 5)
    first = environment.reset()
    reference = _game_module("breakout").Env(ramping=True)
    reference.random = np.random.RandomState(Stream("environment", 5).integer(2**32))
    reference.reset()
    np.testing.assert_array_equal(first, np.moveaxis(reference.state(), 2, 0))
    for action in (1, 3, 0, 5):
        reward, _ = reference.act(action)
        transition = environment.step(action)
        assert transition.game_reward == reward
        np.testing.assert_array_equal(transition.frame, np.moveaxis(reference.state(), 2, 0))
    assert set(np.unique(first)) == {0, 1}
    assert streams["environment"].draws == 1


def test_minatar_games_become_more_difficult():
    """Asterix is faster after 100 steps; with this seed, the player is still alive then."""
    spec = MINATAR[0].model_copy(update={"sticky_action_probability": 0.0})
    environment, _ = make(spec, 10)
    environment.reset()
    games = [_game_module("asterix").Env(ramping=ramping) for ramping in (True, False)]
    for game in games:
        game.random = np.random.RandomState(Stream("environment", 10).integer(2**32))
        game.reset()
    for action in some_actions(environment, 120):
        transition = environment.step(action)
        assert not transition.ended
        for game in games:
            game.act(action)
    ramping, steady = (np.moveaxis(game.state(), 2, 0) for game in games)
    np.testing.assert_array_equal(transition.frame, ramping)
    assert (ramping != steady).any()


def test_minatar_sticky_actions_follow_the_stream():
    spec = MINATAR[4].model_copy(update={"sticky_action_probability": 0.5})
    sticky, _ = make(spec, 5)
    plain, _ = make(spec.model_copy(update={"sticky_action_probability": 0.0}), 5)
    np.testing.assert_array_equal(sticky.reset(), plain.reset())
    draws, held = Stream("environment", 5), 0
    draws.integer(2**32)
    for action in some_actions(sticky, 15):
        held = held if draws.uniform() < 0.5 else action
        np.testing.assert_array_equal(sticky.step(action).frame, plain.step(held).frame)


def test_minatar_episodes_are_capped():
    environment, _ = make(MINATAR[2].model_copy(update={"max_episode_steps": 2}))
    environment.reset()
    ends = [(t.terminal, t.ended) for t in map(environment.step, [0, 0])]
    assert ends == [(False, False), (False, True)]


def test_a_missing_minatar_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "minatar", None)
    with pytest.raises(CapsuleError, match="CAP-T215") as refused:
        make(MINATAR[0])
    assert "image.packages" in refused.value.fix


@pytest.mark.slow
def test_minatar_loads_no_plotting_library():
    code = (
        "import sys; from tests.training.environments.conftest import MINATAR, make\n"
        "make(MINATAR[0])[0].reset()\n"
        "print({'matplotlib', 'seaborn', 'minatar', 'torch'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert (done.stdout.strip(), done.stderr) == ("set()", "")


def test_the_screen_of_minatar_shows_every_object_in_a_colour_of_its_own():
    environment, _ = make(MINATAR[1])
    frame, screen = environment.reset(), environment.screen()
    assert (screen.shape, screen.dtype) == ((10, 10, 3), np.uint8)
    assert np.array_equal(screen.any(axis=2), frame.any(axis=0))
    topmost = frame.argmax(axis=0)[frame.any(axis=0)]
    colours = [tuple(colour) for colour in screen[frame.any(axis=0)].tolist()]
    assert len(set(zip(topmost.tolist(), colours, strict=True))) == len(set(topmost.tolist()))
    assert len(set(colours)) == len(set(topmost.tolist()))


@pytest.mark.parametrize("spec", MINATAR, ids=lambda spec: spec.game)
def test_a_game_has_six_actions_and_one_frame_for_an_observation(spec):
    environment, _ = make(spec)
    assert environment.actions == 6
    assert (environment.frame_stack, environment.frame_skip, environment.lives) == (1, 1, 0)
    channels, height, width = environment.frame_shape
    assert (height, width, environment.frame_dtype) == (10, 10, np.uint8)
    assert environment.reset().shape == (channels, 10, 10)


def test_the_end_of_a_game_ends_the_return():
    """In Breakout without a move, the ball misses the paddle within a few steps."""
    spec = MINATAR[1].model_copy(update={"sticky_action_probability": 0.0})
    environment, _ = make(spec)
    environment.reset()
    ends = []
    while not environment.ended:
        transition = environment.step(0)
        ends.append((transition.terminal, transition.ended))
    assert ends == [(False, False)] * (len(ends) - 1) + [(True, True)]
    assert len(ends) < 20


def test_every_episode_has_a_seed_of_its_own():
    environment, streams = make(MINATAR[2].model_copy(update={"sticky_action_probability": 0.0}))
    frames = {environment.reset().tobytes() for _ in range(4)}
    assert streams["environment"].draws == 4
    assert len(frames) > 1
