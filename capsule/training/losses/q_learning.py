"""The equations of deep Q-learning (Mnih et al. 2015, doi:10.1038/nature14236, Algorithm 1)."""

from __future__ import annotations

import torch
from torch.nn import functional


def bootstrap_targets(
    rewards: torch.Tensor, terminals: torch.Tensor, next_values: torch.Tensor, discount: float
) -> torch.Tensor:
    """Return ``y = r + discount * max_a Q^(s', a)``, or ``r`` where ``s'`` is terminal.

    Args:
        rewards: float32 ``[batch]``.
        terminals: bool ``[batch]``.
        next_values: float32 ``[batch, actions]``, the target network's values of ``s'``.
        discount: Discount factor.

    Returns:
        float32 ``[batch]``.
    """
    return rewards + discount * next_values.amax(1) * ~terminals


def clipped_error_loss(
    values: torch.Tensor, actions: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Return the loss whose gradient is the temporal-difference error clipped to [-1, 1].

    To clip the error (Mnih et al. 2015, Methods, "Training details") is to descend the Huber loss
    with threshold 1. The loss is summed over the batch, and not averaged, as in the authors' own
    code: the learning rate and the minimum squared gradient of the paper's Extended Data Table 1
    belong to that scale.

    Args:
        values: float32 ``[batch, actions]``, ``Q(s, .)``.
        actions: int64 ``[batch]``.
        targets: float32 ``[batch]``, taken as constants.

    Returns:
        float32 scalar.
    """
    chosen = values.gather(1, actions.unsqueeze(1)).squeeze(1)
    return functional.huber_loss(chosen, targets, reduction="sum", delta=1.0)


def clipped_errors(
    values: torch.Tensor, actions: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of :func:`clipped_error_loss` with respect to ``values``.

    The arguments are those of that function; the gradient is float32 ``[batch, actions]``.
    """
    chosen = actions.unsqueeze(1)
    errors = (values.gather(1, chosen) - targets.unsqueeze(1)).clamp(-1.0, 1.0)
    return torch.zeros_like(values).scatter(1, chosen, errors)


def exploration_rate(step: int, *, initial: float, final: float, steps: int) -> float:
    """Return epsilon at ``step``: linear from ``initial`` at step 0 to ``final`` at ``steps``."""
    if step >= steps:
        return final
    return initial + (final - initial) * (step / steps)
