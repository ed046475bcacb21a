"""RMSProp with momentum, as IMPALA uses it (Espeholt et al. 2018, arXiv:1802.01561, table G.1).

With gradient ``g``, clipped by the norm of all of it, in this order::

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

import torch

from capsule.training.layers import kernels
from capsule.training.networks.feedforward import Parameters
from capsule.training.optimizers.adam import clipping_factor
from capsule.training.optimizers.centred_rmsprop import without_subnormals


def annealed(rate: float, done: int, total: int) -> float:
    """Return the learning rate that decreases linearly to 0, "from beginning to end of training".

    Args:
        rate: At the beginning; the paper has 0.0006 on Atari.
        done: Frames or updates so far, counted as ``total`` is; 0 at the first update.
        total: Number of steps of the training, positive. From there on the rate is 0.
    """
    return rate * (max(total - done, 0) / total)


class RmsProp:
    """Updates one set of parameters in place, as the text of the module says.

    The complement of the decay and the factor of a clipped gradient are computed in float64 and
    rounded to float32; all else is one IEEE 754 basic operation on float32 after another. On the
    CPU one fused loop does them all, and subnormal elements of ``square`` and ``step`` are stored
    as zero (:mod:`capsule.training.optimizers.centred_rmsprop` says why).

    Attributes:
        square: Running mean of the squared gradient, shaped as the parameters.
        step: The last step, shaped as the parameters. With ``square``, that is the state.
        epsilon: As given; may be changed between updates.
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
        self.square = parameters.zeros_like()
        self.square.flat.fill_(initial_square)
        self.step = parameters.zeros_like()
        self._parameters = parameters
        self.epsilon = epsilon
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
