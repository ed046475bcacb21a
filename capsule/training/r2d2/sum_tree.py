"""A sum tree, to draw from a discrete distribution.

The source is Schaul et al. 2016, arXiv:1511.05952, appendix B.2.1. There a minibatch of k has one
draw from each of k equal ranges of the sum; here the draws are independent.

Leaf ``i`` has a weight; every inner node is the float64 sum of its two children, computed anew
whenever one of them changes and never by adding a difference. The whole tree is therefore a
function of its leaves alone: it has the same bits whatever the order of the changes. A tree whose
leaves are an aligned block of a power of two of another tree's leaves is a subtree of that tree,
bit for bit.

Ties and rounding. With exact sums, leaf ``i`` is found for the numbers from the sum of the leaves
before it (included) to that sum plus its own weight (excluded). The search descends from the root:
a number less than the left child's sum goes left; any other number goes right, reduced by that sum;
a child of weight 0 is never entered. Rounding may therefore move the border between two leaves by
a few ulp of the total, and a number that rounding has put at or above a subtree's sum finds the
last leaf there that has a weight. A leaf of weight 0 is never found.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class SumTree:
    """Weights and their sums.

    Attributes:
        size: Number of leaves.
    """

    def __init__(self, size: int) -> None:
        """Make a tree of ``size`` leaves of weight 0, at least one."""
        self.size = size
        # Leaves beyond ``size`` fill up the power of two. Their weight stays 0, so they are never
        # found.
        self._width = 1 << (size - 1).bit_length()
        # Node 1 is the root, nodes 2n and 2n + 1 are the children of n; the leaves come last.
        self._nodes = np.zeros(2 * self._width)

    @property
    def total(self) -> float:
        """The sum of all weights, which is the root."""
        return float(self._nodes[1])

    @property
    def leaves(self) -> NDArray[np.float64]:
        """A copy of the weights, float64 ``[size]``."""
        return self._nodes[self._width : self._width + self.size].copy()

    def get(self, indices: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the weights of leaves: float64, of the shape of ``indices``.

        Raises:
            IndexError: There is no such leaf.
        """
        self._check(indices)
        return self._nodes[indices + self._width]

    def set(self, indices: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        """Set the weights of leaves; of equal indices, the last one counts.

        Args:
            indices: int64 ``[count]``.
            weights: float64 ``[count]``.

        Raises:
            ValueError: A weight is negative or not finite; nothing is changed.
            IndexError: There is no such leaf; nothing is changed.
        """
        self._check(indices)
        if not (np.isfinite(weights) & (weights >= 0)).all():
            raise ValueError("a weight is negative or not finite")
        if not len(indices):
            return
        # numpy does not define the order of assignments to equal indices, so only the last of each
        # is kept.
        unique, last = np.unique(indices[::-1], return_index=True)
        nodes = unique + self._width
        self._nodes[nodes] = weights[::-1][last]
        for _ in range(self._width.bit_length() - 1):
            nodes >>= 1  # siblings give the same parent twice, and the same sum
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]

    def restore(self, leaves: NDArray[np.float64]) -> None:
        """Replace all weights.

        Args:
            leaves: float64 ``[size]``.

        Raises:
            ValueError: A weight is negative or not finite; nothing is changed.
        """
        self.set(np.arange(self.size), leaves)

    def find(self, numbers: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the leaf whose range of the total contains each number.

        Args:
            numbers: float64 ``[count]``, each in ``[0, total]``.

        Returns:
            int64 ``[count]``; never a leaf of weight 0.

        Raises:
            ValueError: A number is outside of this range, or no leaf has a weight.
        """
        if self.total == 0 or not ((numbers >= 0) & (numbers <= self.total)).all():
            raise ValueError(f"a number is not in [0, {self.total}], or all weights are 0")
        rest = numbers.copy()
        nodes = np.ones(len(numbers), np.int64)
        for _ in range(self._width.bit_length() - 1):
            nodes *= 2
            left = self._nodes[nodes]
            right = (rest >= left) & (self._nodes[nodes + 1] > 0)
            rest -= np.where(right, left, 0)
            nodes += right
        return nodes - self._width

    def sample(self, uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
        """Draw leaves in proportion to their weights.

        Args:
            uniforms: float64 ``[count]``, each in [0, 1).

        Returns:
            int64 ``[count]``.

        Raises:
            ValueError: No leaf has a weight.
        """
        return self.find(uniforms * self.total)

    def _check(self, indices: NDArray[np.int64]) -> None:
        # A negative index would name an inner node.
        if len(indices) and not (indices.min() >= 0 and indices.max() < self.size):
            raise IndexError(f"a leaf is not in [0, {self.size})")
