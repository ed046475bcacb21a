"""The loss of IMPALA (Espeholt et al. 2018, arXiv:1802.01561, section 4.2).

*Loss*. With the targets of :mod:`capsule.training.losses.v_trace` as constants it is, summed over
time and batch (table D.1: "the loss is summed across the batch and time dimensions")::

    - sum log pi(a_t|x_t) advantage_t + b sum 1/2 (v_t - V(x_t))^2 - e sum entropy(pi(.|x_t))

On Atari ``b`` is 0.5 and ``e`` is 0.01 (table G.1). Because the loss is a sum, a learning rate
belongs to one batch size and unroll length. The baseline's term is half the square, whose gradient
is the ``(v - V) grad V`` of section 4.2.

*Policy*. On a CPU, logarithms of probabilities and entropies are computed by Capsule's own kernels
in float64 and then rounded (:func:`capsule.training.layers.kernels.log_softmax`), and their
gradient in float32, one action after the other. A row therefore has the same bits alone as in a
batch, and at every vector width. On a GPU, torch computes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from capsule.training.layers import kernels
from capsule.training.losses.r2d2 import clip_rewards
from capsule.training.losses.v_trace import Targets

RewardClipping = Literal["none", "unit", "asymmetric"]


# --- policies -------------------------------------------------------------------------------------


class ActionDistribution(NamedTuple):
    """A policy at some states; gradients flow through both attributes.

    Attributes:
        logarithms: ``ln pi(a|x)``: float32 ``[..., actions]``.
        entropies: ``- sum_a pi(a|x) ln pi(a|x)``: float32 ``[...]``.
    """

    logarithms: torch.Tensor
    entropies: torch.Tensor

    def of(self, actions: torch.Tensor) -> torch.Tensor:
        """Return ``ln pi(a|x)`` of ``actions``, int64 ``[...]``, as float32 ``[...]``."""
        return self.logarithms.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def softmax_policy(logits: torch.Tensor) -> ActionDistribution:
    """Return the policy ``softmax(logits)``.

    Args:
        logits: float32 ``[..., actions]``, finite.
    """
    if logits.device.type == "cpu":
        apply: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _LogSoftmax.apply
        logarithms, entropies = apply(logits.flatten(0, -2))
        return ActionDistribution(logarithms.view(logits.shape), entropies.view(logits.shape[:-1]))
    logarithms = logits.log_softmax(-1)
    return ActionDistribution(logarithms, -(logarithms.exp() * logarithms).sum(-1))


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logarithms, probabilities, entropies = kernels.log_softmax(logits.contiguous())
        context.save_for_backward(logarithms, probabilities, entropies)
        return logarithms, entropies

    @staticmethod
    def backward(
        context: Any, logarithm_gradients: torch.Tensor, entropy_gradients: torch.Tensor
    ) -> torch.Tensor:
        logarithms, probabilities, entropies = context.saved_tensors
        return kernels.log_softmax_backward(
            logarithms,
            probabilities,
            entropies,
            logarithm_gradients.contiguous(),
            entropy_gradients.contiguous(),
        )


# --- losses ---------------------------------------------------------------------------------------


class Losses(NamedTuple):
    """The loss that is minimized, and its parts before they are weighted: float32 scalars.

    Attributes:
        total: ``policy + b baseline + e entropy``.
        policy: Loss whose gradient is the negative policy gradient; its value has no meaning.
        baseline: Half the sum of the baseline's squared errors.
        entropy: The negative sum of the entropies.
    """

    total: torch.Tensor
    policy: torch.Tensor
    baseline: torch.Tensor
    entropy: torch.Tensor


def impala_losses(
    log_target: torch.Tensor,
    entropies: torch.Tensor,
    baselines: torch.Tensor,
    targets: Targets,
    *,
    baseline_cost: float = 0.5,
    entropy_cost: float = 0.01,
) -> Losses:
    """Return the losses, summed over time and batch; those of shards add up to that of the batch.

    Args:
        log_target: ``ln pi(a_t|x_t)`` of the actions taken, float32 ``[time, batch]``.
        entropies: Entropies of the policy at each step, float32 ``[time, batch]``.
        baselines: ``V(x_t)``, float32 ``[time, batch]``.
        targets: Targets, which are taken as constants.
        baseline_cost: ``b``; the default is that of table G.1.
        entropy_cost: ``e``; the default is that of table G.1.
    """
    missed = targets.values.detach() - baselines
    policy = -(log_target * targets.advantages.detach()).sum()
    baseline = 0.5 * (missed * missed).sum()
    entropy = -entropies.sum()
    total = policy + baseline_cost * baseline + entropy_cost * entropy
    return Losses(total, policy, baseline, entropy)


def clipped_rewards(rewards: NDArray[np.float64], clipping: RewardClipping) -> NDArray[np.float32]:
    """Return the rewards that the learner trains on, float32 (tables D.3 and G.1).

    Args:
        rewards: float64, any shape.
        clipping: ``unit`` clips to ``[-1, 1]``, and does not take the sign as DQN does;
            ``asymmetric`` is :func:`capsule.training.losses.r2d2.clip_rewards` (figure D.1);
            ``none`` changes nothing.
    """
    if clipping == "asymmetric":
        return clip_rewards(rewards)
    bound = 1.0 if clipping == "unit" else math.inf
    return np.clip(rewards, -bound, bound).astype(np.float32)
