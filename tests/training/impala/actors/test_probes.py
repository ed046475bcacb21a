"""Inputs that a policy could be given: the same for all runs, in the ranges of real ones."""

import json
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import GymnasiumEnvironment, SeedsSpec
from capsule.experiment.trainers import ConvolutionSpec, LayersSpec
from capsule.training.acting.actor_worker import actor_streams
from capsule.training.environments import make_environment
from capsule.training.impala.actors.actor_worker import UnrollSettings
from capsule.training.impala.actors.probes import probe, uniforms
from capsule.training.layers.backends import FIXED_ORDER
from capsule.training.networks.actor_critic import make_actor_critic_network
from capsule.training.networks.recurrent import Sequences
from capsule.training.state.streams import Stream
from tests.training.impala.actors.conftest import SEEDS, settings_of

pytestmark = pytest.mark.usefixtures("one_thread")


class TwoCameras(gymnasium.Env):
    """Shows two images of different sizes and the position of an arm; cannot be played."""

    observation_space = spaces.Dict(
        {
            "arm": spaces.Box(-9.0, 9.0, (5,), np.float32),
            "left": spaces.Box(0, 255, (2, 3, 3), np.uint8),
            "right": spaces.Box(0, 255, (2, 2), np.uint8),
        }
    )
    action_space = spaces.Discrete(2)


gymnasium.register("capsule/TwoCameras-v0", TwoCameras)


def two_cameras(numbers):
    """Return settings of actors that see two images, and numbers behind them if there are any."""
    document = {
        "suite": "gymnasium",
        "id": "capsule/TwoCameras-v0",
        "images": ["left", "right"],
        "frames": "image",
        "frame_stack": 2,
        "numbers": numbers,
    }
    task = GymnasiumEnvironment.model_validate_json(json.dumps(document))
    example = make_environment(task, actor_streams(SEEDS, 0), training=True)
    network = make_actor_critic_network(
        LayersSpec(convolutions=(ConvolutionSpec(filters=2, kernel=2),)),
        frame_stack=2,
        layout=example.layout,
        actions=2,
        recurrent_units=3,
        hidden_units=4,
        products=FIXED_ORDER,
    )
    return UnrollSettings((task,), SEEDS, network, steps=5, rows=4)


@pytest.mark.parametrize("numbers", [None, ["arm"]])
def test_the_inputs_that_replicas_are_asked_for_are_packed(numbers):
    settings = two_cameras(numbers)
    parameters, inputs, _ = probe(settings, (3, 4))
    # 18 bytes of one image, 4 of the other, and 5 float32
    assert inputs.observations.shape == (3, 4, 2, 18 + 4 + (20 if numbers else 0))
    assert inputs.observations.dtype == torch.uint8
    if numbers:
        behind = inputs.observations[..., 22:].contiguous().view(torch.float32)
        assert ((behind >= -1) & (behind < 1)).all()
        assert len(behind.unique()) > 100
    resets = torch.zeros((3, 4), dtype=torch.bool)
    logits, *_ = settings.network.unroll(
        parameters.views,
        Sequences(
            inputs.observations,
            inputs.previous_actions,
            inputs.previous_rewards,
            inputs.states,
            resets,
        ),
    )
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("shape", [(6,), (3, 4)])
def test_inputs_have_the_shapes_and_ranges_of_what_actors_see(shape):
    settings = settings_of("counting")
    parameters, inputs, _ = probe(settings, shape)
    assert inputs.observations.shape == (*shape, 1, 3)
    assert inputs.observations.dtype == torch.float32
    assert inputs.previous_actions.shape == inputs.previous_rewards.shape == shape
    assert set(inputs.previous_actions.flatten().tolist()) <= {0, 1, 2}
    assert inputs.states.shape == (shape[-1], *settings.network.state_shape)
    assert inputs.instructions.shape == (*shape, 0)
    for symmetric in (inputs.previous_rewards, inputs.states):
        assert ((symmetric >= -1) & (symmetric < 1)).all()
        assert symmetric.min() < 0 < symmetric.max()
    assert set(parameters.views) == set(settings.network.shapes)
    assert parameters.flat.any()


def test_pixels_are_bytes_of_every_size():
    _, inputs, _ = probe(settings_of("sticky"), (1,))
    assert inputs.observations.dtype == torch.uint8
    assert inputs.observations.shape == (1, 4, 84, 84)
    assert len(inputs.observations.unique()) == 256
    assert inputs.observations.double().mean() == pytest.approx(127.5, abs=2)


def test_what_is_drawn_depends_on_no_seed_of_the_run():
    """Processes and nodes compare what they compute of equal inputs."""
    settings = settings_of("counting")
    first, inputs, stream = probe(settings, (2, 3))
    second, others, another = probe(replace(settings, seeds=SeedsSpec(root=99)), (2, 3))
    assert torch.equal(first.flat, second.flat)
    assert all(torch.equal(a, b) for a, b in zip(inputs, others, strict=True))
    assert uniforms(stream, 4).tolist() == uniforms(another, 4).tolist()


def test_an_environment_that_is_not_available_is_named():
    settings = settings_of("counting")
    task = settings.tasks[0].model_copy(update={"id": "NoSuch-v0"})
    with pytest.raises(CapsuleError, match=r"environment.id 'NoSuch-v0'") as refusal:
        probe(replace(settings, tasks=(task,)), (1,))
    assert refusal.value.code == "CAP-T214"


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_uniforms_are_those_of_the_stream_cut_to_24_bits(seed, shape):
    found = uniforms(Stream("initialization", seed), *shape)
    drawn = Stream("initialization", seed).uniforms(int(np.prod(shape))).reshape(shape)
    assert (found.dtype, found.shape) == (torch.float32, tuple(shape))
    assert ((found >= 0) & (found < 1)).all()
    behind = drawn - found.double().numpy()
    assert ((behind >= 0) & (behind < 2**-24)).all()
    assert (found.double() * 2**24 % 1 == 0).all()


class Largest:
    """A stream that gives the largest uniform there is."""

    def uniforms(self, count):
        return np.full(count, np.nextafter(1.0, 0.0))


def test_no_uniform_is_rounded_to_one():
    assert np.float32(np.nextafter(1.0, 0.0)) == 1  # which is what rounding would give
    assert uniforms(Largest(), 2).tolist() == [1 - 2**-24] * 2
