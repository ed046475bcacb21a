"""Save states: a game that is restored from a copy and the steps since continues unchanged."""

import base64
import json
import subprocess
import sys

import ale_py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import AtariEnvironment, SeedsSpec
from capsule.training.environments import make_environment
from capsule.training.environments.atari import SAVE_STATE_STEPS, AtariGame
from capsule.training.environments.base import Environment, Transition
from capsule.training.state.streams import Stream, make_streams
from tests.training.conftest import ROOT
from tests.training.environments.conftest import play, some_actions

STICKY = AtariEnvironment(suite="atari", game="breakout", sticky_action_probability=0.25)
# Pong's lives cannot be lost; at power-on Q*bert's first frame is half drawn; Yars' Revenge shows
# a wrong first frame after a copy; copies of Atlantis II know of no lives.
GAMES = ["atlantis2", "breakout", "pong", "qbert", "yars_revenge"]


def game(name="breakout", *, seed=1, **changes):
    spec = STICKY.model_copy(update={"game": name, **changes})
    return make_environment(spec, make_streams(SeedsSpec(root=seed)), training=True)


@pytest.fixture(scope="module")
def pairs():
    """Two environments of each game with equal streams; loading a game takes long."""
    return {name: (game(name), game(name)) for name in GAMES}


def begun(pair, seed=1):
    """Begin an equal episode in two environments, whatever happened in them before."""
    for environment in pair:
        environment.rewire(make_streams(SeedsSpec(root=seed)))
        environment.reset()
    return pair


def advance(environment, actions):
    """Play on, through ends of episodes."""
    for action in actions:
        if environment.step(action).ended:
            environment.reset()


def outcome(environment, actions):
    """Return everything that comes out of playing on, and where it ends."""
    seen = []
    for action in actions:
        transition = environment.step(action)
        seen.append((transition.frame.tobytes(), *transition[1:]))
        if transition.ended:
            seen.append(environment.reset().tobytes())
    return seen, environment.state()


def sent(state):
    return json.loads(json.dumps(state))


def refuse_whole_replays(monkeypatch):
    def refuse(*_):
        raise AssertionError("the whole episode is played")

    monkeypatch.setattr(AtariGame, "_play_from_start", refuse)


def counted(monkeypatch, name):
    """Return a list that grows by one with each call of a method of AtariGame."""
    calls, method = [], getattr(AtariGame, name)

    def call(*given):
        calls.append(given)
        return method(*given)

    monkeypatch.setattr(AtariGame, name, call)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("name", GAMES)
@given(
    before=st.integers(2 * SAVE_STATE_STEPS, 400),
    elsewhere=st.integers(0, 60),
    seed=st.integers(0, 9),
)
@settings(deadline=None, max_examples=6)
def test_play_goes_on_from_any_moment_in_another_object(pairs, name, before, elsewhere, seed):
    one, other = begun(pairs[name], seed)
    actions = some_actions(one, before + 150, seed)
    advance(one, actions[:before])
    advance(other, some_actions(other, elsewhere, seed + 10))
    state = sent(one.state())
    frame = other.restore(state)
    assert frame.tobytes() == one.restore(state).tobytes()
    assert other.state() == state
    assert outcome(other, actions[before:]) == outcome(one, actions[before:])


ELSEWHERE = """
import json, sys
from tests.training.environments.test_atari_save_states import digest, game
name, state, actions = json.load(sys.stdin)
environment = game(name)
environment.restore(state)
print(digest(environment, actions))
"""


def digest(environment, actions):
    """Digest what comes out until the episode ends, and all that comes after."""
    first = environment.step(actions[0])
    return f"{first[1:]} {play(environment, actions[1:])}"


@pytest.mark.slow
@pytest.mark.parametrize("name", GAMES)
def test_play_goes_on_in_another_process(name):
    environment = game(name)
    environment.reset()
    actions = some_actions(environment, 500)
    advance(environment, actions[:70])
    state = environment.state()
    assert state["episode"]["mark"] is not None
    command = [sys.executable, "-c", ELSEWHERE]
    told = json.dumps([name, state, actions[70:]])
    done = subprocess.run(command, input=told, capture_output=True, text=True, check=True, cwd=ROOT)
    environment.restore(state)
    assert (done.stdout.strip(), done.stderr) == (digest(environment, actions[70:]), "")


@pytest.mark.slow
def test_lost_lives_and_ends_of_episodes_are_met_again(pairs, monkeypatch):
    one, other = begun(pairs["breakout"])
    refuse_whole_replays(monkeypatch)
    actions = some_actions(one, 700)
    advance(one, actions[:40])
    ends, lives = set(), set()
    for first in range(40, 600, 80):
        state = one.state()
        if state["episode"]["mark"] is None:
            continue
        lives.add(one.lives)
        part = actions[first : first + 100]
        other.restore(sent(state))
        seen = outcome(other, part)
        assert seen == outcome(one, part)
        ends |= {step[3:] for step in seen[0] if isinstance(step, tuple)}
    assert ends == {(False, False), (True, False), (True, True)}
    assert lives > {5}


@pytest.mark.parametrize("ends_after", [2 * SAVE_STATE_STEPS, 3 * SAVE_STATE_STEPS + 5])
def test_an_ended_episode_stays_ended(ends_after):
    one, other = (game(noop_max=0, max_episode_frames=4 * ends_after) for _ in range(2))
    one.reset()
    while not one.step(0).ended:
        pass
    state = sent(one.state())
    assert state["episode"]["mark"]["steps"] <= ends_after - SAVE_STATE_STEPS
    assert other.restore(state).tobytes() == one._frame.tobytes()
    with pytest.raises(RuntimeError, match="reset"):
        other.step(0)
    assert other.reset().tobytes() == one.reset().tobytes()


@pytest.mark.slow
def test_few_steps_are_played_however_long_the_episode(pairs, monkeypatch):
    one, other = begun(pairs["pong"])
    played = counted(monkeypatch, "_advance")
    for steps, action in enumerate(some_actions(one, 200)):
        if steps % 7 == 0:
            played.clear()
            other.restore(one.state())
            assert len(played) == (
                steps if steps < 32 else SAVE_STATE_STEPS + steps % SAVE_STATE_STEPS
            )
        one.step(action)


def test_a_copy_that_leads_elsewhere_is_made_good_by_the_whole_episode(monkeypatch):
    one, other = game(), game()
    one.reset()
    advance(one, some_actions(one, 60))
    state = one.state()
    paste = AtariGame._return_to

    def incomplete(self, counters, emulator):
        done = paste(self, counters, emulator)
        self._ale.act(ale_py.Action.FIRE)
        return done

    monkeypatch.setattr(AtariGame, "_return_to", incomplete)
    played = counted(monkeypatch, "_play_from_start")
    other.restore(state)
    assert len(played) == 1
    assert other.state() == state


def test_games_whose_copies_lack_counters_are_played_whole():
    one, other = game("miniature_golf"), game("miniature_golf")
    one.reset()
    actions = some_actions(one, 200)
    advance(one, actions[:80])
    state = sent(one.state())
    assert state["episode"]["mark"] is None
    other.restore(state)
    assert outcome(other, actions[80:]) == outcome(one, actions[80:])


def tampered(state, **changes):
    state = sent(state)
    state["episode"]["mark"].update(changes)
    return state


@pytest.mark.slow
def test_damaged_marks_are_refused(pairs):
    one, other = begun(pairs["breakout"])
    advance(one, some_actions(one, 50))
    state = one.state()
    emulator = bytearray(base64.b64decode(state["episode"]["mark"]["emulator"]))
    emulator[len(emulator) // 2] ^= 1
    for damaged in (
        tampered(state, emulator=base64.b64encode(emulator).decode()),
        tampered(state, emulator=base64.b64encode(b"another format").decode()),
        tampered(state, emulator="no base64"),
        tampered(state, counters={"frames": 1, "held": 1, "lives": 5}),
        tampered(state, counters={"frames": 1, "held": 99, "lives": 5}),
        tampered(state, counters={}),
        tampered(state, steps="16"),
        tampered(state, other=1),
        tampered(state, streams={"other": {}}),
    ):
        with pytest.raises(CapsuleError, match="CAP-T211"):
            other.restore(damaged)


@pytest.mark.parametrize(
    "episode",
    [
        {"actions": "/w=="},  # no action has the code 255
        {"actions": "AAAA/w=="},
        {"actions": "A"},
        {"actions": None},
        {"start": {"no-op": {"draws": 0}}},
        {"start": None},
    ],
)
def test_damaged_episodes_are_refused(episode):
    one, other = game(), game()
    one.reset()
    one.step(0)
    state = sent(one.state())
    state["episode"].update(episode)
    with pytest.raises(CapsuleError, match="CAP-T211"):
        other.restore(state)
    del state["episode"]
    with pytest.raises(CapsuleError, match="CAP-T211 the saved episode cannot be played again"):
        other.restore(state)


class Keyboard(Environment):
    """Shows the last of 300 actions."""

    actions = 300
    frame_shape = (1,)
    frame_dtype = np.dtype(np.int64)

    def _begin(self):
        return np.zeros(1, np.int64)

    def _advance(self, action):
        return Transition(np.array([action]), 0.0, 0.0, terminal=False, ended=False)


def test_actions_may_need_more_than_a_byte():
    one, other = (Keyboard({"environment": Stream("environment", 0)}) for _ in range(2))
    one.reset()
    for action in (299, 256, 255, 0, 298):
        one.step(action)
    state = sent(one.state())
    assert other.restore(state).tolist() == [298]
    assert other._taken.tolist() == [299, 256, 255, 0, 298]
