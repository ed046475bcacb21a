"""The sum of the shards' gradients, handed to the optimizer piece by piece.

Nearly all parameters of a convolutional Q-network are the weights of its first dense layer. Their
gradient is an outer product of what goes into the layer and what comes back to it, and is never
written out: each piece is multiplied when the optimizer is about to use it, over all shards at
once, and is still in the cache when it does.
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

CACHED = 65_536  # elements of a product on the CPU: a quarter of a megabyte


class FactoredShard(NamedTuple):
    """The contribution of one shard to an update.

    Attributes:
        loss: Scalar.
        small: Gradient of all parameters but the wide ones, float32 ``[size]``, in memory order.
        inputs: float32 ``[rows, in]``, what went into the wide layer.
        outputs: float32 ``[rows, out]``, the gradient of what came out of it.
    """

    loss: torch.Tensor
    small: torch.Tensor
    inputs: torch.Tensor
    outputs: torch.Tensor


class FactoredGradient:
    """The gradient of one minibatch.

    The order of every sum is fixed by the shards and the shapes, whichever thread computes it.

    Attributes:
        losses: Of each shard, a scalar.
    """

    def __init__(
        self,
        shards: Sequence[FactoredShard],
        parameters: Parameters,
        products: LayerBackend,
    ) -> None:
        """Keep what the shards gave, in their order."""
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
        # By the shapes alone: a library may order its sums by the size of a product, so the number
        # of threads must have no say in it.
        self._rows = max(1, CACHED // columns) if on_cpu else rows

    def pieces(self, part: int, parts: int) -> Iterator[Piece]:
        """Yield every ``parts``-th piece, beginning with number ``part``.

        A piece's memory is used again for the next one.
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
