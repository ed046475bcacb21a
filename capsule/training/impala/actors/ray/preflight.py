"""The test of a machine before actors play on it: a pass of the run's own network, digested."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch

from capsule.training.determinism import cpu
from capsule.training.impala.actors.actor_worker import UnrollSettings
from capsule.training.impala.actors.probes import probe, uniforms
from capsule.training.layers import kernels
from capsule.training.networks.recurrent import Sequences

_ROWS, _BATCH = 5, 16  # steps, more than one; and as many actors as the libraries are given at once


def pass_digest(settings: UnrollSettings) -> str:
    """Return the SHA-256 of a forward and a backward pass of the policy, hexadecimal.

    Weights, inputs and the gradient that goes in are fixed, and there is one maths thread. All that
    comes out counts: logits, their log-softmax, baselines, recurrent states, and the gradient of
    every parameter.

    Raises:
        CapsuleError: CAP-T212 to CAP-T215, the environment is not available.
    """
    # A worker has one thread, while this process may have more (determinism.threads).
    with cpu.one_thread():
        results = _pass(settings)
    digest = hashlib.sha256()
    for result in results:
        digest.update(np.ascontiguousarray(result.detach().numpy()).data)
    return digest.hexdigest()


def _pass(settings: UnrollSettings) -> Iterable[torch.Tensor]:
    parameters, inputs, stream = probe(settings, (_ROWS, _BATCH))
    leaves = {n: view.detach().requires_grad_() for n, view in parameters.views.items()}
    begins = torch.zeros_like(inputs.previous_actions, dtype=torch.bool)
    seen = Sequences(*inputs[:-1], begins, inputs.instructions)
    logits, baselines, after = settings.network.unroll(leaves, seen)
    flows = [uniforms(stream, *logits.shape) - 0.5, uniforms(stream, *baselines.shape) - 0.5]
    gradients = torch.autograd.grad([logits, baselines], list(leaves.values()), flows)
    # Actions are drawn from what this kernel gives (act()), so its bits count as well.
    logarithms, _, _ = kernels.log_softmax(logits.detach().flatten(0, 1).contiguous())
    return [logits, logarithms, baselines, after, *gradients]
