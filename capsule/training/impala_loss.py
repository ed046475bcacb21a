"""The loss of IMPALA and what follows it up to the weights (Espeholt et al. 2018, section 4.2).

*Loss*. With the targets of :mod:`capsule.training.v_trace` as constants it is, summed over time and
batch (table D.1: "the loss is summed across the batch and time dimensions")::

    - sum log pi(a_t|x_t) advantage_t + b sum 1/2 (v_t - V(x_t))^2 - e sum entropy(pi(.|x_t))

``b`` 0.5 and ``e`` 0.01 on Atari (table G.1). A sum makes the learning rate one for a batch and an
unroll of certain sizes; a mean would change its meaning. Half the square, since section 4.2 wants
the gradient ``(v - V) grad V``.

*Policy*. Logarithms of probabilities and entropies are computed on a CPU by loops of our own in
float64 and rounded (:func:`capsule.training.kernels.log_softmax`), their gradient in float32, one
action after the other: the same bits for a row alone as in a batch, and at every vector width. On a
GPU its library computes them.

*RMSProp*. With gradient ``g``, clipped by the norm of all of it, in this order::

    v <- a v + (1 - a) g^2               a: decay
    u <- m u + lr g / sqrt(v + c)        m: momentum; c: epsilon
    w <- w - u

The paper names momentum (0) and epsilon (0.01 on Atari) and leaves the rest open. This is what
``tf.train.RMSPropOptimizer`` computes, of TensorFlow 1, with which the code published by its
authors trains: epsilon inside the root, ``v`` beginning with 1, not 0; decay 0.99 is theirs, too.
``torch.optim.RMSprop`` adds epsilon after the root, begins with 0 and applies the learning rate
after the momentum. As epsilon is large here, its place matters: where gradients are small, 0.01
inside the root makes steps of ``10 lr g``, outside of ``100 lr g``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from capsule.training import kernels
from capsule.training.adam import global_norm
from capsule.training.networks import Parameters
from capsule.training.recurrent_q_learning import clip_rewards
from capsule.training.v_trace import Targets

RewardClipping = Literal["none", "unit", "asymmetric"]


# --- policies -------------------------------------------------------------------------------------


class Policy(NamedTuple):
    """Probabilities of actions; gradients flow through both.

    Attributes:
        logarithms: ``ln pi(a|x)``: float32 ``[..., actions]``.
        entropies: ``- sum_a pi(a|x) ln pi(a|x)``: float32 ``[...]``.
    """

    logarithms: torch.Tensor
    entropies: torch.Tensor

    def of(self, actions: torch.Tensor) -> torch.Tensor:
        """Return ``ln pi(a|x)`` of the actions taken, int64 ``[...]``: float32 ``[...]``."""
        return self.logarithms.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def softmax_policy(logits: torch.Tensor) -> Policy:
    """Return the policy ``softmax(logits)``.

    Args:
        logits: float32 ``[..., actions]``, finite.
    """
    if logits.device.type == "cpu":
        apply: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _LogSoftmax.apply
        logarithms, entropies = apply(logits.flatten(0, -2))
        return Policy(logarithms.view(logits.shape), entropies.view(logits.shape[:-1]))
    logarithms = logits.log_softmax(-1)
    return Policy(logarithms, -(logarithms.exp() * logarithms).sum(-1))


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
        return kernels.log_softmax_back(
            logarithms,
            probabilities,
            entropies,
            logarithm_gradients.contiguous(),
            entropy_gradients.contiguous(),
        )


# --- losses ---------------------------------------------------------------------------------------


class Losses(NamedTuple):
    """What is minimized, and its parts without their costs: float32 scalars.

    Attributes:
        total: ``policy + b baseline + e entropy``.
        policy: Of the policy gradient; its value means nothing, only its gradient does.
        baseline: Half the summed squares of what the baseline misses.
        entropy: Less the summed entropies, so never positive.
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
    """Return the losses, summed over time and batch: of parts of a batch they add up to its own.

    Args:
        log_target: ``ln pi(a_t|x_t)`` of the actions taken, float32 ``[time, batch]``.
        entropies: Of the policy at each step, float32 ``[time, batch]``.
        baselines: ``V(x_t)``, float32 ``[time, batch]``.
        targets: Taken as constants.
        baseline_cost: ``b``; the default is the paper's.
        entropy_cost: ``e``; the default is the paper's on Atari.
    """
    missed = targets.values.detach() - baselines
    policy = -(log_target * targets.advantages.detach()).sum()
    baseline = 0.5 * (missed * missed).sum()
    entropy = -entropies.sum()
    total = policy + baseline_cost * baseline + entropy_cost * entropy
    return Losses(total, policy, baseline, entropy)


def clipped_rewards(rewards: NDArray[np.float64], clipping: RewardClipping) -> NDArray[np.float32]:
    """Return rewards as the learner takes them (tables D.3 and G.1).

    Args:
        rewards: float64, any shape.
        clipping: ``unit``: to ``[-1, 1]``, not to their sign as DQN does; ``asymmetric``:
            figure D.1, :func:`capsule.training.recurrent_q_learning.clip_rewards`; ``none``.
    """
    if clipping == "asymmetric":
        return clip_rewards(rewards)
    bound = 1.0 if clipping == "unit" else math.inf
    return np.clip(rewards, -bound, bound).astype(np.float32)


# --- optimizer ------------------------------------------------------------------------------------


def annealed(rate: float, done: int, total: int) -> float:
    """Return the learning rate that falls in a line to 0, "from beginning to end of training".

    Args:
        rate: At the beginning; the paper has 0.0006 on Atari.
        done: Frames or updates so far, counted as ``total`` is; 0 at the first update.
        total: Of the training, positive. From there on the rate is 0.
    """
    return rate * (max(total - done, 0) / total)


class RmsProp:
    """Updates one set of parameters in place, as the text of the module says.

    The complement of the decay and the factor of a clipped gradient are computed in float64 and
    rounded to float32; all else is one IEEE 754 basic operation on float32 after another. On the
    CPU one fused loop does them all (:mod:`capsule.training.optimizer` says why).

    Attributes:
        square: Running mean of the squared gradient, shaped as the parameters.
        step: The last step, shaped as the parameters. With ``square``, that is the state.
    """

    def __init__(
        self,
        parameters: Parameters,
        *,
        epsilon: float,
        decay: float = 0.99,
        momentum: float = 0.0,
        initial_square: float = 1.0,
    ) -> None:
        """Start.

        Args:
            parameters: What to update.
            epsilon: Added to the mean square; the paper has 0.01 on Atari.
            decay: Of the mean square.
            momentum: Share of the last step in the next; the default is the paper's.
            initial_square: What the mean square is before the first update.
        """
        self.square = parameters.zeros_like()
        self.square.flat.fill_(initial_square)
        self.step = parameters.zeros_like()
        self._parameters = parameters
        self._epsilon = epsilon
        self._decay = decay
        self._momentum = momentum

    def update(self, gradient: torch.Tensor, rate: float, maximum_norm: float = math.inf) -> None:
        """Make one update.

        Args:
            gradient: float32 ``[size]``, in the memory order of the parameters; left as it is.
            rate: Learning rate of this update, as :func:`annealed`.
            maximum_norm: A longer gradient is brought to this length; the paper has 40 on Atari.
        """
        w, v, u = (each.flat for each in (self._parameters, self.square, self.step))
        norm = 0.0 if maximum_norm == math.inf else global_norm(gradient)
        factor = maximum_norm / norm if norm > maximum_norm else 1.0
        if gradient.device.type == "cpu":
            kernels.rmsprop(
                w,
                v,
                u,
                gradient,
                factor=factor,
                decay=self._decay,
                momentum=self._momentum,
                epsilon=self._epsilon,
                rate=rate,
            )
            return
        g = gradient * factor
        v.mul_(self._decay).add_(g * g * (1.0 - self._decay))
        step = g.div(v.add(self._epsilon).sqrt_()).mul_(rate)
        u.mul_(self._momentum).add_(step)
        w.sub_(u)
