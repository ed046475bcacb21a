"""Arrays in files: a replay memory that outlives the process that fills it."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from capsule.experiment.errors import CapsuleError


def mapped_array(
    directory: Path | None, name: str, dtype: DTypeLike, shape: tuple[int, ...]
) -> NDArray[Any]:
    """Return the array in ``NAME.bin`` of a folder, zeros where there is no such file yet.

    Args:
        directory: The folder; None keeps the array in memory.
        name: Name of the file, without its suffix.
        dtype: Element type.
        shape: Shape of the array; without elements it has no file.

    Raises:
        CapsuleError: CAP-T221, there is no room for the file.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if directory is None or not size:
        return np.zeros(shape, dtype)
    path = directory / f"{name}.bin"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Not "wb", which would empty the file of an earlier attempt.
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
    # A plain view: indexing a memmap itself is slower.
    return np.asarray(np.memmap(path, dtype, "r+", shape=shape))
