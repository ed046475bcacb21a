"""Recording a schedule during a run, so that a killed run continues its recording."""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capsule.experiment.schedule_log import ScheduleLog
from capsule.training.state.run_directory import changed

_TYPE = np.dtype("<u2")


class ScheduleRecorder:
    """Appends the actor and the lag of every unroll that is trained on to a file.

    The file has two little-endian uint16 for each unroll.
    """

    def __init__(self, path: Path, spec: str, actors: int, batch: int) -> None:
        """Open the file. It begins anew unless :meth:`cut` is called before :meth:`append`.

        Args:
            path: The file, which need not exist.
            spec: SHA-256 of the spec's canonical JSON.
            actors: Number of actors.
            batch: Number of unrolls of an update.
        """
        # Opened for appending, because the records of a killed run are kept until cut() decides how
        # many of them count.
        self._file = path.open("a+b")
        self._spec, self._actors, self._batch = spec, actors, batch
        self._begun = False

    def append(self, update: int, slots: NDArray[np.int64]) -> None:
        """Record an update.

        Args:
            update: Parameter updates made before.
            slots: Actor and policy version of each unroll, int64 ``[batch, 2]``.
        """
        if not self._begun:
            # No state was restored, so the records of an earlier attempt do not count.
            self.cut(0)
        entry = slots.copy()
        # Lags, as in the log: they are bounded, while versions outgrow 16 bits.
        entry[:, 1] = update - entry[:, 1]
        # Writes may stay in a buffer: after a kill, only records that flush() made durable before
        # a state was saved count.
        self._file.write(entry.astype(_TYPE).tobytes())

    def flush(self) -> None:
        """Make everything recorded so far durable."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def cut(self, updates: int) -> None:
        """Remove all but the first ``updates``.

        Raises:
            CapsuleError: CAP-T342, fewer are recorded.
        """
        self._begun = True
        size = updates * self._batch * 2 * _TYPE.itemsize
        found = self._file.seek(0, os.SEEK_END)
        if found < size:
            what = f"the recorded schedule has {found} bytes, but the saved state needs {size}"
            raise changed("CAP-T342", what)
        self._file.truncate(size)

    def log(self) -> ScheduleLog:
        """Return everything recorded so far."""
        self._file.flush()
        # In append mode this position is for reading only: all writes go to the end.
        self._file.seek(0)
        entries: NDArray[Any] = np.frombuffer(self._file.read(), _TYPE).reshape(-1, 2)
        played, lags = (array("H", column.tolist()) for column in entries.T)
        return ScheduleLog(self._spec, self._actors, self._batch, played, lags)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
