"""The sum of the shards' gradients, given to the optimizer piece by piece.

Nearly all parameters of a convolutional Q-network are the weights of its first dense layer. Their
gradient is the product of the layer's inputs with the gradient of its outputs, summed over the
rows of the minibatch. It is never in memory as a whole: each piece is computed, for all shards at
once, when the optimizer is about to use it, and is still in the cache then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch

from capsule.training.layers.backends import LayerBackend
from capsule.training.networks.feedforward import WIDE, Parameters
from capsule.training.optimizers.centred_rmsprop import Piece
from capsule.training.sharded_gradient import added

CACHED = 65_536  # elements of a piece on the CPU: a quarter of a megabyte, which fits the cache


class FactoredShard(NamedTuple):
    """The contribution of one shard to an update.

    Attributes:
        loss: float32 scalar.
        small: Gradient of all parameters but the wide layer's weights, float32 ``[size]``, in
            memory order.
        inputs: Inputs of the wide layer, float32 ``[rows, in]``.
        outputs: Gradient of its outputs, float32 ``[rows, out]``.
    """

    loss: torch.Tensor
    small: torch.Tensor
    inputs: torch.Tensor
    outputs: torch.Tensor


class FactoredGradient:
    """The gradient of one minibatch.

    The order of every sum is fixed by the shards and the shapes, whichever thread computes it.

    Attributes:
        losses: Loss of each shard, float32 scalars.
    """

    def __init__(
        self,
        shards: Sequence[FactoredShard],
        parameters: Parameters,
        products: LayerBackend,
    ) -> None:
        """Keep the contributions of the shards.

        Args:
            shards: Contributions in the order of the shards.
            parameters: Theta, for its shapes and its device.
            products: The arithmetic of the layers.
        """
        self.losses = [shard.loss for shard in shards]
        self._products = products
        self._shards = shards
        self._inputs = _joined([shard.inputs for shard in shards])
        self._outputs = _joined([shard.outputs for shard in shards])
        wide = parameters.views[WIDE]
        before = takewhile(lambda name: name != WIDE, parameters.views)
        self._start = sum(parameters.views[name].numel() for name in before)
        self._end = self._start + wide.numel()
        self._size = parameters.flat.numel()
        self._shape = wide.shape
        rows, columns = self._shape
        on_cpu = parameters.flat.device.type == "cpu"
        # The size of a piece follows from the shapes alone, and not from the number of threads,
        # because a library may order its sums by the size of a product.
        self._rows = max(1, CACHED // columns) if on_cpu else rows

    def pieces(self, part: int, parts: int) -> Iterator[Piece]:
        """Yield every ``parts``-th piece, beginning with number ``part``.

        Only one piece may be in use at a time: the next one overwrites its memory.
        """
        rows, columns = self._shape
        product = torch.empty((self._rows, columns), device=self._inputs.device)
        for start in range(part * self._rows, rows, parts * self._rows):
            units = self._outputs[:, start : start + self._rows]
            out = product[: units.shape[1]]
            values = self._products.outer(units, self._inputs, out).view(-1)
            first = self._start + start * columns
            yield Piece(first, first + len(values), [values])
        around = [(0, self._start, 0), (self._end, self._size, self._start)]
        for first, end, place in around[part::parts]:
            shards = [shard.small[place : place + end - first] for shard in self._shards]
            yield Piece(first, end, shards)

    def whole(self) -> torch.Tensor:
        """Return the gradient of every parameter, float32 ``[size]``, in memory order."""
        flat = self._inputs.new_empty(self._size)
        for piece in self.pieces(0, 1):
            flat[piece.start : piece.end] = added(piece.parts)
        return flat


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([*parts]) if len(parts) > 1 else parts[0]
