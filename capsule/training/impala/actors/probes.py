"""Fixed weights and inputs of a run's policy, to compare what processes compute from them."""

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

# The same for all runs and processes, which compare what they compute from equal inputs.
_SEED = 1


def probe(settings: UnrollSettings, shape: Shape) -> tuple[Parameters, Inputs, Stream]:
    """Draw weights of a run's policy, and inputs for it, in the run's shapes and types.

    Args:
        settings: The settings of the actors.
        shape: Leading dimensions of the inputs: ``(rows,)``, or ``(time, batch)``; the recurrent
            states always have the last one only.

    Returns:
        The weights; the inputs; and the stream, from which more can be drawn.

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
    """Draw float32 uniforms in ``[0, 1)``, of a shape."""
    drawn = stream.uniforms(math.prod(shape)).reshape(shape)
    # Cut off after 24 bits, because rounding to float32 could give 1.
    return torch.from_numpy((np.floor(drawn * 2**24) / 2**24).astype(np.float32))
