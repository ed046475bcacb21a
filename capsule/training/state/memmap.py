"""Arrays in files: a replay memory that outlives the process that fills it."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from capsule.experiment.errors import CapsuleError


class MappedArrays:
    """Makes arrays of a replay memory in the files of one folder, or in memory without one."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._mappings: list[np.memmap[Any, Any]] = []

    def array(self, name: str, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the array in ``NAME.bin``, zeros where there is no such file yet.

        Raises:
            CapsuleError: CAP-T221, there is no room for the file.
        """
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if self._directory is None or not size:
            return np.zeros(shape, dtype)
        path = self._directory / f"{name}.bin"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                # Reserved now: a full disk met later, through the mapping, would kill the process.
                os.posix_fallocate(file.fileno(), 0, size)
                file.truncate(size)
        except OSError as error:
            raise CapsuleError(
                "CAP-T221",
                f"replay file {path.name} of {size} bytes cannot be made: {error.strerror}",
                fix="raise limits.disk_mb, free disk space, or lower trainer.replay_capacity",
            ) from error
        mapping = np.memmap(path, dtype, "r+", shape=shape)
        self._mappings.append(mapping)
        return np.asarray(mapping)  # a plain view: indexing a memmap itself is slower

    def flush(self) -> None:
        """Hand every change to the file system; needed against power loss, not against a kill."""
        for mapping in self._mappings:
            mapping.flush()
