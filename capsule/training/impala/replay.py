"""Experience replay of unrolls (Espeholt et al. 2018, arXiv:1802.01561, section 5.2.2).

"We draw 50% of the items in each batch uniformly at random from the replay buffer." When the memory
is full, a new unroll replaces the oldest one: table D.3 says "Removal: First-in-first-out". The
paper leaves the rest open: here fresh unrolls are appended before any are drawn, so that there is
always one to draw, and unrolls are drawn with replacement.

The unrolls are stored in a ring in files of the run's state (:mod:`capsule.training.state.rings`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capsule.training.impala.actors.unrolls import Unroll
from capsule.training.state.rings import Rings, require_checkpoint
from capsule.training.state.streams import Stream
from capsule.training.state.trace import arrays_digest

_FIELDS = tuple(name for name in Unroll._fields if name != "returns")


class UnrollReplay:
    """The newest unrolls, first in, first out."""

    def __init__(
        self, directory: Path | None, example: Unroll, *, capacity: int, slack: int
    ) -> None:
        """Open the ring in ``directory``, making its files where there are none.

        Args:
            directory: The folder of the memory-mapped files; None keeps the ring in memory.
            example: An unroll with the shapes of all unrolls.
            capacity: Unrolls that can be drawn.
            slack: Unrolls that can be added after a checkpoint without overwriting any that it
                needs.

        Raises:
            CapsuleError: CAP-T221, there is no room for the files.
        """
        self._capacity = capacity
        arrays = {name: getattr(example, name) for name in _FIELDS}
        fields = {name: (array.dtype, array.shape) for name, array in arrays.items()}
        self._ring = Rings(directory, fields, slots=capacity + slack, slack=slack)

    @property
    def count(self) -> int:
        """The number of unrolls ever added."""
        return int(self._ring.counts[0])

    def append(self, unrolls: Sequence[Unroll]) -> None:
        """Add unrolls.

        Raises:
            RuntimeError: More than ``slack`` were added since the last checkpoint.
        """
        for unroll in unrolls:
            self._ring.append(unroll._asdict())

    def sample(self, stream: Stream, count: int) -> tuple[NDArray[np.int64], list[Unroll]]:
        """Draw ``count`` unrolls uniformly, with replacement; each takes one word of the stream.

        Returns:
            Their numbers, counted from the first unroll ever added, int64 ``[count]``; and the
            unrolls, without returns.
        """
        alive = min(self.count, self._capacity)
        drawn = self.count - alive + stream.integers(alive, count)
        fields = self._ring.fields.items()
        # Without returns, which were counted when the unrolls were fresh.
        return drawn, [
            Unroll(**{name: array[slot] for name, array in fields}, returns=[])
            for slot in self._ring.at(drawn).tolist()
        ]

    def state(self) -> dict[str, Any]:
        """Return a JSON-safe snapshot: the number of unrolls ever added, and the live ones' digest.

        The live unrolls are kept from now on: the ring rejects more than ``slack`` further ones
        until the next call.
        """
        self._ring.keep()
        return {"count": self.count, "digest": self._digest()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Return to a snapshot. The unrolls themselves are those in the files.

        Raises:
            CapsuleError: CAP-T223, the files do not contain the unrolls of the checkpoint.
        """
        self._ring.resume([state["count"]])
        what = f"unrolls of the checkpoint at {self.count}"
        require_checkpoint(self._digest(), state["digest"], what)

    def _digest(self) -> str:
        alive = range(max(0, self.count - self._capacity), self.count)
        arrays = self._ring.fields.values()
        return arrays_digest(array[self._ring.at(entry)] for entry in alive for array in arrays)
