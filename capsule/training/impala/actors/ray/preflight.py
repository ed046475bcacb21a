"""The test of a machine before actors run on it: the digest of a pass of the run's own network."""

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

_STEPS, _ACTORS = 5, 16  # several steps, so that the recurrent weights count; a batch of ROWS


def pass_digest(settings: UnrollSettings) -> str:
    """Return the SHA-256 of a forward and a backward pass of the policy, hexadecimal.

    Weights, inputs and the gradients of the outputs are fixed, and there is one maths thread. The
    digest covers logits, their log-softmax, baselines, recurrent states, and the gradient of every
    parameter.

    Raises:
        CapsuleError: CAP-T212 to CAP-T215, the environment is not available.
    """
    # A worker has one maths thread, while this process may have more (determinism.threads).
    with cpu.one_thread():
        results = _pass(settings)
    digest = hashlib.sha256()
    for result in results:
        digest.update(np.ascontiguousarray(result.detach().numpy()).data)
    return digest.hexdigest()


def _pass(settings: UnrollSettings) -> Iterable[torch.Tensor]:
    parameters, inputs, stream = probe(settings, (_STEPS, _ACTORS))
    leaves = parameters.leaves()
    resets = torch.zeros_like(inputs.previous_actions, dtype=torch.bool)
    seen = Sequences(**inputs._asdict(), resets=resets)
    logits, baselines, after = settings.network.unroll(leaves, seen)
    flows = [uniforms(stream, *logits.shape) - 0.5, uniforms(stream, *baselines.shape) - 0.5]
    gradients = torch.autograd.grad([logits, baselines], list(leaves.values()), flows)
    # act() draws actions from the results of this kernel, so its bits count as well.
    logarithms, _, _ = kernels.log_softmax(logits.detach().flatten(0, 1).contiguous())
    return [logits, logarithms, baselines, after, *gradients]
