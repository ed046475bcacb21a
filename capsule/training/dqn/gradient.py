"""The gradient of a minibatch, computed in shards and handed to the optimizer piece by piece.

Nearly all parameters of a convolutional Q-network are the weights of its first dense layer. Their
gradient is an outer product of what goes into the layer and what comes back to it, and is never
written out: each piece is multiplied when the optimizer is about to use it, over all shards at
once, and is still in the cache when it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from capsule.training.layers.backends import LayerBackend
from capsule.training.networks.feedforward import WIDE, Parameters, flatten
from capsule.training.optimizers.centred_rmsprop import Piece

CACHED = 65_536  # elements of a product on the CPU: a quarter of a megabyte


class ShardedGradient:
    """One minibatch's gradient.

    The order of every sum is fixed by the shards and the shapes, never by who computes it.
    """

    def __init__(self, shards: int, parameters: Parameters, products: LayerBackend) -> None:
        self._products = products
        self._names = list(parameters.views)
        self._shape = parameters.views[WIDE].shape
        self._small: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
        self._inputs = [parameters.flat[:0] for _ in range(shards)]
        self._outputs = [parameters.flat[:0] for _ in range(shards)]
        rows, columns = self._shape
        on_cpu = parameters.flat.device.type == "cpu"
        self._rows = max(1, CACHED // columns) if on_cpu else rows

    def put(
        self,
        shard: int,
        gradients: Mapping[str, torch.Tensor],
        inputs: torch.Tensor,
        outputs: torch.Tensor,
    ) -> None:
        """Keep the gradient of one shard.

        Args:
            shard: Its number.
            gradients: Parameter name to gradient, of all tensors but the wide one.
            inputs: float32 ``[rows, in]``, what went into the wide layer.
            outputs: float32 ``[rows, out]``, the gradient of what came out of it.
        """
        self._small[shard] = {name: flatten(tensor) for name, tensor in gradients.items()}
        self._inputs[shard], self._outputs[shard] = inputs, outputs

    def pieces(self, part: int, parts: int) -> Iterator[Piece]:
        """Yield every ``parts``-th piece, beginning with number ``part``.

        A piece's memory is used again for the next one.
        """
        inputs, outputs = torch.cat(self._inputs), torch.cat(self._outputs)
        wide = self._names.index(WIDE)
        columns = self._shape[1]
        product = torch.empty((self._rows, columns), device=inputs.device)
        for start in range(part * self._rows, self._shape[0], parts * self._rows):
            units = outputs[:, start : start + self._rows]
            values = self._products.outer(units, inputs, product[: units.shape[1]]).view(-1)
            yield Piece(wide, start * columns, start * columns + len(values), [values])
        for tensor in range(part, len(self._names), parts):
            if tensor != wide:
                shards = [small[self._names[tensor]] for small in self._small]
                yield Piece(tensor, 0, len(shards[0]), shards)

    def whole(self) -> list[torch.Tensor]:
        """Return the gradient of every parameter tensor, flat, in memory order."""
        found: dict[int, list[torch.Tensor]] = {}
        for piece in self.pieces(0, 1):
            found.setdefault(piece.tensor, []).append(_sum(piece.parts).clone())
        return [torch.cat(found[tensor]) for tensor in range(len(self._names))]


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
