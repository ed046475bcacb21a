"""V-trace and the corrections with which the paper compares it.

The paper is Espeholt et al. 2018, arXiv:1802.01561; section and equation numbers are its own.

Tensors are float32 and time-major: ``[time, batch]``. Row ``t`` is one step of a trajectory;
values have one row more, for the state after the last step. A discount is ``gamma``, or 0 for a
step that ends the return, so that nothing after it counts.

With ``ratio = pi(a|x) / mu(a|x)``, the learner's policy divided by the one that acted::

    rho_t = min(rho_bar, ratio_t),  c_t = lambda min(c_bar, ratio_t)          section 4.1, remark 2
    delta_t = rho_t (r_t + gamma_t V(x_t+1) - V(x_t))
    v_t = V(x_t) + delta_t + gamma_t c_t (v_t+1 - V(x_t+1))                   remark 1
    advantage_t = rho_t (q_t - V(x_t))                                        section 4.2
    q_t = r_t + gamma_t v_t+1, or r_t + gamma_t V(x_t+1)                      appendix E.3

The recursion begins with ``v = V`` after the last step; a level of ``inf`` clips nothing. All
results are constants: no gradient flows through them.

Apart from the ratios, every operation is an addition, a subtraction, a multiplication, a division
or a minimum, which IEEE 754 rounds correctly. The bits are therefore the same on every device, and
for a trajectory alone as in a batch. On a CPU, the exponential of the ratios is computed by
Capsule's own kernel in float64 (:func:`capsule.training.layers.kernels.exponentiate`), for which
the same is true; on a GPU, torch computes it.

``rlax`` and some other libraries mix ``v_t+1`` and ``V(x_t+1)`` by ``lambda`` in the advantage.
Neither the paper, which has ``lambda`` only in a remark, nor this module does so.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from capsule.experiment.trainers import ImpalaTrainer
from capsule.training.layers import kernels

ActionValues = Literal["targets", "baseline"]
"""The value in ``q_t``: the target ``v_t+1`` or the baseline ``V(x_t+1)``."""


class Targets(NamedTuple):
    """The targets of trajectories.

    Attributes:
        values: Targets ``v_t`` of the baseline, float32 ``[time, batch]``.
        advantages: Factors of ``grad log pi(a_t|x_t)``, float32 ``[time, batch]``.
    """

    values: torch.Tensor
    advantages: torch.Tensor


def corrected_targets(
    trainer: ImpalaTrainer,
    log_target: torch.Tensor,
    log_behaviour: torch.Tensor,
    rewards: torch.Tensor,
    discounts: torch.Tensor,
    values: torch.Tensor,
) -> Targets:
    """Return the targets of trajectories with the correction of a spec (section 5.2.2).

    Args:
        trainer: The spec's section ``trainer``.
        log_target: ``ln pi(a_t|x_t)``, ``[time, batch]``.
        log_behaviour: ``ln mu(a_t|x_t)``, ``[time, batch]``.
        rewards: ``[time, batch]``.
        discounts: ``[time, batch]``.
        values: ``V(x_t)``, ``[time + 1, batch]``.
    """
    trajectories = rewards, discounts, values
    decay, kind = trainer.trace_decay, trainer.action_values
    if trainer.correction == "v-trace":
        return v_trace(
            importance_ratios(log_target, log_behaviour),
            *trajectories,
            rho_bar=trainer.rho_bar,
            c_bar=trainer.c_bar,
            trace_decay=decay,
            action_values=kind,
        )
    plain = no_correction(*trajectories, trace_decay=decay, action_values=kind)
    if trainer.correction == "one-step":
        ratios = importance_ratios(log_target, log_behaviour)
        return one_step(plain, ratios, rho_bar=trainer.rho_bar)
    if trainer.correction == "epsilon":
        return epsilon_correction(plain, log_target, epsilon=trainer.correction_epsilon)
    return plain


def importance_ratios(log_target: torch.Tensor, log_behaviour: torch.Tensor) -> torch.Tensor:
    """Return ``pi / mu``: exactly 1 for equal logarithms, infinite if it is too large for float32.

    Args:
        log_target: ``ln pi``, float32 of any shape; no gradient flows through it.
        log_behaviour: ``ln mu``, float32 of the same shape.
    """
    # A quotient of probabilities would be 0 / 0 if both are too small for float32.
    return _exponentiate(log_target.detach() - log_behaviour.detach())


@torch.no_grad()
def v_trace(
    ratios: torch.Tensor,
    rewards: torch.Tensor,
    discounts: torch.Tensor,
    values: torch.Tensor,
    *,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    trace_decay: float = 1.0,
    action_values: ActionValues = "targets",
) -> Targets:
    """Return the V-trace targets of trajectories (section 4.1).

    Args:
        ratios: ``pi(a_t|x_t) / mu(a_t|x_t)``, ``[time, batch]``.
        rewards: ``[time, batch]``.
        discounts: ``[time, batch]``.
        values: ``V(x_t)``, ``[time + 1, batch]``.
        rho_bar: Level at which ratios are clipped in the errors and the advantages.
        c_bar: Level at which ratios are clipped in the traces.
        trace_decay: ``lambda``.
        action_values: The value in ``q_t``.
    """
    # Clipped before the product, because an infinite ratio times an error of zero would be NaN.
    rho = ratios.clamp(max=rho_bar)
    errors = rho * (rewards + discounts * values[1:] - values[:-1])
    traces = discounts * (ratios.clamp(max=c_bar) * trace_decay)
    # The row after the last step stays zero, because v is V there.
    difference = torch.zeros_like(values)  # v - V
    for step in reversed(range(len(rewards))):
        difference[step] = errors[step] + traces[step] * difference[step + 1]
    targets = values + difference
    following = targets[1:] if action_values == "targets" else values[1:]
    return Targets(targets[:-1], rho * (rewards + discounts * following - values[:-1]))


def no_correction(
    rewards: torch.Tensor,
    discounts: torch.Tensor,
    values: torch.Tensor,
    *,
    trace_decay: float = 1.0,
    action_values: ActionValues = "targets",
) -> Targets:
    """Return on-policy targets: n-step Bellman targets (equation 2).

    With a ``trace_decay`` below 1 they are the targets of TD(lambda). The arguments are those of
    :func:`v_trace`.
    """
    return v_trace(
        torch.ones_like(rewards),
        rewards,
        discounts,
        values,
        trace_decay=trace_decay,
        action_values=action_values,
    )


def one_step(plain: Targets, ratios: torch.Tensor, *, rho_bar: float) -> Targets:
    """Return uncorrected values, and advantages multiplied by their clipped ratios.

    This is "1-step importance sampling" (section 5.2.2). ``ratios`` are ``[time, batch]``.
    """
    return plain._replace(advantages=ratios.detach().clamp(max=rho_bar) * plain.advantages)


def epsilon_correction(plain: Targets, log_target: torch.Tensor, *, epsilon: float) -> Targets:
    """Return uncorrected values, and advantages for the policy gradient of ``log (pi + epsilon)``.

    This is the "epsilon-correction" (section 5.2.2). The gradient of ``log (pi + epsilon)`` is
    ``pi / (pi + epsilon)`` times that of ``log pi``. The factor is applied to the advantages, so
    that the loss stays the same. The entropy, which the paper does not mention here, is not
    corrected.

    Args:
        plain: Uncorrected targets.
        log_target: ``ln pi(a_t|x_t)``, ``[time, batch]``.
        epsilon: The paper has 1e-6.
    """
    probabilities = _exponentiate(log_target.detach())
    return plain._replace(advantages=probabilities / (probabilities + epsilon) * plain.advantages)


def _exponentiate(numbers: torch.Tensor) -> torch.Tensor:
    if numbers.device.type == "cpu":
        return kernels.exponentiate(numbers.contiguous())
    return numbers.exp()
