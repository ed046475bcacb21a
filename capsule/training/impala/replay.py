"""Experience replay of unrolls (Espeholt et al. 2018, section 5.2.2).

"We draw 50% of the items in each batch uniformly at random from the replay buffer." When the memory
is full, a new unroll replaces the oldest one: table D.3 says "Removal: First-in-first-out". Fresh
unrolls are appended before any are drawn, so there is always one to draw; unrolls are drawn with
replacement.

The unrolls lie in files of the run's state. The ring has ``slack`` slots more than it needs: that
many unrolls can follow a checkpoint before one that was there at that checkpoint is overwritten, so
a killed process resumes from its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capsule.training.impala.actors.unrolls import Unroll
from capsule.training.state.memmap import MappedArrays
from capsule.training.state.rings import require_checkpoint
from capsule.training.state.streams import Stream
from capsule.training.state.trace import arrays_digest

_FIELDS = tuple(name for name in Unroll._fields if name != "returns")


class UnrollReplay:
    """The newest unrolls, first in, first out.

    Attributes:
        count: Unrolls that ever came in.
    """

    def __init__(self, directory: Path | None, *, capacity: int, slack: int) -> None:
        """Begin empty.

        Args:
            directory: Where the memory-mapped files lie; None keeps the ring in memory.
            capacity: Unrolls that can be drawn.
            slack: Unrolls that may follow a checkpoint without touching what it needs.
        """
        self.count = 0
        self._directory, self._capacity, self._slack = directory, capacity, slack
        self._slots = capacity + slack
        self._checkpoint: int | None = None  # count at the checkpoint that must stay restorable
        self._arrays: dict[str, NDArray[Any]] = {}

    def append(self, unrolls: Sequence[Unroll]) -> None:
        """Take unrolls in, which all have the same shapes.

        Raises:
            CapsuleError: CAP-T221, there is no room for the files.
            RuntimeError: More than ``slack`` came in since the last checkpoint.
        """
        if not self._arrays:
            self._open(
                {
                    name: (getattr(unrolls[0], name).dtype.str, getattr(unrolls[0], name).shape)
                    for name in _FIELDS
                }
            )
        for unroll in unrolls:
            if self._checkpoint is not None and self.count >= self._checkpoint + self._slack:
                raise RuntimeError(f"more than {self._slack} unrolls since the last checkpoint")
            for name, array in self._arrays.items():
                array[self.count % self._slots] = getattr(unroll, name)
            self.count += 1

    def sample(self, stream: Stream, count: int) -> tuple[NDArray[np.int64], list[Unroll]]:
        """Draw ``count`` unrolls, one word of the stream each.

        Returns:
            Which they were, counted from the first that ever came in: int64 ``[count]``; and the
            unrolls, without returns.
        """
        alive = min(self.count, self._capacity)
        drawn = self.count - alive + stream.integers(alive, count)
        slots = (drawn % self._slots).tolist()
        return drawn, [
            Unroll(**{name: array[slot] for name, array in self._arrays.items()}, returns=[])
            for slot in slots
        ]

    def state(self) -> dict[str, Any]:
        """Return a JSON-safe snapshot: how many came in, and the digest of those alive.

        From now on these are kept: the ring refuses more than ``slack`` further ones until the next
        call.
        """
        self._checkpoint = self.count
        shapes = {name: [a.dtype.str, list(a.shape[1:])] for name, a in self._arrays.items()}
        return {"count": self.count, "shapes": shapes, "digest": self._digest()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Return to a snapshot; the unrolls are those in the files.

        Raises:
            CapsuleError: CAP-T221, there is no room for the files; CAP-T223, they do not hold what
                they held at the checkpoint.
        """
        if state["count"]:
            self._open(
                {name: (dtype, tuple(size)) for name, (dtype, size) in state["shapes"].items()}
            )
        self.count = self._checkpoint = state["count"]
        what = f"unrolls of the checkpoint at {self.count}"
        require_checkpoint(self._digest(), state["digest"], what)

    def _open(self, fields: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        files = MappedArrays(self._directory)
        self._arrays = {
            name: files.array(name, fields[name][0], (self._slots, *fields[name][1]))
            for name in _FIELDS  # in their order, not in that of a document
        }

    def _digest(self) -> str:
        alive = range(max(0, self.count - self._capacity), self.count)
        return arrays_digest(
            array[entry % self._slots] for entry in alive for array in self._arrays.values()
        )
