"""Rings of numbered entries in memory-mapped files: the storage of replay memories.

Each writer has a ring of its own. Its entries are numbered from 0; entry ``n`` is in slot ``n mod
slots`` of the ring. A ring has ``slack`` slots more than the replay memory needs: this many entries
can be added after a checkpoint before one that was live at the checkpoint is overwritten. A killed
process can therefore resume from its last checkpoint.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from capsule.experiment.errors import CapsuleError
from capsule.training.state.run_directory import changed

Field = tuple[DTypeLike, tuple[int, ...]]
"""Element type and shape of one field of an entry."""

Number = TypeVar("Number", int, NDArray[np.int64])


class Rings:
    """A ring of entries for each writer.

    Attributes:
        fields: Name to array ``[writers * slots, *shape]``.
        counts: Number of entries that each writer ever added, int64 ``[writers]``.
        slots: Number of slots of each ring.
    """

    def __init__(
        self,
        directory: Path | None,
        fields: Mapping[str, Field],
        *,
        slots: int,
        slack: int,
        writers: int = 1,
    ) -> None:
        """Open the arrays, making their files where there are none.

        Args:
            directory: The folder of the files; None keeps the rings in memory.
            fields: The fields of an entry, by name.
            slots: Number of slots of each ring.
            slack: Number of entries that a writer may add after a checkpoint.
            writers: Number of rings.

        Raises:
            CapsuleError: CAP-T221, there is no room for the files.
        """
        self.slots, self._slack = slots, slack
        self.counts = np.zeros(writers, np.int64)
        # Upper bounds of the counts until the next checkpoint; None before the first.
        self._limits: list[int] | None = None
        self.fields = {
            name: mapped_array(directory, name, dtype, (writers * slots, *shape))
            for name, (dtype, shape) in fields.items()
        }

    def append(self, entry: Mapping[str, Any], writer: int = 0) -> int:
        """Add an entry.

        Args:
            entry: The value of each field.
            writer: The writer of the entry.

        Returns:
            The number of the entry.

        Raises:
            RuntimeError: More than ``slack`` entries were added since the last checkpoint.
        """
        number = int(self.counts[writer])
        # A further entry would overwrite one that a killed run needs to resume.
        if self._limits is not None and number >= self._limits[writer]:
            raise RuntimeError(f"more than {self._slack} entries added since the last checkpoint")
        slot = self.at(number, writer)
        for name, array in self.fields.items():
            array[slot] = entry[name]
        self.counts[writer] = number + 1
        return number

    def at(self, numbers: Number, writers: Number | int = 0) -> Number:
        """Return the indices of entries in the fields, whether or not these entries exist."""
        return writers * self.slots + numbers % self.slots

    def parts(self, first: int, end: int, writer: int = 0) -> list[slice]:
        """Return the slices of the fields with the entries ``first`` to ``end`` (excluded)."""
        base, start, length = writer * self.slots, first % self.slots, end - first
        wrapped = max(0, start + length - self.slots)
        return [slice(base + start, base + start + length - wrapped), slice(base, base + wrapped)]

    def keep(self) -> None:
        """Make a checkpoint: the live entries are kept until the next call."""
        # A saved state must not refer to entries that a crash of the machine could still lose.
        for array in self.fields.values():
            if isinstance(array.base, np.memmap):
                array.base.flush()
        self._limits = [count + self._slack for count in self.counts.tolist()]

    def resume(self, counts: ArrayLike) -> None:
        """Return to a checkpoint, given the number of entries of each writer then."""
        self.counts[:] = counts
        self.keep()


def mapped_array(
    directory: Path | None, name: str, dtype: DTypeLike, shape: tuple[int, ...]
) -> NDArray[Any]:
    """Return the array in ``NAME.bin`` of a folder, with zeros if there is no such file yet.

    Args:
        directory: The folder; None keeps the array in memory.
        name: Name of the file, without its suffix.
        dtype: Element type.
        shape: Shape of the array; an array without elements has no file.

    Raises:
        CapsuleError: CAP-T221, there is no room for the file.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if directory is None or not size:
        return np.zeros(shape, dtype)
    path = directory / f"{name}.bin"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # "wb" would empty the file of an earlier attempt.
        with path.open("ab") as file:
            # The space is reserved now, because a full disk would kill the process when it writes
            # through the mapping.
            os.posix_fallocate(file.fileno(), 0, size)
            file.truncate(size)
    except OSError as error:
        raise CapsuleError(
            "CAP-T221",
            f"replay file {path.name} of {size} bytes cannot be made: {error.strerror}",
            fix="Raise limits.disk_mb, free disk space, or lower trainer.replay_capacity.",
        ) from error
    # A plain array, because indexing a memmap is slower.
    return np.asarray(np.memmap(path, dtype, "r+", shape=shape))


def require_checkpoint(found: str, expected: str, what: str) -> None:
    """Compare the digest of replay files with that of the checkpoint.

    Args:
        found: Digest of the files.
        expected: Digest in the checkpoint.
        what: The expected contents, for the message.

    Raises:
        CapsuleError: CAP-T223, they differ.
    """
    if found != expected:
        raise changed("CAP-T223", f"the replay files do not contain the {what}")
