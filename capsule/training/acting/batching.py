"""Batches: evaluating a network for many actors at once, with rows that do not affect one another.

Torch's libraries choose the kernel of a product by the size of the batch, and with some kernels the
bits of a row also depend on its place in the batch. Every batch therefore has a *fixed* number of
rows, in which actor ``i`` always has row ``i mod rows``; rows without an actor are zeros. Under
``FIXED_ORDER`` of :mod:`capsule.training.layers.backends` a row depends on its inputs alone. In
this case, and if ``determinism.batch_invariance`` is off, one batch has all requested rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import DeterminismSpec
from capsule.training.layers.backends import LayerBackend

ROWS = 16

Arrays = tuple[NDArray[Any], ...]
Tensors = tuple[torch.Tensor, ...]
Network = Callable[[Tensors], Tensors]
"""A function from the inputs of a batch, ``[rows, …]`` each, to its outputs, ``[rows, …]`` each."""


class BatchOutputs(NamedTuple):
    """The outputs of a network for some actors, a row for each.

    Attributes:
        outputs: ``[actors, …]`` each.
        sizes: int64 ``[actors]``: number of rows of the batch in which each was evaluated.
        places: int64 ``[actors]``: its row in that batch.
    """

    outputs: Arrays
    sizes: NDArray[np.int64]
    places: NDArray[np.int64]


class Batching(NamedTuple):
    """The way in which batches are made.

    Attributes:
        rows: Number of rows of a batch of fixed size.
        fixed: Whether batches have that size, and each actor its row.
    """

    rows: int = ROWS
    fixed: bool = True

    @classmethod
    def of(cls, determinism: DeterminismSpec, products: LayerBackend, rows: int = ROWS) -> Batching:
        """Return how a run makes batches for a network with the arithmetic ``products``."""
        return cls(rows, determinism.batch_invariance and not products.fixed_order)

    def evaluate(self, network: Network, actors: Sequence[int], inputs: Arrays) -> BatchOutputs:
        """Evaluate a network for some actors, each of which may appear several times.

        Args:
            network: The network.
            actors: Numbers of the actors, at least one.
            inputs: ``[actors, …]`` each.
        """
        # Either a row depends on its inputs alone (FIXED_ORDER), or the spec does not require that.
        if not self.fixed:
            size = len(actors)
            outputs = _evaluated(network, tuple(map(torch.from_numpy, inputs)))
            return BatchOutputs(outputs, np.full(size, size), np.arange(size))
        parts = []
        for indices, places in self._batches(actors):
            batch = tuple(_placed(array[indices], places, self.rows) for array in inputs)
            found = (output[places] for output in _evaluated(network, batch))
            parts.append((np.array(indices), np.array(places), *found))
        numbers, rows, *columns = map(np.concatenate, zip(*parts, strict=True))
        # The parts are in the order of the batches; this restores the order of ``actors``.
        order = np.argsort(numbers)
        outputs = tuple(column[order] for column in columns)
        return BatchOutputs(outputs, np.full(len(order), self.rows), rows[order])

    def _batches(self, actors: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield batches: the indices of ``actors`` in each, and their rows in it."""
        columns: dict[int, list[int]] = {}
        for number, actor in enumerate(actors):
            columns.setdefault(actor % self.rows, []).append(number)
        # Actors with the same row, and several requests of one actor, are in different batches.
        for batch in zip_longest(*columns.values()):
            rows = zip(batch, columns, strict=True)
            filled = {number: row for number, row in rows if number is not None}
            yield list(filled), list(filled.values())


def _evaluated(network: Network, inputs: Tensors) -> Arrays:
    with torch.inference_mode():
        return tuple(output.numpy() for output in network(inputs))


def require_independent_rows(network: Network, inputs: Tensors, batching: Batching) -> int:
    """Check that a row's outputs do not depend on the other rows of its batch.

    Each row is evaluated together with the others and alone: in its place among zeros if batches
    have a fixed size, otherwise in a batch of its own. The check is made when a trainer starts,
    because a library chooses its kernels by the machine.

    Args:
        network: The network.
        inputs: A full batch of different rows, such as random ones, ``[rows, …]`` each.
        batching: How batches are made.

    Returns:
        The number of rows compared.

    Raises:
        CapsuleError: CAP-T321, a row depends on the other rows.
    """
    arrays = tuple(tensor.numpy() for tensor in inputs)
    # These also serve as actor numbers, so that each row has its own place in a full batch.
    rows = range(len(arrays[0]))
    together = batching.evaluate(network, rows, arrays).outputs
    for row in rows:
        one = tuple(array[row : row + 1] for array in arrays)
        alone = batching.evaluate(network, [row], one).outputs
        # Compared as bytes, because 0 equals -0 as a number, and NaN does not equal itself.
        if any(x[row].tobytes() != y[0].tobytes() for x, y in zip(together, alone, strict=True)):
            raise CapsuleError(
                "CAP-T321",
                f"row {row} of the policy's outputs depends on the other rows of its batch",
                fix="Use layers that treat rows alone (no batch statistics), or declare "
                "determinism.batch_invariance: false.",
            )
    return len(rows)


def _placed(array: NDArray[Any], places: Sequence[int], size: int) -> torch.Tensor:
    """Return a batch with the rows of ``array`` at ``places``, and zeros elsewhere."""
    batch = np.zeros((size, *array.shape[1:]), array.dtype)
    batch[places] = array
    return torch.from_numpy(batch)
