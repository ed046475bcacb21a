"""Centred RMSProp of DQN (Mnih et al. 2015, doi:10.1038/nature14236, Extended Data Table 1).

With gradient ``g``, in this order::

    m <- a m + (1 - a) g                 a: gradient momentum
    v <- b v + (1 - b) g^2               b: squared gradient momentum
    w <- w - lr g / sqrt(v - m^2 + c)    c: minimum squared gradient

``v - m^2`` is taken as 0 if it is negative, by rounding or because ``a`` and ``b`` differ. (It is a
variance only if they are equal, as in the paper.)

``torch.optim.RMSprop(centered=True)`` differs: it uses one decay for both running means, adds its
epsilon after the root, and its "momentum" accumulates updates instead of averaging the gradient.

This optimizer and the others store subnormal running means as zero: the running means of dead units
become subnormal, with which processors take up to a hundred times as long.

Each operation is a basic operation of IEEE 754 on float32. On the CPU one fused loop does them all.
Separate operations would read and write the tensors fifteen times, and ``torch.sqrt`` uses a vector
library that does not round correctly on every processor (12,305 of 2,000,000 results differed on an
AVX-512 machine).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from capsule.training.layers import kernels
from capsule.training.networks.feedforward import Parameters


class Piece(NamedTuple):
    """The gradient of consecutive elements of the parameters.

    Attributes:
        start: Index of the first element, in the memory order of the parameters.
        end: Index after the last element.
        parts: float32 ``[end - start]`` each; their sum in this order is the gradient.
    """

    start: int
    end: int
    parts: list[torch.Tensor]


class CentredRmsProp:
    """Updates one set of parameters in place.

    Attributes:
        mean: Running mean of the gradient, in the shapes of the parameters.
        square: Running mean of its square, in the shapes of the parameters.
    """

    def __init__(
        self,
        parameters: Parameters,
        *,
        learning_rate: float,
        gradient_momentum: float,
        squared_gradient_momentum: float,
        min_squared_gradient: float,
    ) -> None:
        """Start with running means of zero; ``learning_rate`` is ``lr``, the others a, b and c."""
        self.mean = parameters.zeros_like()
        self.square = parameters.zeros_like()
        self._updated = parameters.flat, self.mean.flat, self.square.flat
        self._rate = learning_rate
        self._decay = gradient_momentum
        self._square_decay = squared_gradient_momentum
        self._floor = min_squared_gradient
        self._fused = parameters.flat.device.type == "cpu"

    def update(self, piece: Piece) -> None:
        """Update the elements of ``piece``. Several threads may update disjoint pieces."""
        w, m, v = (values[piece.start : piece.end] for values in self._updated)
        if self._fused:
            kernels.centred_rmsprop(
                w,
                m,
                v,
                piece.parts,
                decay=self._decay,
                square_decay=self._square_decay,
                floor=self._floor,
                rate=self._rate,
            )
            return
        # Not added in place, because the parts belong to the caller.
        g = piece.parts[0]
        for part in piece.parts[1:]:
            g = g + part
        without_subnormals(m.mul_(self._decay).add_(g * (1.0 - self._decay)))
        without_subnormals(v.mul_(self._square_decay).add_(g * g * (1.0 - self._square_decay)))
        variance = v.sub(m * m).clamp_(min=0)
        w.sub_(g.div(variance.add_(self._floor).sqrt_()).mul_(self._rate))


def without_subnormals(values: torch.Tensor) -> torch.Tensor:
    """Set subnormal elements of float32 ``[...]`` to zero, in place."""
    return values.masked_fill_(values.abs() < torch.finfo(torch.float32).tiny, 0.0)
