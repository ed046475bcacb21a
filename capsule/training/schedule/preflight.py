"""What a machine is asked before it may play along: a pass of the run's own network, digested."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from capsule.training import kernels
from capsule.training.environments import Environment, make_environment
from capsule.training.networks import Parameters, initialize
from capsule.training.streams import Stream
from capsule.training.unrolls import UnrollSettings, actor_streams

_ROWS, _BATCH = 5, 16  # steps, more than one; and as many actors as the libraries are given at once
_STEPS_SEED = 1  # of inputs and weights, whatever the seeds of the run


def pass_digest(settings: UnrollSettings) -> str:
    """Return the SHA-256 of a forward and a backward pass of the policy, hexadecimal.

    Weights, inputs and the gradient that goes in are fixed, and there is one maths thread. All that
    comes out counts: logits, their log-softmax, baselines, recurrent states, and the gradient of
    every parameter.

    Raises:
        CapsuleError: CAP-T212 to CAP-T215, the environment cannot be had.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = _pass(settings)
    finally:
        torch.set_num_threads(threads)
    digest = hashlib.sha256()
    for result in results:
        digest.update(np.ascontiguousarray(result.detach().numpy()).data)
    return digest.hexdigest()


def _pass(settings: UnrollSettings) -> Iterable[torch.Tensor]:
    network, stream = settings.network, Stream("initialization", _STEPS_SEED)
    streams = actor_streams(settings.seeds, 0)
    example = make_environment(settings.tasks[0], streams, training=True)
    parameters = Parameters(network.shapes, torch.device("cpu"))
    initialize(parameters, stream)
    leaves = {n: view.detach().requires_grad_() for n, view in parameters.views.items()}
    shape = (_ROWS, _BATCH)
    language = network.language
    logits, baselines, states = network.unroll(
        leaves,
        torch.from_numpy(_observations(example, stream)),
        torch.from_numpy(stream.below_many(network.actions, _ROWS * _BATCH).reshape(shape)),
        _uniform(stream, *shape),
        _uniform(stream, _BATCH, *network.state_shape),
        torch.zeros(shape, dtype=torch.bool),
        None if language is None else torch.ones((*shape, network.words), dtype=torch.int64),
    )
    flows = [_uniform(stream, *logits.shape), _uniform(stream, *baselines.shape)]
    gradients = torch.autograd.grad([logits, baselines], list(leaves.values()), flows)
    logarithms, _, _ = kernels.log_softmax(logits.detach().flatten(0, 1).contiguous())
    return [logits, logarithms, baselines, states, *gradients]


def _observations(example: Environment, stream: Stream) -> NDArray[np.uint8 | np.float32]:
    """Draw what an environment could show: ``[rows, batch, frame_stack, *frame_shape]``."""
    shape = (_ROWS, _BATCH, example.frame_stack, *example.frame_shape)
    uniforms = stream.uniforms(int(np.prod(shape))).reshape(shape)
    scale = 256 if example.frame_dtype == np.uint8 else 1
    return (scale * uniforms).astype(example.frame_dtype)


def _uniform(stream: Stream, *shape: int) -> torch.Tensor:
    """Draw from ``[-1, 1)``, float32."""
    uniforms = stream.uniforms(int(np.prod(shape))).reshape(shape)
    return torch.from_numpy((2.0 * uniforms - 1.0).astype(np.float32))
