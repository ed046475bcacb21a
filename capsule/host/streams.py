"""Reading streams within bounds, and copying them, hashed on the way."""

from __future__ import annotations

import errno
import hashlib
from io import BufferedIOBase
from typing import IO, NamedTuple

_CHUNK = 1 << 20


class Copied(NamedTuple):
    """The hexadecimal SHA-256 of the bytes that were copied, and their number."""

    sha256: str
    size: int


def copy(
    source: IO[bytes] | BufferedIOBase, target: IO[bytes] | None = None, most: int | None = None
) -> Copied:
    """Copy a stream to its end.

    Args:
        source: The stream.
        target: Where the bytes go; None if they are only read.
        most: Number of bytes after which nothing is read any more.
    """
    digest, size = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK if most is None else min(_CHUNK, most - size)):
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
        size += len(chunk)
    return Copied(digest.hexdigest(), size)


def read_whole(stream: IO[bytes], most: int) -> bytes:
    """Return all that is in a stream.

    Raises:
        OSError: It has more than ``most`` bytes, or cannot be read.
    """
    # One byte more than allowed is read, by which a stream that is too large is recognised.
    data = stream.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EOVERFLOW, f"it is larger than {most >> 20} MiB")
    return data
