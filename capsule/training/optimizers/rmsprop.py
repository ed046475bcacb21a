"""RMSProp with momentum, as IMPALA uses it (Espeholt et al. 2018, arXiv:1802.01561, table G.1).

With gradient ``g``, clipped by its global norm, in this order::

    v <- a v + (1 - a) g^2               a: decay
    u <- m u + lr g / sqrt(v + c)        m: momentum; c: epsilon
    w <- w - u

The paper names momentum (0) and epsilon (0.01 on Atari) and leaves the rest open. These are the
equations of ``tf.train.RMSPropOptimizer`` of TensorFlow 1, with which the code published by the
authors trains: epsilon is inside the root, and ``v`` begins with 1 and not 0. The decay of 0.99 is
also that of their code. ``torch.optim.RMSprop`` adds epsilon after the root, begins with 0 and
applies the learning rate after the momentum. The place of epsilon matters, because it is large: if
gradients are small, steps are ``10 lr g`` with 0.01 inside the root, and ``100 lr g`` outside of
it.
"""

from __future__ import annotations

import torch

from capsule.training.layers import kernels
from capsule.training.networks.feedforward import Parameters
from capsule.training.optimizers.adam import clipping_factor
from capsule.training.optimizers.centred_rmsprop import without_subnormals


def annealed(rate: float, done: int, total: int) -> float:
    """Return a learning rate that decreases linearly to 0 "from beginning to end of training".

    The source is table G.1.

    Args:
        rate: The learning rate at the beginning; 0.0006 on Atari.
        done: Steps before this update; 0 at the first one.
        total: Steps of the whole training, positive. From there on the rate is 0.
    """
    return rate * (max(total - done, 0) / total)


class RmsProp:
    """Updates one set of parameters in place, by the equations of this module.

    The complement of the decay and the factor of a clipped gradient are computed in float64 and
    rounded to float32. All other operations are basic operations of IEEE 754 on float32, one after
    another. On the CPU one fused loop does them all. Subnormal elements of ``square`` and ``step``
    are stored as zero, for the reason in :mod:`capsule.training.optimizers.centred_rmsprop`.

    Attributes:
        square: Running mean of the squared gradient, in the shapes of the parameters.
        step: The last step ``u``, in the shapes of the parameters. Together with ``square``, this
            is the optimizer's state.
        epsilon: ``c``, which may be changed between updates.
    """

    def __init__(
        self,
        parameters: Parameters,
        *,
        epsilon: float,
        decay: float,
        momentum: float,
    ) -> None:
        """Start with ``v`` of 1 and ``u`` of 0; ``decay`` is ``a``, and ``momentum`` is ``m``."""
        self.square = parameters.zeros_like()
        self.square.flat.fill_(1.0)
        self.step = parameters.zeros_like()
        self._parameters = parameters
        self.epsilon = epsilon
        self._decay = decay
        self._momentum = momentum

    def update(
        self, gradient: torch.Tensor, rate: float, maximum_norm: float | None = None
    ) -> None:
        """Make one update.

        Args:
            gradient: float32 ``[size]``, in the memory order of the parameters; not changed.
            rate: Learning rate of this update.
            maximum_norm: Norm to which a longer gradient is clipped, 40 on Atari; None for no
                clipping.
        """
        w, v, u = (each.flat for each in (self._parameters, self.square, self.step))
        if gradient.device.type == "cpu":
            kernels.rmsprop(
                w,
                v,
                u,
                gradient,
                factor=float(clipping_factor(gradient, maximum_norm)),
                decay=self._decay,
                momentum=self._momentum,
                epsilon=self.epsilon,
                rate=rate,
            )
            return
        g = gradient * clipping_factor(gradient, maximum_norm)
        without_subnormals(v.mul_(self._decay).add_(g * g * (1.0 - self._decay)))
        step = g.div(v.add(self.epsilon).sqrt_()).mul_(rate)
        without_subnormals(u.mul_(self._momentum).add_(step))
        w.sub_(u)
