"""Recording a schedule as it happens, so that a killed run continues with what it has recorded."""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capsule.experiment.errors import CapsuleError
from capsule.experiment.schedule_log import ScheduleLog

_TYPE = np.dtype("<u2")


class ScheduleRecorder:
    """Appends actor and lag of every unroll that is trained on to a file."""

    def __init__(self, path: Path, spec: str, actors: int, batch: int) -> None:
        """Open the file; :meth:`cut` decides where it continues, else it begins anew.

        Args:
            path: The file, which need not exist.
            spec: SHA-256 of the spec's canonical JSON.
            actors: How many there are.
            batch: Unrolls of an update.
        """
        # Appending: what a killed run has recorded stays until cut() says how much of it counts.
        self._file = path.open("a+b")
        self._spec, self._actors, self._batch = spec, actors, batch
        self._begun = False

    def append(self, update: int, slots: NDArray[np.int64]) -> None:
        """Record an update: int64 ``[batch, 2]``, actor and version of each unroll."""
        if not self._begun:
            # No state was restored, so what an earlier attempt recorded does not count.
            self.cut(0)
        entry = slots.copy()
        # Lags, as in the log: they are bounded, while versions outgrow 16 bits.
        entry[:, 1] = update - entry[:, 1]
        # Buffered: after a kill only what flush() made durable together with a saved state counts.
        self._file.write(entry.astype(_TYPE).tobytes())

    def flush(self) -> None:
        """Make the recording durable up to here."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def cut(self, updates: int) -> None:
        """Forget all but the first ``updates``.

        Raises:
            CapsuleError: CAP-T342, there are not so many.
        """
        self._begun = True
        size = updates * self._batch * 2 * _TYPE.itemsize
        found = self._file.seek(0, os.SEEK_END)
        if found < size:
            raise CapsuleError(
                "CAP-T342",
                f"the schedule recorded so far has {found} bytes, but the saved state needs {size}",
                fix="Start a new run directory: this one was changed or is incomplete.",
            )
        self._file.truncate(size)

    def log(self) -> ScheduleLog:
        """Return everything recorded."""
        self._file.flush()
        # This moves the position for reading only: in append mode all writes go to the end.
        self._file.seek(0)
        entries: NDArray[Any] = np.frombuffer(self._file.read(), _TYPE).reshape(-1, 2)
        played, lags = (array("H", column.tolist()) for column in entries.T)
        return ScheduleLog(self._spec, self._actors, self._batch, played, lags)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
