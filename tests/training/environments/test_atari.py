"""Atari games against a bare emulator: screens, sticky actions, no-ops, lives, rewards."""

import json
import subprocess
import sys

import ale_py
import numpy as np
import pytest
from ale_py import roms

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import AtariEnvironment
from capsule.training.environments import make_environment
from capsule.training.environments.preprocessing import AreaResize
from capsule.training.state.streams import Stream
from tests.training.conftest import ROOT
from tests.training.environments.conftest import ATARI, make, play, some_actions


def test_an_action_of_single_frames_is_what_a_step_is():
    spec = ATARI.model_copy(update={"sticky_action_probability": 0.0, "noop_max": 0})
    (one, _), (other, _) = make(spec, training=False), make(spec, training=False)
    assert one.reset().tobytes() == other.reset().tobytes()
    for action in some_actions(one, 60):
        whole, parts = one.step(action), [other.step_frame(action) for _ in range(4)]
        assert parts[-1].frame.tobytes() == whole.frame.tobytes()
        assert sum(part.game_reward for part in parts) == whole.game_reward


def test_a_single_frame_draws_one_uniform():
    environment, streams = make(ATARI)
    environment.reset()
    environment.step_frame(1)
    assert streams["environment"].draws == 1
    environment.step(1)
    assert streams["environment"].draws == 5


ELSEWHERE = """
import json, sys
from capsule.experiment.spec import (AtariEnvironment)
from tests.training.environments.conftest import make, play
spec, actions = json.loads(sys.argv[1])
print(play(make(AtariEnvironment.model_validate_json(spec), 6)[0], actions))
"""


@pytest.mark.slow
@pytest.mark.parametrize("game", ["qbert", "breakout", "ms_pacman"])
def test_later_episodes_equal_those_of_a_fresh_process(game):
    """Some games keep traces of the last episode over a plain reset; Q*bert is one."""
    spec = AtariEnvironment(suite="atari", game=game, noop_max=0, max_episode_frames=160)
    spec = spec.model_copy(update={"terminal_on_life_loss": False})
    environment, _ = make(spec, 6)
    actions = some_actions(environment, 40)
    first = play(environment, actions)
    assert environment._ended
    play(environment, some_actions(environment, 40, seed=1))
    assert play(environment, actions) == first
    arguments = json.dumps([spec.model_dump_json(), actions])
    command = [sys.executable, "-c", ELSEWHERE, arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert (done.stdout.strip(), done.stderr) == (first, "")


def test_the_first_frames_of_an_episode_repeat_no_action_of_the_last_one():
    """An episode depends on the streams' positions at its start, and on nothing before."""
    spec = ATARI.model_copy(update={"noop_max": 0, "sticky_action_probability": 0.9})
    played, streams = make(spec, 6)
    played.reset()
    fire = ale_py.Action.FIRE
    while played._held != fire:
        played.step(played._codes.index(fire))
    fresh, others = make(spec, 6)
    others["environment"].restore(streams["environment"].state())
    for environment in (played, fresh):
        environment.reset()
    assert played.state() == fresh.state()
    assert played.step(0).frame.tobytes() == fresh.step(0).frame.tobytes()
    assert played._held == fresh._held != fire


def bare_emulator(game, **floats):
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", 0)
    for name, value in ({"repeat_action_probability": 0.0} | floats).items():
        ale.setFloat(name, value)
    ale.loadROM(roms.get_rom_path(game))
    ale.reset_game()
    return ale


def joined(*screens):
    return AreaResize(210, 160)(np.maximum.reduce(screens))


def luminance(screen):
    return np.rint(screen @ np.array([0.299, 0.587, 0.114])).astype(np.uint8)


def test_screens_turn_grey_before_they_are_joined():
    """Mnih et al. 2015 join the colours of the screens, which gives another frame here."""
    spec = ATARI.model_copy(update={"sticky_action_probability": 0.0, "noop_max": 0})
    environment, _ = make(spec.model_copy(update={"game": "ms_pacman"}))
    environment.reset()
    ale, screens = bare_emulator("ms_pacman"), []
    for _ in range(4):
        ale.act(ale_py.Action.NOOP)
        screens.append(ale.getScreenRGB())
    frame = environment.step(0).frame
    np.testing.assert_array_equal(frame, joined(*map(luminance, screens[-2:])))
    assert not np.array_equal(frame, joined(luminance(np.maximum(*screens[-2:]))))


def test_sticky_actions_follow_the_stream_frame_by_frame():
    spec = ATARI.model_copy(update={"game": "pong", "noop_max": 0, "max_episode_frames": 10_000})
    environment, _ = make(spec, 2)
    environment.reset()
    ale, uniforms = bare_emulator("pong"), Stream("environment", 2)
    codes, held = ale.getMinimalActionSet(), ale_py.Action.NOOP
    for action in some_actions(environment, 120):
        reward, screens, repeats = 0, [], uniforms.uniforms(4) < 0.25
        for repeat in repeats:
            held = held if repeat else codes[action]
            reward += ale.act(held)
            screens.append(ale.getScreenGrayscale())
        transition = environment.step(action)
        assert transition.game_reward == reward
        np.testing.assert_array_equal(transition.frame, joined(*screens[-2:]))


@pytest.mark.parametrize(("frame_skip", "ends"), [(3, {1, 2}), (4, {1, 3})])
def test_a_lost_life_ends_a_step_and_its_last_screen_is_seen(frame_skip, ends):
    """Breakout takes a life after these frames of a step."""
    changes = {"noop_max": 0, "sticky_action_probability": 0.0, "max_episode_frames": 108_000}
    environment, _ = make(ATARI.model_copy(update={"frame_skip": frame_skip, **changes}))
    lost_at = set()
    for seed in range(4):
        ale, lives, running = bare_emulator("breakout"), 5, True
        environment.reset()
        newest = ale.getScreenGrayscale()
        for action in some_actions(environment, 2_000, seed):
            screens = [newest]
            while len(screens) <= frame_skip and ale.lives() == lives:
                ale.act(ale.getMinimalActionSet()[action])
                screens.append(ale.getScreenGrayscale())
            newest, lost = screens[-1], ale.lives() < lives
            before = screens[-2] if len(screens) > frame_skip else screens[0]
            transition = environment.step(action)
            assert transition.terminal == lost
            np.testing.assert_array_equal(transition.frame, joined(before, newest))
            lives, running = ale.lives(), not ale.game_over()
            if lost:
                lost_at.add(len(screens) - 1)
            if not running:
                break
        assert transition.ended is not running
    assert lost_at == ends


def test_always_sticky_is_what_ale_does_with_certainty():
    spec = ATARI.model_copy(update={"sticky_action_probability": 1.0, "noop_max": 0})
    environment, _ = make(spec)
    environment.reset()
    ale = bare_emulator("breakout", repeat_action_probability=1.0)
    for action in some_actions(environment, 20):
        for _ in range(4):
            ale.act(ale.getMinimalActionSet()[action])
        frame = environment.step(action).frame
    np.testing.assert_array_equal(frame, joined(ale.getScreenGrayscale()))


def test_without_stickiness_nothing_is_drawn():
    spec = ATARI.model_copy(update={"sticky_action_probability": 0.0, "noop_max": 0})
    environment, streams = make(spec)
    play(environment, some_actions(environment, 50))
    assert {stream.draws for stream in streams.values()} == {0}


@pytest.mark.slow
def test_no_ops_are_drawn_per_episode_and_played_as_frames():
    spec = ATARI.model_copy(update={"game": "ms_pacman", "sticky_action_probability": 0.0})
    environment, streams = make(spec, 9)
    draws = Stream("no-op", 9)
    numbers = []
    for _ in range(6):
        frame = environment.reset()
        numbers.append(1 + draws.integer(30))
        ale = bare_emulator("ms_pacman")
        screens = [ale.getScreenGrayscale()]
        for _ in range(numbers[-1]):
            ale.act(ale_py.Action.NOOP)
            screens.append(ale.getScreenGrayscale())
        np.testing.assert_array_equal(frame, joined(*screens[-2:]))
    assert streams["no-op"].draws == 6
    assert len(set(numbers)) > 3


def test_a_game_that_cannot_survive_its_no_ops_is_refused():
    spec = ATARI.model_copy(update={"max_episode_frames": 1})
    environment, _ = make(spec)
    with pytest.raises(CapsuleError, match=r"CAP-T213 environment.noop_max 30"):
        environment.reset()


def until_life_lost(environment):
    """Fire the ball and wait; return the transition in which the bare game loses a life."""
    environment.reset()
    environment.step(1)
    transitions = [environment.step(0) for _ in range(40)]
    return transitions, environment


def test_a_lost_life_ends_the_return_but_not_the_game_in_training():
    plain = ATARI.model_copy(update={"sticky_action_probability": 0.0, "noop_max": 0})
    transitions, environment = until_life_lost(make(plain)[0])
    lost = [index for index, transition in enumerate(transitions) if transition.terminal]
    assert len(lost) == 1
    assert not transitions[lost[0]].ended
    assert environment._ale.lives() == 4


@pytest.mark.parametrize("training", [True, False])
def test_a_lost_life_may_not_matter(training):
    spec = ATARI.model_copy(
        update={
            "sticky_action_probability": 0.0,
            "noop_max": 0,
            "terminal_on_life_loss": not training,
        }
    )
    transitions, environment = until_life_lost(make(spec, training=training)[0])
    assert not any(transition.terminal for transition in transitions)
    assert environment._ale.lives() == 4


def test_game_over_ends_both_and_truncation_only_the_episode():
    spec = ATARI.model_copy(update={"max_episode_frames": 10_000, "noop_max": 0})
    environment, _ = make(spec, training=False)
    environment.reset()
    while not (last := environment.step(1)).ended:
        assert not last.terminal
    assert last.terminal
    short, _ = make(spec.model_copy(update={"max_episode_frames": 10}), training=False)
    short.reset()
    ends = [(transition.terminal, transition.ended) for transition in map(short.step, [0, 0, 0])]
    assert ends == [(False, False), (False, False), (False, True)]
    assert short._frames == 10


@pytest.mark.parametrize(("training", "expected"), [(True, 1.0), (False, 10.0)])
def test_rewards_are_clipped_in_training_only(training, expected):
    spec = ATARI.model_copy(update={"game": "ms_pacman", "max_episode_frames": 2000})
    environment, _ = make(spec, training=training)
    environment.reset()
    while not (transition := environment.step(3)).game_reward:
        pass
    assert (transition.game_reward, transition.reward) == (10.0, expected)


def test_losses_are_clipped_to_minus_one():
    spec = ATARI.model_copy(update={"game": "skiing", "max_episode_frames": 30_000})
    environment, _ = make(spec)
    environment.reset()
    while not (transition := environment.step(0)).game_reward:
        pass
    assert transition.game_reward < -1
    assert transition.reward == -1.0


def test_evaluation_has_neither_no_ops_nor_its_stream():
    stream = Stream("environment", 0)
    environment = make_environment(ATARI, {"environment": stream}, training=False)
    frame = environment.reset()
    np.testing.assert_array_equal(frame, joined(bare_emulator("breakout").getScreenGrayscale()))
    environment.step(0)
    assert stream.draws == 4


@pytest.mark.parametrize(("full", "actions"), [(False, 4), (True, 18)])
def test_action_sets(full, actions):
    environment, _ = make(ATARI.model_copy(update={"full_action_set": full}))
    assert environment.actions == actions


@pytest.mark.slow
@pytest.mark.parametrize("skip", [1, 2, 3])
def test_frame_skips_other_than_four(skip):
    spec = ATARI.model_copy(
        update={"frame_skip": skip, "noop_max": 0, "sticky_action_probability": 0.0}
    )
    environment, _ = make(spec)
    environment.reset()
    ale, screens = bare_emulator("breakout"), []
    for action in (1, 2, 3, 2, 3):
        for _ in range(skip):
            ale.act(ale.getMinimalActionSet()[action])
            screens.append(ale.getScreenGrayscale())
        frame = environment.step(action).frame
    np.testing.assert_array_equal(frame, joined(*screens[-2:]))


@pytest.mark.parametrize(
    ("game", "fix"),
    [("breakot", "Did you mean 'breakout'"), ("combat", "Use a ROM name"), ("zzz", "Use a ROM")],
)
def test_unknown_games_are_refused(game, fix):
    with pytest.raises(CapsuleError, match=f"CAP-T212 environment.game '{game}'") as refused:
        make(ATARI.model_copy(update={"game": game}))
    assert refused.value.fix.startswith(fix)


def test_the_screen_of_an_atari_game_is_the_emulators():
    environment, _ = make(ATARI, training=False)
    environment.reset()
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", 0)
    ale.loadROM(roms.get_rom_path("breakout"))
    assert np.array_equal(environment.screen(), ale.getScreenRGB())
    assert environment.screen().shape == (210, 160, 3)
    assert environment.screen_rate == 15


def test_a_game_says_how_many_lives_are_left():
    spec = ATARI.model_copy(update={"sticky_action_probability": 0.0, "noop_max": 0})
    environment, _ = make(spec, training=False)
    environment.reset()
    assert environment.lives == 5
    environment.step(1)  # fires the ball
    lives = [environment.lives for _ in range(40) if environment.step(0)]
    assert lives == sorted(lives, reverse=True)
    assert lives[-1] == 4
