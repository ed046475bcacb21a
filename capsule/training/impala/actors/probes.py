"""Inputs that a policy could be given, whatever the seeds of a run: for asking what it computes."""

from __future__ import annotations

import math

import numpy as np
import torch

from capsule.training.acting.actor_worker import actor_streams
from capsule.training.acting.batched_actors import Inputs
from capsule.training.environments import make_environment
from capsule.training.impala.actors.actor_worker import UnrollSettings
from capsule.training.networks.feedforward import Parameters, Shape, initialize
from capsule.training.state.streams import Stream

# The same for all runs, because processes and nodes compare what they compute of equal inputs.
_SEED = 1


def probe(settings: UnrollSettings, shape: Shape) -> tuple[Parameters, Inputs, Stream]:
    """Draw weights of a run's policy, and inputs for it.

    Args:
        settings: What makes the actors.
        shape: Shape of the inputs: ``(rows,)``, or ``(time, batch)`` with a state for each row.

    Returns:
        Weights; inputs with ``shape`` in front; and the stream, to draw more from.

    Raises:
        CapsuleError: CAP-T212 to CAP-T216, the environment is not available.
    """
    network, stream = settings.network, Stream("initialization", _SEED)
    parameters = Parameters(network.shapes, torch.device("cpu"))
    initialize(parameters, stream)
    streams = actor_streams(settings.seeds, 0)
    example = make_environment(settings.tasks[0], streams, training=True)
    layout = example.layout
    rows = (*shape, example.frame_stack)
    images = [uniforms(stream, *rows, *image) for image in layout.images]
    if example.frame_dtype == np.uint8:
        images = [(256 * image).to(torch.uint8) for image in images]
    frames = images[0]
    if layout.packed:
        numbers = 2 * uniforms(stream, *rows, layout.numbers) - 1
        packed = layout.pack([image.numpy() for image in images], [numbers.numpy()])
        frames = torch.from_numpy(packed)
    actions = stream.integers(network.actions, math.prod(shape)).reshape(shape)
    inputs = Inputs(
        observations=frames,
        previous_actions=torch.from_numpy(actions),
        previous_rewards=2 * uniforms(stream, *shape) - 1,
        states=2 * uniforms(stream, shape[-1], *network.state_shape) - 1,
        instructions=torch.ones((*shape, network.words), dtype=torch.int64),
    )
    return parameters, inputs, stream


def uniforms(stream: Stream, *shape: int) -> torch.Tensor:
    """Draw from ``[0, 1)``: float32, of some shape."""
    drawn = stream.uniforms(math.prod(shape)).reshape(shape)
    # Down to 24 bits: rounded, a uniform could be 1.
    return torch.from_numpy((np.floor(drawn * 2**24) / 2**24).astype(np.float32))
