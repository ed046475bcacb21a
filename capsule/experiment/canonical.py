"""Canonical documents: RFC 8785 JSON, strict parsing, SHA-256, atomic files.

Every signed or hashed JSON document of Capsule goes through this module, so that equal facts are
equal bytes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import rfc8785

from capsule.experiment.files import READ, open_file

MAX_SAFE_INTEGER = 2**53 - 1
MAX_DOCUMENT_BYTES = 64 << 20  # of a document that a run writes and a bundle contains
MAX_VALUES = 2_000_000  # of a document; each takes up to a hundred bytes of memory


def canonical_json(value: Any) -> bytes:
    """Serialise ``value`` as RFC 8785 canonical JSON (no trailing newline).

    Raises:
        ValueError: The value contains NaN, an infinity, or an integer beyond 2^53 - 1.
    """
    try:
        return rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, RecursionError) as error:
        raise ValueError(f"not canonicalisable: {error}") from error


def count_values(data: bytes) -> int:
    """Return how many values a JSON document has at most, without parsing it."""
    return sum(map(data.count, (b",", b"[", b"{")))  # one of them before every value


def parse_canonical_json(data: bytes) -> Any:
    """Parse bytes that must be exactly the canonical form of their value.

    Re-encoding and comparing rejects duplicate keys, NaN, byte order marks, superfluous white
    space, over-long integers and lone surrogates in one rule.

    Raises:
        ValueError: The bytes are not canonical JSON.
    """
    if count_values(data) > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} values")
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, over-long integers
        raise ValueError(f"not JSON: {error}") from error
    if canonical_json(value) != data:
        raise ValueError("not in canonical form (RFC 8785)")
    return value


def sha256_hex(data: bytes) -> str:
    """Return the lower-case hexadecimal SHA-256 of ``data``."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the lower-case hexadecimal SHA-256 of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


_UNFINISHED = re.compile(r"\..+\.[a-z0-9_]{8}")  # mkstemp's eight characters


class NotRegularError(OSError):
    """A directory, pipe, socket or device has the path of what must be a regular file."""


def open_regular(path: Path, *, follow: bool = True) -> BufferedReader:
    """Open a regular file for reading, without waiting for a pipe or starting a device.

    Args:
        path: The file.
        follow: Whether it may be a link to one.

    Raises:
        NotRegularError: ``path`` is another kind of file.
        OSError: The file cannot be opened.
    """
    descriptor = os.open(path, READ) if follow else open_file(path, READ)
    # The descriptor is checked, because the file at a path can change between check and opening.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegularError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write ``data`` to ``path``, or leave the file unchanged: write, sync, rename."""
    with appearing(path, mode) as stream:
        stream.write(data)


@contextmanager
def appearing(path: Path, mode: int = 0o644) -> Iterator[BinaryIO]:
    """Yield a stream whose content replaces the file at the end; an error leaves it unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, because a rename is atomic within one file system only.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            # Before the rename: after a crash the name must not lead to an incomplete file.
            os.fsync(stream.fileno())
        # mkstemp() makes a file for its owner alone. The umask has no effect on this mode: the user
        # of a container may be another one, and no other user may write to a file of the cache.
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files of processes that were killed inside of :func:`appearing`."""
    for path in folder.glob(".*"):
        if _UNFINISHED.fullmatch(path.name):
            path.unlink()
