"""Adam (Kingma and Ba 2015, arXiv:1412.6980, algorithm 1), with clipping by the global norm.

With gradient ``g`` of update ``t``, in this order::

    g <- min(1, M / |g|) g              M: maximum norm
    m <- a m + (1 - a) g                a = 0.9: decay of the mean, beta_1
    v <- b v + (1 - b) g^2              b = 0.999: decay of the mean square, beta_2
    w <- w - lr (m / (1 - a^t)) / (sqrt(v / (1 - b^t)) + e)

The decays are those that the paper recommends. The clipping is algorithm 1 of Pascanu et al. 2013,
arXiv:1211.5063. ``a``, ``b``, their complements, the two corrections and the factor of ``g`` are
computed in float64 and rounded to float32. All other operations are basic operations of IEEE 754 on
float32, one after another. On the CPU one fused loop does them all. Running means that are
subnormal are stored as zero, for the reason in
:mod:`capsule.training.optimizers.centred_rmsprop`.

On a GPU the corrections and the factor are scalar tensors on the device: the host's numbers would
be fixed in a CUDA graph, reading the norm would wait for the device, and torch divides by a number
of the host by multiplying with its reciprocal.
"""

from __future__ import annotations

import math

import torch

from capsule.training.layers import kernels
from capsule.training.networks.feedforward import Parameters
from capsule.training.optimizers.centred_rmsprop import without_subnormals

_DECAY, _SQUARE_DECAY = 0.9, 0.999


class Adam:
    """Updates one set of parameters in place.

    Attributes:
        mean: Running mean of the gradient, in the shapes of the parameters.
        square: Running mean of its square, in the shapes of the parameters.
        updates: Updates made. Together with the running means, this is the optimizer's state.
    """

    def __init__(self, parameters: Parameters, *, learning_rate: float, epsilon: float) -> None:
        """Start with running means of zero; ``learning_rate`` is ``lr``, ``epsilon`` is ``e``."""
        self.mean = parameters.zeros_like()
        self.square = parameters.zeros_like()
        self.updates = 0
        self._parameters = parameters
        self._rate = learning_rate
        self._epsilon = epsilon
        device = parameters.flat.device
        # On the CPU they are passed to the kernel as numbers, which rounds them; on a GPU they are
        # operands of float32 operations.
        exact = torch.float64 if device.type == "cpu" else torch.float32
        self._corrections = torch.ones(2, dtype=exact, device=device)

    def advance(self) -> None:
        """Count an update, and copy the bias corrections for it to the device."""
        self.updates += 1
        corrections = [1.0 - _power(decay, self.updates) for decay in (_DECAY, _SQUARE_DECAY)]
        self._corrections.copy_(torch.tensor(corrections, dtype=self._corrections.dtype))

    def descend(self, gradient: torch.Tensor, maximum_norm: float | None = None) -> None:
        """Make the update that :meth:`advance` counted. A CUDA graph can capture this call.

        Args:
            gradient: float32 ``[size]``, in the memory order of the parameters; not changed.
            maximum_norm: ``M``; None for no clipping.
        """
        w, m, v = (each.flat for each in (self._parameters, self.mean, self.square))
        if gradient.device.type == "cpu":
            correction, square_correction = self._corrections.tolist()
            kernels.adam(
                w,
                m,
                v,
                gradient,
                factor=float(clipping_factor(gradient, maximum_norm)),
                decay=_DECAY,
                square_decay=_SQUARE_DECAY,
                correction=correction,
                square_correction=square_correction,
                epsilon=self._epsilon,
                rate=self._rate,
            )
            return
        g = gradient * clipping_factor(gradient, maximum_norm)
        correction, square_correction = self._corrections.unbind()
        without_subnormals(m.mul_(_DECAY).add_(g * (1.0 - _DECAY)))
        # Products are computed from left to right, as in the fused loop: the square comes first.
        without_subnormals(v.mul_(_SQUARE_DECAY).add_(g * g * (1.0 - _SQUARE_DECAY)))
        root = v.div(square_correction).sqrt_().add_(self._epsilon)
        w.sub_(m.div(correction).div_(root).mul_(self._rate))


def clipping_factor(gradient: torch.Tensor, maximum: float | None) -> float | torch.Tensor:
    """Return the factor that clips a gradient to the norm ``maximum``; 1 if it is not longer.

    On the CPU the squares are added in float64, in memory order; on a GPU, in the order of torch.

    Args:
        gradient: float32 ``[size]``.
        maximum: None for no clipping.

    Returns:
        A number; for a gradient on a GPU, a float32 scalar tensor there, unless ``maximum`` is
        None.
    """
    if maximum is None:
        return 1.0
    # A gradient whose norm is NaN is not clipped: the NaN reaches the weights, and the next loss
    # is reported as not finite (CAP-T151).
    if gradient.device.type == "cpu":
        norm = math.sqrt(kernels.sum_of_squares(gradient))
        return maximum / norm if norm > maximum else 1.0
    there = gradient.double().square().sum().sqrt()
    factor = torch.full_like(there, maximum) / there  # "maximum / there" multiplies by a reciprocal
    return factor.where(there > maximum, 1.0).to(torch.float32)


def _power(base: float, exponent: int) -> float:
    """Return ``base^exponent`` by squaring: only multiplications, so the same bits everywhere."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
