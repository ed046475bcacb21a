"""Priorities of sequences, and drawing in proportion to them.

The source is Schaul et al. 2016, arXiv:1511.05952, section 3.3, equation 1.

Sequence ``i`` is drawn with probability ``p_i^a / sum_k p_k^a``, for the priority exponent ``a``.
The weights ``p_i^a`` are the leaves of a sum tree. The leaves of each actor are an aligned block of
a power of two, and so a subtree: the weights of one actor and their sums do not depend on other
actors. Its sequence ``n`` has leaf ``n mod kept`` of the block. A new sequence is not drawn before
it is given a priority.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capsule.training.losses.r2d2 import exponentiate
from capsule.training.r2d2.sum_tree import SumTree
from capsule.training.state.checkpoint import array_document, document_array

# Lower priorities count as this one, so that sequences without errors can be drawn as well. (Schaul
# et al. 2016, section 3.3, add a small constant to each priority instead.)
LOWEST_PRIORITY = 1e-6


class Priorities:
    """The weights of the sequences that each actor keeps.

    Attributes:
        tree: The weights, and their sums.
    """

    def __init__(self, exponent: float, *, actors: int, kept: int) -> None:
        """Begin without priorities.

        Args:
            exponent: Priority exponent ``a``.
            actors: Number of logical actors.
            kept: Most sequences that an actor keeps.
        """
        self._exponent, self._kept = exponent, kept
        self._block = 1 << (kept - 1).bit_length()
        self.tree = SumTree(actors * self._block)

    def update(
        self,
        actors: NDArray[np.int64],
        numbers: NDArray[np.int64],
        priorities: NDArray[np.float64],
    ) -> None:
        """Set the priorities of sequences that are kept; of equal ones, the last one counts.

        Args:
            actors: Actor of each sequence, int64 ``[count]``.
            numbers: Number of each among the sequences of its actor, int64 ``[count]``.
            priorities: float64 ``[count]``, before the exponent.
        """
        weights = exponentiate(np.maximum(priorities, LOWEST_PRIORITY), self._exponent)
        self.tree.set(self._leaves(actors, numbers), weights)

    def clear(self, actor: int, numbers: NDArray[np.int64]) -> None:
        """Remove the priorities of evicted sequences of an actor, int64 ``[count]``."""
        leaves = self._leaves(np.full_like(numbers, actor), numbers)
        self.tree.set(leaves, np.zeros(len(numbers)))

    def sample(
        self, uniforms: NDArray[np.float64], newest: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Draw sequences.

        Args:
            uniforms: float64 ``[batch]``, each in [0, 1).
            newest: Number of the newest sequence of each actor, int64 ``[actors]``.

        Returns:
            Actors and numbers, int64 ``[batch]``, and probabilities, float64 ``[batch]``.

        Raises:
            ValueError: No sequence has a priority.
        """
        # A block is larger than ``kept`` unless that is a power of two. Its other leaves never have
        # a weight and are therefore never drawn.
        leaves = self.tree.sample(uniforms)
        actors, places = np.divmod(leaves, self._block)
        # A leaf belongs to the newest sequence whose number has this remainder.
        numbers = newest[actors] - (newest[actors] - places) % self._kept
        return actors, numbers, self.tree.get(leaves) / self.tree.total

    def state(self) -> dict[str, Any]:
        """Return a JSON-safe snapshot."""
        return {"weights": array_document(self.tree.leaves)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Return to what :meth:`state` returned."""
        self.tree.restore(document_array(state["weights"]))

    def _leaves(self, actors: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return actors * self._block + numbers % self._kept
