"""Experience replay of unrolls (Espeholt et al. 2018, arXiv:1802.01561, section 5.2.2).

"We draw 50% of the items in each batch uniformly at random from the replay buffer." When the memory
is full, a new unroll replaces the oldest one: table D.3 says "Removal: First-in-first-out". Fresh
unrolls are appended before any are drawn, so there is always one to draw; unrolls are drawn with
replacement.

The unrolls lie in a ring in files of the run's state (:mod:`capsule.training.state.rings`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capsule.training.impala.actors.unrolls import Unroll
from capsule.training.state.rings import Field, Rings, require_checkpoint
from capsule.training.state.streams import Stream
from capsule.training.state.trace import arrays_digest

_FIELDS = tuple(name for name in Unroll._fields if name != "returns")


class UnrollReplay:
    """The newest unrolls, first in, first out."""

    def __init__(self, directory: Path | None, *, capacity: int, slack: int) -> None:
        """Begin empty.

        Args:
            directory: Where the memory-mapped files lie; None keeps the ring in memory.
            capacity: Unrolls that can be drawn.
            slack: Unrolls that may follow a checkpoint without touching what it needs.
        """
        self._directory, self._capacity, self._slack = directory, capacity, slack
        self._ring = Rings(None, {}, slots=capacity + slack, slack=slack)  # until unrolls come in

    @property
    def count(self) -> int:
        """Unrolls that ever came in."""
        return int(self._ring.counts[0])

    def append(self, unrolls: Sequence[Unroll]) -> None:
        """Take unrolls in, which all have the same shapes.

        Raises:
            CapsuleError: CAP-T221, there is no room for the files.
            RuntimeError: More than ``slack`` came in since the last checkpoint.
        """
        if not self._ring.fields:
            arrays = {name: getattr(unrolls[0], name) for name in _FIELDS}
            self._open({name: (array.dtype, array.shape) for name, array in arrays.items()})
        for unroll in unrolls:
            self._ring.append(unroll._asdict())

    def sample(self, stream: Stream, count: int) -> tuple[NDArray[np.int64], list[Unroll]]:
        """Draw ``count`` unrolls, one word of the stream each.

        Returns:
            Which they were, counted from the first that ever came in: int64 ``[count]``; and the
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
        """Return a JSON-safe snapshot: how many came in, and the digest of those alive.

        From now on these are kept: the ring rejects more than ``slack`` further ones until the next
        call.
        """
        self._ring.keep()
        fields = self._ring.fields.items()
        # A resumed memory opens its files before any unroll shows these.
        shapes = {name: [a.dtype.str, list(a.shape[1:])] for name, a in fields}
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
        self._ring.resume([state["count"]])
        what = f"unrolls of the checkpoint at {self.count}"
        require_checkpoint(self._digest(), state["digest"], what)

    def _open(self, fields: Mapping[str, Field]) -> None:
        ordered = {name: fields[name] for name in _FIELDS}  # a document has another order
        slots = self._ring.slots
        self._ring = Rings(self._directory, ordered, slots=slots, slack=self._slack)

    def _digest(self) -> str:
        alive = range(max(0, self.count - self._capacity), self.count)
        arrays = self._ring.fields.values()
        return arrays_digest(array[self._ring.at(entry)] for entry in alive for array in arrays)
