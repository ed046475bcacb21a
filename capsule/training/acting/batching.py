"""Batches: a network evaluated for many actors at once, so that no row depends on its company.

The libraries' products choose kernels by the size of a batch, and under some kernels a row's bits
depend on its place in the batch as well. So every batch has a *fixed* number of rows, of which
actor ``i`` always has row ``i mod rows``; rows without an actor are zeros. Under ``FIXED_ORDER`` of
:mod:`capsule.training.layers.backends` a row depends on its inputs alone. There, and where
``determinism.batch_invariance`` is off, one batch holds whatever was asked for.
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
"""Evaluates a batch: inputs, ``[rows, …]`` each, to outputs, ``[rows, …]`` each."""


class Evaluated(NamedTuple):
    """The outputs of a network for some actors, a row for each.

    Attributes:
        outputs: ``[actors, …]`` each.
        sizes: int64 ``[actors]``: rows of the batch that each was evaluated in.
        places: int64 ``[actors]``: its row in that batch.
    """

    outputs: Arrays
    sizes: NDArray[np.int64]
    places: NDArray[np.int64]


class Batching(NamedTuple):
    """How batches are made.

    Attributes:
        rows: Rows of a batch of fixed size.
        fixed: Whether batches have that size, and actors their rows.
    """

    rows: int = ROWS
    fixed: bool = True

    @classmethod
    def of(cls, determinism: DeterminismSpec, products: LayerBackend, rows: int = ROWS) -> Batching:
        """Return how a run makes batches of a network with these products."""
        return cls(rows, determinism.batch_invariance and not products.fixed_order)

    def evaluate(self, network: Network, actors: Sequence[int], inputs: Arrays) -> Evaluated:
        """Evaluate a network for some actors, each of which may appear several times.

        Args:
            network: What is evaluated.
            actors: At least one.
            inputs: ``[actors, …]`` each.
        """
        # Here a row depends on its inputs alone (FIXED_ORDER), or the spec declares that it need
        # not.
        if not self.fixed:
            size = len(actors)
            outputs = _evaluated(network, tuple(map(torch.from_numpy, inputs)))
            return Evaluated(outputs, np.full(size, size), np.arange(size))
        parts = []
        for asked, places in self._batches(actors):
            batch = tuple(_placed(array[asked], places, self.rows) for array in inputs)
            found = (output[places] for output in _evaluated(network, batch))
            parts.append((np.array(asked), np.array(places), *found))
        numbers, rows, *columns = map(np.concatenate, zip(*parts, strict=True))
        # Back into the order of ``actors``, of which each batch took one for each row.
        order = np.argsort(numbers)
        outputs = tuple(column[order] for column in columns)
        return Evaluated(outputs, np.full(len(order), self.rows), rows[order])

    def _batches(self, actors: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield batches: which of ``actors`` each holds, and their rows in it."""
        columns: dict[int, list[int]] = {}
        for number, actor in enumerate(actors):
            columns.setdefault(actor % self.rows, []).append(number)
        # If actors have the same row, or one is asked several times, each takes the row
        # in a batch of its own.
        for batch in zip_longest(*columns.values()):
            rows = zip(batch, columns, strict=True)
            filled = {number: row for number, row in rows if number is not None}
            yield list(filled), list(filled.values())


def _evaluated(network: Network, inputs: Tensors) -> Arrays:
    with torch.inference_mode():
        return tuple(output.numpy() for output in network(inputs))


def require_independent_rows(network: Network, inputs: Tensors, batching: Batching) -> int:
    """Check that a row's outputs do not depend on who else is in its batch.

    Each row is evaluated among the others and alone: in its place among zeros where batches have a
    fixed size, else in a batch of its own. To be called when a trainer starts: which kernels a
    library chooses is a fact of the machine.

    Args:
        network: What is checked.
        inputs: A full batch of different rows, e.g. random ones.
        batching: How batches are made.

    Returns:
        How many rows were compared.

    Raises:
        CapsuleError: CAP-T321, a row depends on its neighbours.
    """
    arrays = tuple(tensor.numpy() for tensor in inputs)
    # These are the numbers of actors, too, so that each has a place of its own in a full batch.
    rows = range(len(arrays[0]))
    together = batching.evaluate(network, rows, arrays).outputs
    for row in rows:
        one = tuple(array[row : row + 1] for array in arrays)
        alone = batching.evaluate(network, [row], one).outputs
        # By bytes: numbers would call 0 and -0 equal, and NaN unequal to itself.
        if any(x[row].tobytes() != y[0].tobytes() for x, y in zip(together, alone, strict=True)):
            raise CapsuleError(
                "CAP-T321",
                f"row {row} of the policy's outputs depends on the other rows of its batch",
                fix="Use layers that treat rows alone (no batch statistics), or declare "
                "determinism.batch_invariance: false.",
            )
    return len(rows)


def _placed(array: NDArray[Any], places: Sequence[int], size: int) -> torch.Tensor:
    """Return a batch with zeros where no row has its place."""
    batch = np.zeros((size, *array.shape[1:]), array.dtype)
    batch[places] = array
    return torch.from_numpy(batch)
