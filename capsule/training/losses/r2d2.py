"""The equations of R2D2 (Kapturowski et al. 2019, OpenReview r1lyTjAqYX, section 2.3).

Tensors are time-major: ``[time, batch]``. Row ``t`` is one step of a sequence after its prefix;
values have one row more, for the state after the last step. A sequence shorter than ``time`` is
padded at its end; ``lengths`` counts its steps, and ``valid`` marks them.

Targets and losses consist of additions, subtractions, multiplications, divisions and square roots,
which IEEE 754 rounds correctly, so their bits do not depend on a library. Three functions need more
and are computed by numpy in float64: :func:`clip_rewards` (tanh), :func:`exponentiate` and
:func:`importance_weights` (power). The results of mathematical libraries differ in the last bits of
a float64. Rounding to float32 removes these differences, unless a result is so close to a rounding
boundary that they reach across it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def rescale(values: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return ``h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x``.

    The source is Pohlen et al. 2018, arXiv:1805.11593. It is computed as ``x / (sqrt(|x| + 1) + 1)
    + epsilon x``, which is equal and has no cancellation: the form above loses the digits of a
    small ``x``.

    Args:
        values: float32, any shape.
        epsilon: Not negative; R2D2 has 1e-3 (table 2).
    """
    return values / ((values.abs() + 1).sqrt() + 1) + epsilon * values


def invert_rescale(values: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return ``h^-1(values)``, the inverse of :func:`rescale`, without cancellation.

    With ``u = sqrt(|x| + 1) - 1``, ``|h(x)|`` is ``epsilon u^2 + (1 + 2 epsilon) u``. The positive
    root ``u`` of this equation, in the form without a difference, gives ``|x| = u (u + 2)``.

    Args:
        values: float32, any shape.
        epsilon: As for :func:`rescale`.
    """
    slope = 1 + 2 * epsilon
    root = 2 * values / ((slope * slope + 4 * epsilon * values.abs()).sqrt() + slope)
    return root * (root.abs() + 2)


def n_step_returns(
    rewards: torch.Tensor,
    discounts: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    steps: int,
) -> torch.Tensor:
    """Return n-step returns ``r_t + d_t (r_t+1 + d_t+1 (... + d_t+n-1 V(s_t+n)))``.

    If a sequence has fewer than ``n`` steps from ``t`` on, the return bootstraps from the state
    after the last of them, with as many discounts as rewards. Nothing after a step of discount 0
    counts.

    Args:
        rewards: float32 ``[time, batch]``.
        discounts: float32 ``[time, batch]``: the discount factor, or 0 where the return ends.
        values: float32 ``[time + 1, batch]``.
        lengths: int64 ``[batch]``, each at most ``time``: steps of each sequence.
        steps: ``n``, at least 1.

    Returns:
        float32 ``[time, batch]``; finite but meaningless from ``lengths`` on.
    """
    time = len(rewards)
    now = torch.arange(time, device=rewards.device).unsqueeze(1)
    valid = now < lengths
    none = rewards.new_zeros(steps - 1, rewards.shape[1])
    # Rewards of 0 and discounts of 1 after the end leave the bootstrapped value unchanged, so that
    # one loop serves sequences of every length.
    rewards = torch.cat((rewards.where(valid, 0.0), none))
    discounts = torch.cat((discounts.where(valid, 1.0), none + 1))
    returns = values.gather(0, torch.minimum(now + steps, lengths))
    for ahead in reversed(range(steps)):
        returns = rewards[ahead : ahead + time] + discounts[ahead : ahead + time] * returns
    return returns


def double_q_targets(
    rewards: torch.Tensor,
    discounts: torch.Tensor,
    online_values: torch.Tensor,
    target_values: torch.Tensor,
    lengths: torch.Tensor,
    *,
    steps: int,
    epsilon: float | None,
) -> torch.Tensor:
    """Return ``h(sum_k<n d^k r_t+k + d^n h^-1(Q^(s_t+n, argmax_a Q(s_t+n, a))))`` as constants.

    This is double Q-learning (van Hasselt et al. 2016, arXiv:1509.06461) with n-step returns. Among
    equal maxima the lowest action is selected.

    Args:
        rewards: float32 ``[time, batch]``.
        discounts: float32 ``[time, batch]``, as for :func:`n_step_returns`.
        online_values: float32 ``[time + 1, batch, actions]``, ``Q``, which selects.
        target_values: float32 ``[time + 1, batch, actions]``, ``Q^``, which evaluates.
        lengths: int64 ``[batch]``: steps of each sequence.
        steps: ``n``, at least 1.
        epsilon: Epsilon of the rescaling ``h``; None for no rescaling.

    Returns:
        float32 ``[time, batch]``; finite but meaningless from ``lengths`` on.
    """
    with torch.no_grad():
        selected = online_values.argmax(2, keepdim=True)
        values = target_values.gather(2, selected).squeeze(2)
        if epsilon is None:
            return n_step_returns(rewards, discounts, values, lengths, steps)
        values = invert_rescale(values, epsilon)
        return rescale(n_step_returns(rewards, discounts, values, lengths, steps), epsilon)


def td_errors(values: torch.Tensor, actions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the temporal-difference errors ``y_t - Q(s_t, a_t)``.

    Args:
        values: float32 ``[time, batch, actions]``, ``Q(s, .)``.
        actions: int64 ``[time, batch]``; any existing action where the sequence is padded.
        targets: float32 ``[time, batch]``, taken as constants.

    Returns:
        float32 ``[time, batch]``.
    """
    return targets.detach() - values.gather(2, actions.unsqueeze(2)).squeeze(2)


def sequence_loss(
    errors: torch.Tensor, valid: torch.Tensor, weights: torch.Tensor, batch: int
) -> torch.Tensor:
    """Return ``1 / batch sum_b w_b sum_t 1/2 error_tb^2`` over the valid steps.

    The paper leaves the scale open. Half the square, summed over time and averaged over sequences,
    is the choice of SEED RL (Espeholt et al. 2020, arXiv:1910.06591) and Acme (Hoffman et al. 2020,
    arXiv:2006.00979).

    Args:
        errors: float32 ``[time, sequences]``.
        valid: bool ``[time, sequences]``.
        weights: Importance weights, float32 ``[sequences]``.
        batch: Number of sequences of the whole minibatch, of which these may be a shard.

    Returns:
        float32 scalar.
    """
    # Selected, not multiplied by zero: errors of the padding may be infinite or NaN.
    errors = errors.where(valid, 0.0)
    return (weights * (errors * errors).sum(0)).sum() * 0.5 / batch


def sequence_priorities(
    errors: torch.Tensor, valid: torch.Tensor, maximum_share: float
) -> NDArray[np.float64]:
    """Return ``p = eta max_t |error_t| + (1 - eta) mean_t |error_t|`` over the valid steps.

    Args:
        errors: float32 ``[time, batch]``.
        valid: bool ``[time, batch]``, at least one in each column.
        maximum_share: ``eta``; 0.9 in section 2.3.

    Returns:
        float64 ``[batch]``. The errors of a sequence are added in the order of its steps.
    """
    sizes = errors.detach().abs().where(valid, 0.0).cpu().numpy().astype(np.float64)
    # numpy.sum would choose the order of additions by the layout in memory.
    mean = np.add.accumulate(sizes, axis=0)[-1] / valid.sum(0).cpu().numpy()
    priorities: NDArray[np.float64] = maximum_share * sizes.max(0) + (1 - maximum_share) * mean
    return priorities


def exponentiate(priorities: NDArray[np.float64], exponent: float) -> NDArray[np.float64]:
    """Return ``p^alpha``, to which the probability of a draw is proportional.

    The source is Schaul et al. 2016, arXiv:1511.05952, equation 1.

    Args:
        priorities: float64, not negative.
        exponent: ``alpha``; R2D2 has 0.9 (table 2).

    Returns:
        float64 of the same shape, with values rounded to float32.
    """
    return np.power(priorities, exponent).astype(np.float32).astype(np.float64)


def importance_weights(probabilities: NDArray[np.float64], exponent: float) -> NDArray[np.float32]:
    """Return ``(N P)^-beta``, divided by its maximum in the minibatch.

    The source is Schaul et al. 2016, section 3.4. The quotient is ``(P_min / P)^beta``, because the
    size ``N`` of the memory cancels.

    Args:
        probabilities: Probability of each sequence's draw, float64 ``[batch]``, positive.
        exponent: ``beta``; R2D2 has 0.6 (table 2).

    Returns:
        float32 ``[batch]``, at most 1.
    """
    weights: NDArray[np.float32] = np.power(probabilities.min() / probabilities, exponent).astype(
        np.float32
    )
    return weights


def clip_rewards(rewards: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return ``0.3 min(tanh(r), 0) + 5 max(tanh(r), 0)``: optimistic asymmetric clipping.

    The equation is that of Espeholt et al. 2018, arXiv:1802.01561, figure D.1, which R2D2+ also
    uses. (The code published with that paper has ``tanh(r / 5)`` and factors 1.5 and 5 instead.)

    Args:
        rewards: float64, any shape.

    Returns:
        float32 of the same shape.
    """
    squeezed = np.tanh(rewards)
    clipped: NDArray[np.float32] = (
        0.3 * np.minimum(squeezed, 0) + 5 * np.maximum(squeezed, 0)
    ).astype(np.float32)
    return clipped
