"""Nested observations: their entries by paths, as vectors, as several images, and as numbers."""

import json
import re

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import GymnasiumEnvironment
from capsule.experiment.trainers import ConvolutionSpec, LayersSpec
from capsule.training.environments import make_environment
from capsule.training.environments.entries import entries_of
from capsule.training.impala.actors.actor_worker import UnrollSettings
from capsule.training.impala.actors.probes import probe
from capsule.training.layers.backends import FIXED_ORDER
from capsule.training.networks.actor_critic import make_actor_critic_network
from capsule.training.state.frames import FrameLayout
from capsule.training.state.streams import make_streams
from tests.training.conftest import CARTPOLE, make_spec

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


def section(**changes):
    document = {"suite": "gymnasium", "id": "capsule/Nested-v0", **changes}
    return GymnasiumEnvironment.model_validate_json(json.dumps(document))


def nested(space=ROBOT, seen=SEEN, **changes):
    """Return the task of an environment that shows ``seen`` of ``space``."""
    Nested.observation_space, Nested.seen = space, seen
    streams = make_streams(make_spec(CARTPOLE).seeds)
    return make_environment(section(**changes), streams, training=True)


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


def test_the_inputs_that_replicas_are_asked_for_are_packed():
    images = {"images": ["camera/left", "camera/right"], "frames": "image", "frame_stack": 2}
    for numbers in (None, ["arm"]):
        environment = nested(**images, numbers=numbers)
        layers = LayersSpec(convolutions=(ConvolutionSpec(filters=2, kernel=2),))
        network = make_actor_critic_network(
            layers,
            frame_stack=2,
            layout=environment.layout,
            actions=2,
            recurrent_units=3,
            hidden_units=4,
            products=FIXED_ORDER,
        )
        task, seeds = section(**images, numbers=numbers), make_spec(CARTPOLE).seeds
        settings = UnrollSettings((task,), seeds, network, steps=5, rows=4)
        parameters, inputs, _ = probe(settings, (3, 4))
        assert inputs.observations.shape == (3, 4, 2, *environment.frame_shape)
        assert inputs.observations.dtype == torch.uint8
        resets = torch.zeros((3, 4), dtype=torch.bool)
        logits, *_ = network.unroll(
            parameters.views,
            inputs.observations,
            inputs.previous_actions,
            inputs.previous_rewards,
            inputs.states,
            resets,
        )
        assert torch.isfinite(logits).all()


def test_an_instruction_may_be_nested():
    environment = nested(observation="arm", instruction="order/text")
    environment.reset()
    assert environment.instruction == "go"
    error = refused(observation="arm", instruction="order/urgent")
    assert "CAP-T216 environment.instruction 'order/urgent' is not a text of Dict" in str(error)
    assert error.fix == "name one of order/text"


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
        "name one of arm, arm/0, arm/1, arm/1/speed, camera, camera/left, camera/right"
    )


@pytest.mark.parametrize("path", ["camera", "arm/1/speed"])
def test_an_entry_that_is_no_image_is_refused_with_the_paths_of_images(path):
    error = refused(frames="image", images=["camera/left", path])
    said = re.escape(f"CAP-T216 environment.frames 'image': the entry {path!r}, ")
    assert re.match(said + r".*, is not a Box of uint8 \[rows, columns, channels\]", str(error))
    assert error.fix.endswith("several in environment.images: camera/left, camera/right")


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


# Random nested spaces

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
