"""Environments: randomness only from the streams, pure episodes, exact restoring, the rules."""

import base64
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import GymnasiumEnvironment, SeedsSpec
from capsule.training.state.streams import make_streams
from tests.training.environments.conftest import ATARI, CARTPOLE, MINATAR, make, play, some_actions

POSITIONS = GymnasiumEnvironment(
    suite="gymnasium", id="popgym-PositionOnlyCartPoleEasy-v0", modules=("popgym",)
)
MINIGRID = GymnasiumEnvironment(
    suite="gymnasium", id="MiniGrid-MemoryS7-v0", modules=("minigrid",), observation="image"
)
IMAGES = MINIGRID.model_copy(update={"frames": "image", "frame_stack": 2})
SPECS = [ATARI, CARTPOLE, POSITIONS, MINIGRID, IMAGES, *MINATAR]
NAMES = [f"{spec.suite}-{getattr(spec, 'game', None) or spec.id}" for spec in SPECS]
NAMES[SPECS.index(IMAGES)] += "-image"
every_suite = pytest.mark.parametrize("spec", SPECS, ids=NAMES)


@every_suite
def test_frames_have_the_announced_shape_and_type(spec):
    environment, _ = make(spec)
    transitions = [environment.step(action) for action in _first_episode(environment, 20)]
    for transition in transitions:
        assert transition.frame.shape == environment.frame_shape
        assert transition.frame.dtype == environment.frame_dtype
        assert [type(value) for value in transition[1:]] == [float, float, bool, bool]
    assert len({id(transition.frame) for transition in transitions}) == len(transitions)


def _first_episode(environment, count):
    environment.reset()
    return some_actions(environment, count)[: 1 if environment.actions == 2 else count]


@pytest.mark.slow
@every_suite
def test_equal_seeds_give_equal_episodes_and_others_do_not(spec):
    one, streams = make(spec, 1)
    actions = some_actions(one, 150)
    reference = play(one, actions)
    again, same_streams = make(spec, 1)
    assert play(again, actions) == reference
    assert [stream.profile() for stream in streams.values()] == [
        stream.profile() for stream in same_streams.values()
    ]
    assert play(make(spec, 2)[0], actions) != reference


@every_suite
def test_only_environment_and_no_op_streams_are_drawn_from(spec):
    environment, streams = make(spec)
    play(environment, some_actions(environment, 60))
    assert {name for name, stream in streams.items() if stream.draws} <= {"environment", "no-op"}
    assert streams["environment"].draws > 0


@every_suite
def test_restoring_in_any_episode_continues_equal(spec):
    whole, _ = make(spec, 3)
    actions = some_actions(whole, 200)
    whole.reset()
    for action in actions[:130]:
        if whole.step(action).ended:
            whole.reset()
    state = json.loads(json.dumps(whole.state()))
    resumed, streams = make(spec, 3)
    frame = resumed.restore(state)
    assert frame.tobytes() == whole.restore(state).tobytes()
    assert resumed.state() == state
    for action in actions[130:]:
        expected, transition = whole.step(action), resumed.step(action)
        assert transition.frame.tobytes() == expected.frame.tobytes()
        assert transition[1:] == expected[1:]
        if expected.ended:
            assert resumed.reset().tobytes() == whole.reset().tobytes()
    assert streams["environment"].draws > 0


@given(before=st.integers(0, 120), moved=st.integers(0, 40))
@settings(deadline=None, max_examples=40)
def test_restoring_cartpole_at_any_step_continues_equal(before, moved):
    environment, _ = make(CARTPOLE, 8)
    actions = some_actions(environment, 200, seed=before)
    play(environment, actions[:before])
    state = environment.state()
    ended = environment._ended
    future = actions[before:]
    expected = play(environment, future) if ended else _continue(environment, future)
    play(environment, actions[:moved])
    environment.restore(state)
    assert (play(environment, future) if ended else _continue(environment, future)) == expected


def mixed(environment, actions, single):
    """Take actions, for one frame each where ``single`` says so; return all that came out."""
    seen = []
    for action, alone in zip(actions, single, strict=True):
        transition = environment.step_frame(action) if alone else environment.step(action)
        seen.append((transition.frame.tobytes(), *transition[1:]))
        if transition.ended:
            seen.append(environment.reset().tobytes())
    return seen


@every_suite
def test_an_episode_of_steps_and_single_frames_is_restored(spec):
    one, _ = make(spec, 3)
    other, _ = make(spec, 3)
    one.reset()
    actions = some_actions(one, 160)
    single = [number % 7 in {0, 1, 5} for number in range(160)]
    mixed(one, actions[:90], single[:90])
    state = json.loads(json.dumps(one.state()))
    other.restore(state)
    assert other.state() == state
    assert mixed(other, actions[90:], single[90:]) == mixed(one, actions[90:], single[90:])
    assert other.state() == one.state()


def _continue(environment, actions):
    first = environment.step(actions[0])
    return repr(first), play(environment, actions[1:])


@every_suite
def test_restoring_an_environment_that_never_began(spec):
    fresh, streams = make(spec, 4)
    state = json.loads(json.dumps(fresh.state()))
    actions = some_actions(fresh, 40)
    expected = play(fresh, actions)
    assert fresh.restore(state) is None
    assert {stream.draws for stream in streams.values()} == {0}
    with pytest.raises(RuntimeError, match="reset"):
        fresh.step(0)
    assert play(fresh, actions) == expected


def test_another_seeds_state_is_refused():
    one, _ = make(CARTPOLE, 1)
    one.reset()
    other, _ = make(CARTPOLE, 2)
    with pytest.raises(CapsuleError, match="CAP-T201"):
        other.restore(one.state())


@every_suite
def test_a_replay_that_ends_elsewhere_is_refused(spec):
    environment, _ = make(spec)
    environment.reset()
    environment.step(1)
    state = environment.state()
    state["episode"]["actions"] = base64.b64encode(bytes([1, 0])).decode()
    with pytest.raises(CapsuleError, match="CAP-T211"):
        environment.restore(state)


@every_suite
def test_rewiring_draws_from_the_new_streams(spec):
    environment, _ = make(spec, 1)
    actions = some_actions(environment, 60)
    play(environment, actions)
    environment.rewire(make_streams(SeedsSpec(root=2)))
    assert play(environment, actions) == play(make(spec, 2)[0], actions)


@every_suite
def test_stepping_beyond_the_end_is_a_bug(spec):
    environment, _ = make(spec)
    with pytest.raises(RuntimeError, match="reset"):
        environment.step(0)
    environment.reset()
    while not environment.step(environment.actions - 1).ended:
        pass
    with pytest.raises(RuntimeError, match="reset"):
        environment.step(0)
