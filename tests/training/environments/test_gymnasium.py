"""Gymnasium tasks: actions, time limits, and observations as vectors, images and numbers."""

import json
import re
import sys
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from capsule.experiment.contract import PROJECT_VARIABLE
from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import GymnasiumEnvironment
from capsule.training.environments.entries import entries_of
from capsule.training.state.frames import FrameLayout
from capsule.training.state.streams import Stream
from tests.training.environments.conftest import CARTPOLE, make


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


class Overpaid(Endless):
    """An environment whose second step gives the reward that it was made with."""

    def __init__(self, reward):
        self.steps, self.second = 0, reward

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.steps += 1
        seen, reward, *rest = super().step(action)
        return seen, self.second if self.steps == 2 else reward, *rest


@pytest.mark.parametrize("reward", [float("nan"), np.float32("inf"), -float("inf")])
@pytest.mark.parametrize("training", [True, False])
def test_a_reward_that_is_not_finite_is_rejected(reward, training):
    gymnasium.register("capsule/Overpaid-v0", lambda: Overpaid(reward))
    try:
        spec = GymnasiumEnvironment(suite="gymnasium", id="capsule/Overpaid-v0")
        environment, _ = make(spec, training=training)
    finally:
        del gymnasium.registry["capsule/Overpaid-v0"]
    for _ in range(2):
        environment.reset()
        environment.step(0)
        with pytest.raises(CapsuleError) as failure:
            environment.step(0)
        assert str(failure.value) == (
            f"CAP-T151 environment.id 'capsule/Overpaid-v0' gave the reward {float(reward)} for "
            "step 2 of an episode"
        )


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
        ({"masked_observations": (0, 1, 2, 3)}, "hides all 4 numbers", "Remove at least one"),
        ({"observation": "image"}, "'image' is not an entry of Box", "Remove it"),
        (
            {"observation": "picture", "id": "MiniGrid-MemoryS7-v0", "modules": ("minigrid",)},
            "'picture' is not an entry of Dict",
            "Name one of direction, image, mission",
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


# --- nested observations --------------------------------------------------------------------------


def section(**changes):
    document = {"suite": "gymnasium", "id": "capsule/Nested-v0", **changes}
    return GymnasiumEnvironment.model_validate_json(json.dumps(document))


ROBOT = spaces.Dict(
    {
        "camera": spaces.Dict(
            {
                "left": spaces.Box(0, 255, (2, 3, 3), np.uint8),
                "right": spaces.Box(0, 255, (2, 2), np.uint8),
            }
        ),
        "arm": spaces.Tuple(
            [spaces.Discrete(3, start=1), spaces.Dict({"speed": spaces.Box(-9.0, 9.0, (2,))})]
        ),
        "order": spaces.Dict({"text": spaces.Text(9), "urgent": spaces.MultiBinary(2)}),
    }
)
WITHOUT_TEXT = spaces.Dict({"arm": ROBOT["arm"], "camera": ROBOT["camera"]})
LEFT = np.arange(18, dtype=np.uint8).reshape(2, 3, 3)
RIGHT = np.array([[90, 91], [92, 93]], np.uint8)
SEEN = {
    "camera": {"right": RIGHT, "left": LEFT},
    "arm": (2, {"speed": np.array([1.5, -2.5], np.float32)}),
    "order": {"text": "go", "urgent": np.array([0, 1], np.int8)},
}
ARM = [0, 1, 0, 1.5, -2.5]  # 2 among 1, 2 and 3, then the speed


class Nested(gymnasium.Env):
    """Shows the same observation for ever."""

    observation_space: spaces.Space = ROBOT
    action_space = spaces.Discrete(2)
    seen: object = SEEN

    def reset(self, *, seed=None, options=None):  # noqa: ARG002 - the interface's
        return self.seen, {}

    def step(self, action):  # noqa: ARG002 - the interface's
        return self.seen, 0.0, False, False, {}


gymnasium.register("capsule/Nested-v0", Nested)


def nested(space=ROBOT, seen=SEEN, **changes):
    """Return the task of an environment that shows ``seen`` of ``space``."""
    Nested.observation_space, Nested.seen = space, seen
    return make(section(**changes))[0]


def refused(space=ROBOT, **changes):
    with pytest.raises(CapsuleError) as error:
        nested(space, **changes)
    return error.value


def test_nested_spaces_become_one_vector_in_gymnasiums_order():
    environment = nested(WITHOUT_TEXT)
    expected = np.array([*ARM, *LEFT.flat, *RIGHT.flat], np.float32)
    np.testing.assert_array_equal(environment.reset(), expected)
    np.testing.assert_array_equal(spaces.flatten(WITHOUT_TEXT, SEEN), expected)
    assert environment.frame_shape == (27,)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("arm", ARM),
        ("arm/0", [0, 1, 0]),
        ("arm/1/speed", [1.5, -2.5]),
        ("camera/right", RIGHT.flat),
        ("order/urgent", [0, 1]),
    ],
)
def test_an_entry_is_named_by_its_path(path, expected):
    found = nested(observation=path).reset()
    np.testing.assert_array_equal(found, np.array([*expected], np.float32))


def test_an_entry_of_a_tuple_is_named_by_its_index():
    space = spaces.Tuple([spaces.Discrete(2), ROBOT])
    found = nested(space, (1, SEEN), observation="1/arm/1").reset()
    np.testing.assert_array_equal(found, np.array([1.5, -2.5], np.float32))


def test_the_numbers_of_an_entry_may_be_masked():
    found = nested(observation="arm", masked_observations=[0, 3]).reset()
    np.testing.assert_array_equal(found, np.array([1, 0, -2.5], np.float32))


def test_a_name_with_a_slash_means_the_outer_entry():
    number = spaces.Box(0.0, 9.0, (1,))
    space = spaces.Dict({"a": spaces.Dict({"b": number, "c": number}), "a/b": number})
    seen = {"a": {"b": np.array([1.0]), "c": np.array([2.0])}, "a/b": np.array([3.0])}
    assert nested(space, seen, observation="a/b").reset() == [3]
    assert nested(space, seen, observation="a/c").reset() == [2]


def test_one_image_of_a_nested_observation_is_not_packed():
    environment = nested(observation="camera/left", frames="image")
    assert environment.layout == FrameLayout((3, 2, 3))
    np.testing.assert_array_equal(environment.reset(), LEFT.transpose(2, 0, 1))


def test_several_images_and_numbers_follow_one_another_in_the_order_of_the_spec():
    environment = nested(
        frames="image",
        images=["camera/right", "camera/left"],
        numbers=["arm/1", "order/urgent"],
        frame_stack=3,
    )
    assert environment.layout == FrameLayout((2, 2), 4, ((3, 2, 3),))
    assert environment.frame_shape == environment.layout.packed_shape == (4 + 18 + 4 * 4,)
    assert (environment.frame_dtype, environment.frame_stack) == (np.uint8, 3)
    frame = environment.reset()
    numbers = np.array([1.5, -2.5, 0, 1], "<f4")
    expected = RIGHT.tobytes() + LEFT.transpose(2, 0, 1).tobytes() + numbers.tobytes()
    assert frame.tobytes() == expected
    assert environment.step(0).frame.tobytes() == expected


def test_several_images_need_no_numbers():
    environment = nested(frames="image", images=["camera/left", "camera/right"])
    assert environment.layout == FrameLayout((3, 2, 3), 0, ((2, 2),))
    expected = LEFT.transpose(2, 0, 1).tobytes() + RIGHT.tobytes()
    assert environment.reset().tobytes() == expected


def test_an_instruction_may_be_nested():
    environment = nested(observation="arm", instruction="order/text")
    environment.reset()
    assert environment.instruction == "go"
    error = refused(observation="arm", instruction="order/urgent")
    assert "CAP-T216 environment.instruction 'order/urgent' is not a text of Dict" in str(error)
    assert error.fix == "Name one of order/text."


def test_a_space_that_is_no_vector_is_refused_with_its_path():
    error = refused()
    assert error.code == "CAP-T214"
    assert "the entry 'order/text', Text(" in error.message
    assert "is not a vector of a fixed length" in error.message
    assert "(arm, camera, arm/0, arm/1, camera/left, camera/right, order/urgent, " in error.fix
    assert "the entry 'order/text', Text(" in refused(observation="order").message


@pytest.mark.parametrize(
    "part",
    [
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Graph(spaces.Discrete(2), None),
        spaces.OneOf([spaces.Discrete(2)]),
        spaces.Text(3),
        spaces.Dict({}),
        spaces.Tuple([]),
    ],
    ids=lambda part: type(part).__name__,
)
def test_spaces_without_a_fixed_number_of_numbers_are_refused(part):
    space = spaces.Dict({"a": spaces.Tuple([spaces.Discrete(2), part])})
    assert f"the entry 'a/1', {part}, is not a vector" in refused(space).message
    whole = refused(part)
    assert f"observations {part} are not supported: it is not a vector" in whole.message
    said = refused(space, observation="a/0", frames="image", numbers=["a/1"])
    assert said.code == "CAP-T216"


@pytest.mark.parametrize("field", ["observation", "images.1"])
def test_a_path_that_leads_nowhere_is_refused(field):
    named = {"observation": "camera/top"}
    if field == "images.1":
        named = {"images": ["camera/left", "camera/top"], "frames": "image"}
    error = refused(WITHOUT_TEXT, **named)
    assert f"CAP-T216 environment.{field} 'camera/top' is not an entry of Dict" in str(error)
    assert error.fix == (
        "Name one of arm, arm/0, arm/1, arm/1/speed, camera, camera/left, camera/right."
    )


@pytest.mark.parametrize("path", ["camera", "arm/1/speed"])
def test_an_entry_that_is_no_image_is_refused_with_the_paths_of_images(path):
    error = refused(frames="image", images=["camera/left", path])
    said = re.escape(f"CAP-T216 environment.frames 'image': the entry {path!r}, ")
    assert re.match(said + r".*, is not a Box of uint8 \[rows, columns, channels\]", str(error))
    assert error.fix.endswith("several in environment.images: camera/left, camera/right.")


def test_numbers_name_what_is_no_number_by_its_path():
    error = refused(observation="camera/left", frames="image", numbers=["order"])
    assert "CAP-T216 environment.numbers: 'order' is not an entry of numbers" in str(error)
    assert "order/urgent" in error.fix
    assert "order/text" not in error.fix


@pytest.mark.parametrize(
    "named",
    [
        {"observation": "camera/left", "numbers": ["camera"]},
        {"images": ["camera/left", "camera/right"], "numbers": ["arm/0", "camera"]},
        {"observation": "camera/left", "numbers": ["arm/1/speed", "arm"]},
    ],
)
def test_an_entry_and_what_contains_it_are_not_both_seen(named):
    error = refused(frames="image", **named)
    outer = named["numbers"][-1]
    assert re.search(
        f"CAP-T216 environment names the entry '{outer}' and also '{outer}/", str(error)
    )


LEAVES = st.one_of(
    st.builds(
        lambda shape, dtype: spaces.Box(0, 100, tuple(shape), dtype),
        st.lists(st.integers(1, 3), min_size=1, max_size=3),
        st.sampled_from([np.uint8, np.int64, np.float32, np.float64]),
    ),
    st.builds(spaces.Discrete, st.integers(1, 4), start=st.integers(-2, 2)),
    st.lists(st.integers(1, 3), min_size=1, max_size=3).map(spaces.MultiDiscrete),
    st.integers(1, 3).map(spaces.MultiBinary),
)
NAMES = st.sampled_from(["b", "a", "c", "z/y", "0"])
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(NAMES, inner, min_size=1, max_size=3).map(spaces.Dict),
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
    ),
    max_leaves=6,
)


def flat_numbers(space, seen):
    """Flatten an observation, written without gymnasium's own functions."""
    if isinstance(space, spaces.Dict):
        return [x for name in sorted(space) for x in flat_numbers(space[name], seen[name])]
    if isinstance(space, spaces.Tuple):
        return [x for part, each in zip(space, seen, strict=True) for x in flat_numbers(part, each)]
    if isinstance(space, spaces.Discrete):
        return [float(seen == space.start + choice) for choice in range(space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        pairs = zip(space.nvec, seen, strict=True)
        return [float(each == choice) for size, each in pairs for choice in range(size)]
    return [float(x) for x in np.asarray(seen).ravel()]


@pytest.mark.slow
@given(NESTED, st.integers(0, 2**31))
def test_random_nested_spaces_are_seen_as_gymnasium_flattens_them(space, seed):
    space.seed(seed)
    seen = space.sample()
    frame = nested(space, seen).reset()
    assert frame.dtype == np.float32
    np.testing.assert_array_equal(frame, np.array(flat_numbers(space, seen), np.float32))
    np.testing.assert_array_equal(frame, spaces.flatten(space, seen).astype(np.float32))
    for path, entry in entries_of(space).items():
        part, inside = seen, space
        for key in entry.keys:
            part, inside = part[key], inside[key]
        assert inside is entry.space
        found = nested(space, seen, observation=path).reset()
        np.testing.assert_array_equal(found, np.array(flat_numbers(inside, part), np.float32))


class Rendered(gymnasium.Env):
    """Renders how many steps were taken."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 30}
    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)
    picture = np.zeros((4, 6, 3), np.uint8)
    render_mode = None

    def reset(self, *, seed=None, options=None):  # noqa: ARG002 - the interface
        super().reset(seed=seed)
        self.picture = np.zeros((4, 6, 3), np.uint8)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.picture = self.picture + np.uint8(action)
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def render(self):
        return self.picture if self.render_mode == "rgb_array" else None


class Unrendered(Rendered):
    """Renders text."""

    metadata: ClassVar = {"render_modes": ["ansi"]}

    def render(self):
        return "a picture"


gymnasium.register("capsule/Rendered-v0", entry_point=Rendered, max_episode_steps=9)


gymnasium.register("capsule/Unrendered-v0", entry_point=Unrendered, max_episode_steps=9)


def gymnasium_task(name):
    return make(CARTPOLE.model_copy(update={"id": name}))[0]


def test_the_screen_of_a_gymnasium_task_is_what_it_renders():
    environment = gymnasium_task("capsule/Rendered-v0")
    environment.reset()
    environment.step(1)
    assert environment.screen().tolist() == np.ones((4, 6, 3)).tolist()
    assert environment.screen_rate == 30


def test_a_task_without_pictures_says_so():
    environment = gymnasium_task("capsule/Unrendered-v0")
    environment.reset()
    with pytest.raises(CapsuleError, match=r"CAP-T217.*it renders str"):
        environment.screen()


@pytest.mark.parametrize(
    "raised",
    [ImportError("install pygame"), gymnasium.error.DependencyNotInstalled("install pygame")],
    ids=["import", "dependency"],
)
def test_libraries_that_are_missing_for_drawing_are_named(monkeypatch, raised):
    def render(_task):
        raise raised

    monkeypatch.setattr(Rendered, "render", render)
    environment = gymnasium_task("capsule/Rendered-v0")
    environment.reset()
    with pytest.raises(CapsuleError, match=r"CAP-T217.*install pygame") as refusal:
        environment.screen()
    assert "image.packages" in refusal.value.fix


@pytest.mark.parametrize(
    "picture", [np.zeros((4, 6), np.uint8), np.zeros((4, 6, 3), np.float32)], ids=["grey", "float"]
)
def test_a_picture_must_have_colours_of_bytes(monkeypatch, picture):
    monkeypatch.setattr(Rendered, "render", lambda _task: picture)
    environment = gymnasium_task("capsule/Rendered-v0")
    environment.reset()
    with pytest.raises(CapsuleError, match=r"CAP-T217.*it renders ndarray, not an array of colo"):
        environment.screen()


def test_a_task_that_states_no_rate_has_ten_screens_a_second():
    assert gymnasium_task("capsule/Unrendered-v0").screen_rate == 10


def test_each_episode_has_a_seed_of_its_own():
    environment, streams = make(CARTPOLE, 7)
    frames = {environment.reset().tobytes() for _ in range(3)}
    assert (len(frames), streams["environment"].draws) == (3, 3)


class Overwriting(gymnasium.Env):
    """Shows the same array again and again, as environments with a buffer do."""

    observation_space = spaces.Box(-9.0, 9.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):  # noqa: ARG002 - the interface's
        self.shown = np.zeros(2, np.float32)
        return self.shown, {}

    def step(self, action):
        self.shown += action
        return self.shown, 0.0, False, False, {}


gymnasium.register("capsule/Overwriting-v0", Overwriting)


def test_a_frame_is_kept_when_the_environment_overwrites_its_observation():
    environment, _ = make(CARTPOLE.model_copy(update={"id": "capsule/Overwriting-v0"}))
    first = environment.reset()
    second = environment.step(1).frame
    assert (first.tolist(), second.tolist()) == ([0, 0], [1, 1])
