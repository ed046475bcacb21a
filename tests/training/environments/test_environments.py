"""Environments: randomness only from the streams, pure episodes, exact restoring, the rules."""

import base64
import json
import subprocess
import sys
from pathlib import Path

import ale_py
import gymnasium
import numpy as np
import pytest
import xxhash
from ale_py import roms
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.contract import PROJECT_VARIABLE
from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import (
    AtariEnvironment,
    GymnasiumEnvironment,
    MinAtarEnvironment,
    SeedsSpec,
)
from capsule.training.environments import make_environment
from capsule.training.environments.minatar import _game_module
from capsule.training.environments.preprocessing import AreaResize
from capsule.training.state.frames import FrameLayout
from capsule.training.state.streams import Stream, make_streams

ATARI = AtariEnvironment(
    suite="atari", game="breakout", sticky_action_probability=0.25, max_episode_frames=500
)
CARTPOLE = GymnasiumEnvironment(suite="gymnasium", id="CartPole-v1")
POSITIONS = GymnasiumEnvironment(
    suite="gymnasium", id="popgym-PositionOnlyCartPoleEasy-v0", modules=("popgym",)
)
MINIGRID = GymnasiumEnvironment(
    suite="gymnasium", id="MiniGrid-MemoryS7-v0", modules=("minigrid",), observation="image"
)
IMAGES = MINIGRID.model_copy(update={"frames": "image", "frame_stack": 2})
MINATAR = [
    MinAtarEnvironment(suite="minatar", game=game)
    for game in ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
]
SPECS = [ATARI, CARTPOLE, POSITIONS, MINIGRID, IMAGES, *MINATAR]
NAMES = [f"{spec.suite}-{getattr(spec, 'game', None) or spec.id}" for spec in SPECS]
NAMES[SPECS.index(IMAGES)] += "-image"
ROOT = Path(__file__).parents[3]
every_suite = pytest.mark.parametrize("spec", SPECS, ids=NAMES)


def make(spec, seed=0, *, training=True, **seeds):
    streams = make_streams(SeedsSpec(root=seed, **seeds))
    return make_environment(spec, streams, training=training), streams


def play(environment, actions):
    """Step through ``actions``, beginning episodes as needed; digest everything that came out."""
    digest, running = xxhash.xxh3_128(), False
    for action in actions:
        if not running:
            digest.update(environment.reset().tobytes())
        transition = environment.step(action)
        digest.update(transition.frame.tobytes())
        digest.update(repr(transition[1:]).encode())
        running = not transition.ended
    return digest.hexdigest()


def some_actions(environment, count, seed=0):
    return Stream("test-actions", seed).integers(environment.actions, count).tolist()


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


ELSEWHERE = """
import json, sys
from capsule.experiment.spec import (AtariEnvironment)
from tests.training.environments.test_environments import make, play
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
    [("breakot", "did you mean 'breakout'"), ("combat", "use a ROM name"), ("zzz", "use a ROM")],
)
def test_unknown_games_are_refused(game, fix):
    with pytest.raises(CapsuleError, match=f"CAP-T212 environment.game '{game}'") as refused:
        make(ATARI.model_copy(update={"game": game}))
    assert refused.value.fix.startswith(fix)


def test_cartpole_resets_from_the_stream_and_truncates():
    environment, _ = make(CARTPOLE.model_copy(update={"max_episode_steps": 3}), 7)
    environment.reset()
    ends = [(t.terminal, t.ended) for t in map(environment.step, [0, 1, 0])]
    assert ends == [(False, False), (False, False), (False, True)]
    seeds = Stream("environment", 7)
    reference = gymnasium.make("CartPole-v1")
    seeds.integer(2**32)
    expected, _ = reference.reset(seed=seeds.integer(2**32))
    np.testing.assert_array_equal(environment.reset(), expected)


class Endless(gymnasium.Env):
    """An environment that never ends by itself."""

    observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):  # noqa: ARG002 - the interface's
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action):  # noqa: ARG002
        return np.ones(1, np.float32), 1.0, False, False, {}


gymnasium.register("capsule/Endless-v0", Endless)


class Choosing(gymnasium.Env):
    """An environment that shows the action it was given."""

    observation_space = spaces.Box(-9.0, 9.0, (3,), np.float32)

    def __init__(self, actions):
        self.action_space = actions

    def reset(self, *, seed=None, options=None):  # noqa: ARG002 - the interface's
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        shown = np.zeros(3, np.float32)
        shown[: np.size(action)] = np.ravel(action)
        return shown, 0.0, False, False, {}


CHOICES = {
    "Plain": (spaces.Discrete(3, start=-1), [(-1,), (0,), (1,)]),
    "Several": (
        spaces.MultiDiscrete([3, 2], start=[0, 5]),
        [(0, 5), (0, 6), (1, 5), (1, 6), (2, 5), (2, 6)],
    ),
    "Binary": (spaces.MultiBinary(2), [(0, 0), (0, 1), (1, 0), (1, 1)]),
    "Many": (spaces.MultiBinary(13), None),
}
for name, (space, _) in CHOICES.items():
    gymnasium.register(f"capsule/{name}-v0", Choosing, kwargs={"actions": space})


@pytest.mark.parametrize("name", [name for name, (_, taken) in CHOICES.items() if taken])
def test_every_combination_of_choices_is_an_action(name):
    environment, _ = make(CARTPOLE.model_copy(update={"id": f"capsule/{name}-v0"}))
    expected = CHOICES[name][1]
    assert environment.actions == len(expected)
    environment.reset()
    for action, taken in enumerate(expected):
        frame = environment.step(action).frame
        assert tuple(frame[: len(taken)]) == taken


def test_an_environment_of_the_source_tree(tmp_path, monkeypatch):
    module = tmp_path / "capsule_own_task.py"
    module.write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "gymnasium.register('capsule/Own-v0', CartPoleEnv)\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(PROJECT_VARIABLE, str(tmp_path))
    own, _ = make(
        CARTPOLE.model_copy(update={"id": "capsule/Own-v0", "modules": ("capsule_own_task",)}), 3
    )
    known, _ = make(CARTPOLE, 3)
    np.testing.assert_array_equal(own.reset(), known.reset())


def steps_of(identifier, action, limit=None, most=1_000):
    """Return the steps of an episode, and whether it was truncated; ``most``: it did not end."""
    environment, _ = make(
        GymnasiumEnvironment(suite="gymnasium", id=identifier, max_episode_steps=limit)
    )
    environment.reset()
    for step in range(1, most + 1):
        transition = environment.step(action)
        if transition.ended:
            return step, not transition.terminal
    return most, False


def test_a_registered_time_limit_holds_unless_the_spec_gives_another():
    """MountainCar does not end before its limit if nobody accelerates."""
    assert gymnasium.spec("MountainCar-v0").max_episode_steps == 200
    assert gymnasium.spec("Acrobot-v1").max_episode_steps == 500
    assert steps_of("MountainCar-v0", 1) == (200, True)
    assert steps_of("Acrobot-v1", 1) == (500, True)
    assert steps_of("MountainCar-v0", 1, limit=7) == (7, True)
    assert steps_of("MountainCar-v0", 1, limit=300) == (300, True)


def test_without_a_registered_time_limit_there_is_none_unless_the_spec_gives_one():
    assert gymnasium.spec("capsule/Endless-v0").max_episode_steps is None
    assert steps_of("capsule/Endless-v0", 0) == (1_000, False)
    assert steps_of("capsule/Endless-v0", 0, limit=30) == (30, True)


@pytest.mark.parametrize(
    ("identifier", "reason"),
    [
        ("CartPole-v99", "CartPole"),
        ("NoSuch-v0", "NoSuch"),
        ("MountainCarContinuous-v0", "finitely many actions, and it has Box"),
        ("capsule/Many-v0", "are 8,192 combinations, and 4,096 are supported"),
        ("MiniGrid-MemoryS7-v0", "observations Dict.*MissionSpace"),
    ],
)
def test_unusable_gymnasium_environments_are_refused(identifier, reason):
    with pytest.raises(CapsuleError, match=rf"CAP-T214 environment.id '{identifier}'.*{reason}"):
        make(CARTPOLE.model_copy(update={"id": identifier, "modules": ("minigrid", "popgym")}))


def test_missing_modules_are_named():
    with pytest.raises(CapsuleError, match=r"CAP-T214 .*'no_such.module' cannot") as refused:
        make(CARTPOLE.model_copy(update={"modules": ("no_such.module",)}))
    assert "image.packages" in refused.value.fix


def test_hidden_numbers_are_left_out():
    seen, _ = make(CARTPOLE, 3)
    blind, _ = make(CARTPOLE.model_copy(update={"masked_observations": (3, 1)}), 3)
    assert blind.frame_shape == (2,)
    np.testing.assert_array_equal(blind.reset(), seen.reset()[[0, 2]])
    np.testing.assert_array_equal(blind.step(1).frame, seen.step(1).frame[[0, 2]])


@pytest.mark.parametrize(
    ("changes", "reason", "fix"),
    [
        (
            {"masked_observations": (0, 4)},
            "environment.masked_observations 4: a flat observation .* has 4",
            "from 0 to 3",
        ),
        ({"masked_observations": (0, 1, 2, 3)}, "hides all 4 numbers", "leave one"),
        ({"observation": "image"}, "'image' is not an entry of Box", "remove it"),
        (
            {"observation": "picture", "id": "MiniGrid-MemoryS7-v0", "modules": ("minigrid",)},
            "'picture' is not an entry of Dict",
            "name one of direction, image, mission",
        ),
    ],
)
def test_what_does_not_fit_the_observations_is_refused(changes, reason, fix):
    with pytest.raises(CapsuleError, match=f"CAP-T216 .*{reason}") as refused:
        make(CARTPOLE.model_copy(update=changes))
    assert fix in refused.value.fix


class Mixed(gymnasium.Env):
    """Shows one of each kind of space, and counts."""

    observation_space = spaces.Dict(
        {
            "b": spaces.Tuple([spaces.Discrete(3, start=5), spaces.MultiBinary(2)]),
            "a": spaces.Box(-9.0, 9.0, (2, 2), np.float64),
            "c": spaces.MultiDiscrete([2, 3]),
        }
    )
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):  # noqa: ARG002 - the interface's
        super().reset(seed=seed)
        return self.seen(), {}

    def step(self, action):
        return self.seen(), action, False, False, {}

    def seen(self):
        return {
            "a": np.array([[1.5, 2.0], [3.0, -4.0]]),
            "b": (6, np.array([0, 1], np.int8)),
            "c": np.array([1, 2]),
        }


def test_every_kind_of_space_is_made_flat():
    gymnasium.register("capsule/Mixed-v0", Mixed)
    spec = CARTPOLE.model_copy(update={"id": "capsule/Mixed-v0"})
    whole, _ = make(spec)
    # a, then the one-hot of 6 among 5, 6 and 7 and the bits of b, then both one-hots of c
    flat = [1.5, 2, 3, -4, 0, 1, 0, 0, 1, 0, 1, 0, 0, 1]
    np.testing.assert_array_equal(whole.reset(), np.array(flat, np.float32))
    entry, _ = make(spec.model_copy(update={"observation": "b", "masked_observations": (0,)}))
    np.testing.assert_array_equal(entry.reset(), np.array([1, 0, 0, 1], np.float32))
    assert whole.step(1).reward == 1.0


class Screen(gymnasium.Env):
    """Shows pictures: in colours, grey, with numbers that are no bytes."""

    shapes = spaces.Dict(
        {
            "colour": spaces.Box(0, 255, (4, 6, 3), np.uint8),
            "grey": spaces.Box(0, 255, (4, 6), np.uint8),
            "floats": spaces.Box(0.0, 1.0, (4, 6, 3), np.float32),
            "flat": spaces.Box(0, 255, (24,), np.uint8),
            "kind": spaces.Discrete(3),
        }
    )
    observation_space = shapes
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):  # noqa: ARG002 - the interface's
        super().reset(seed=seed)
        self.canvas = np.arange(72, dtype=np.uint8).reshape(4, 6, 3)  # drawn over in every step
        return self.seen(), {}

    def step(self, action):
        self.canvas[:] += np.uint8(action)
        return self.seen(), 0.0, False, False, {}

    def seen(self):
        return {
            "colour": self.canvas,
            "grey": self.canvas[..., 0],
            "floats": self.canvas / np.float32(255),
            "flat": self.canvas.ravel()[:24],
            "kind": 1,
        }


gymnasium.register("capsule/Screen-v0", Screen)


def screen(**changes):
    spec = {"suite": "gymnasium", "id": "capsule/Screen-v0", "frames": "image", **changes}
    return make(GymnasiumEnvironment.model_validate_json(json.dumps(spec)))[0]


def test_an_image_has_its_channels_first_and_keeps_its_numbers():
    environment = screen(observation="colour", frame_stack=3)
    assert environment.frame_shape == (3, 4, 6)
    assert (environment.frame_dtype, environment.frame_stack) == (np.uint8, 3)
    first = environment.reset()
    picture = np.arange(72, dtype=np.uint8).reshape(4, 6, 3)
    for channel in range(3):
        np.testing.assert_array_equal(first[channel], picture[..., channel])
    second = environment.step(1).frame
    np.testing.assert_array_equal(second, first + 1)  # and the first one was not drawn over
    assert second.flags.c_contiguous


def test_numbers_stand_behind_an_image_in_the_order_of_the_spec():
    environment = screen(observation="grey", numbers=["kind", "floats"], frame_stack=2)
    assert environment.layout == FrameLayout((4, 6), 3 + 72)
    assert environment.frame_shape == environment.layout.packed_shape == (24 + 4 * 75,)
    assert (environment.frame_dtype, environment.frame_stack) == (np.uint8, 2)
    frame = environment.reset()
    canvas = np.arange(72, dtype=np.uint8)
    np.testing.assert_array_equal(frame[:24], canvas[::3])
    numbers = np.concatenate(([0, 1, 0], canvas / np.float32(255))).astype("<f4")
    assert frame[24:].tobytes() == numbers.tobytes()
    np.testing.assert_array_equal(environment.step(1).frame[:24], canvas[::3] + 1)


@pytest.mark.parametrize("name", ["nowhere", "text"])
def test_numbers_must_be_numbers(name, monkeypatch):
    told = spaces.Dict({**Screen.shapes, "text": spaces.Text(9)})
    monkeypatch.setattr(Screen, "observation_space", told)
    said = rf"CAP-T216 environment\.numbers: '{name}' is not an entry of numbers"
    with pytest.raises(CapsuleError, match=said) as refused:
        screen(observation="grey", numbers=[name])
    assert "colour, flat, floats, grey, kind" in refused.value.fix


def test_an_image_may_be_grey():
    environment = screen(observation="grey")
    assert (environment.frame_shape, environment.frame_stack) == ((4, 6), 1)
    first = environment.reset()
    np.testing.assert_array_equal(first, np.arange(0, 72, 3, dtype=np.uint8).reshape(4, 6))
    np.testing.assert_array_equal(environment.step(1).frame, first + 1)


@pytest.mark.parametrize("name", ["floats", "flat", "kind", None])
def test_only_bytes_in_rows_and_columns_are_an_image(name):
    with pytest.raises(CapsuleError, match=r"CAP-T216 environment\.frames 'image'") as refused:
        screen(observation=name)
    assert "frames: flat" in refused.value.fix


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
        "import sys; from tests.training.environments.test_environments import MINATAR, make\n"
        "make(MINATAR[0])[0].reset()\n"
        "print({'matplotlib', 'seaborn', 'minatar', 'torch'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert (done.stdout.strip(), done.stderr) == ("set()", "")
