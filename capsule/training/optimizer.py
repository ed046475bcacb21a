"""Centred RMSProp as DQN uses it (Mnih et al. 2015, Extended Data Table 1).

With gradient ``g``, in this order::

    m <- a m + (1 - a) g                 a: gradient momentum
    v <- b v + (1 - b) g^2               b: squared gradient momentum
    w <- w - lr g / sqrt(v - m^2 + c)    c: minimum squared gradient

``torch.optim.RMSprop(centered=True)`` differs: it uses one decay for both averages, adds its
epsilon after the root, and its "momentum" accumulates updates instead of averaging the gradient.

Each operation is one IEEE 754 basic operation on float32. On the CPU numpy does them on memory
shared with torch, because ``torch.sqrt`` goes through a vector library that does not round
correctly on every processor (12,305 of 2,000,000 results differed on an AVX-512 machine). Blocks
that stay in the cache make the many small operations as fast as the memory allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from capsule.training.networks import Parameters

BLOCK = 65_536  # float32 elements; six such arrays fit a second-level cache


class _Block(NamedTuple):
    """A run of elements of one tensor: numpy arrays, or tensors on a GPU."""

    tensor: int
    start: int
    stop: int
    weights: Any
    mean: Any
    square: Any
    gradient: Any
    scratch: Any


class CentredRmsProp:
    """Updates one set of parameters in place.

    Attributes:
        mean: Running mean of the gradient, shaped as the parameters.
        square: Running mean of its square, shaped as the parameters.
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
        self.mean = parameters.zeros_like()
        self.square = parameters.zeros_like()
        self._rate = learning_rate
        self._decay = gradient_momentum
        self._square_decay = squared_gradient_momentum
        self._floor = min_squared_gradient
        on_cpu = parameters.flat.device.type == "cpu"
        self._library: ModuleType = np if on_cpu else torch
        self._native = torch.Tensor.numpy if on_cpu else torch.Tensor.detach
        blocks = self._blocks(parameters)
        self.halves = (blocks[0::2], blocks[1::2])

    def step(self, shards: Sequence[Sequence[torch.Tensor]], half: int) -> None:
        """Update one half of the parameters; the two halves may run in two threads.

        Args:
            shards: For each shard of the batch its gradient: one flat tensor per parameter tensor,
                in memory order (see ``networks.flatten``). Shards are summed in this order.
            half: 0 or 1.
        """
        arrays = [[self._native(tensor) for tensor in shard] for shard in shards]
        for block in self.halves[half]:
            parts = [shard[block.tensor][block.start : block.stop] for shard in arrays]
            self._update(block, parts)

    def _update(self, block: _Block, parts: list[Any]) -> None:
        library, w, m, v, t = (
            self._library,
            block.weights,
            block.mean,
            block.square,
            block.scratch,
        )
        g = parts[0]
        for part in parts[1:]:
            g = library.add(g, part, out=block.gradient)
        library.multiply(m, self._decay, out=m)
        library.multiply(g, 1.0 - self._decay, out=t)
        library.add(m, t, out=m)
        library.multiply(v, self._square_decay, out=v)
        library.multiply(g, g, out=t)
        library.multiply(t, 1.0 - self._square_decay, out=t)
        library.add(v, t, out=v)
        library.multiply(m, m, out=t)
        library.subtract(v, t, out=t)
        library.add(t, self._floor, out=t)
        library.sqrt(t, out=t)
        library.divide(g, t, out=t)
        library.multiply(t, self._rate, out=t)
        library.subtract(w, t, out=w)

    def _blocks(self, parameters: Parameters) -> list[_Block]:
        """Cut every tensor into blocks; even and odd blocks share no scratch memory."""
        flats = [
            [self._native(segment) for segment in values.segments]
            for values in (parameters, self.mean, self.square)
        ]
        scratch = [self._native(torch.empty_like(parameters.flat[:BLOCK])) for _ in range(4)]
        blocks: list[_Block] = []
        for tensor, (weights, mean, square) in enumerate(zip(*flats, strict=True)):
            for start in range(0, len(weights), BLOCK):
                stop = min(start + BLOCK, len(weights))
                first, second = scratch[:2] if len(blocks) % 2 == 0 else scratch[2:]
                size = stop - start
                blocks.append(
                    _Block(
                        tensor,
                        start,
                        stop,
                        weights[start:stop],
                        mean[start:stop],
                        square[start:stop],
                        first[:size],
                        second[:size],
                    )
                )
        return blocks
