"""The error type with the codes of the host side, whose modules import it from here.

An import of this module makes the codes known. ``errors.txt`` lists them. It is not beside the
type, which is a part of images: there, an edit of the list would change every lock.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from capsule.experiment.errors import IMAGE_CODES, CapsuleError, ExitCode, register

__all__ = [
    "ENTRIES",
    "IMAGE_CODES",
    "CapsuleError",
    "ErrorEntry",
    "ExitCode",
    "coded",
    "innermost_reason",
    "refusal_of",
]


class ErrorEntry(NamedTuple):
    """The exit status of a command that fails with a code; its cause and fix, in Markdown."""

    exit_code: ExitCode
    cause: str
    fix: str


_ROWS = [
    line.split(" | ")
    for line in Path(__file__).with_name("errors.txt").read_text(encoding="utf-8").splitlines()
    if line.startswith("CAP-")
]
ENTRIES = {
    code: ErrorEntry(IMAGE_CODES[code] if status == "-" else ExitCode[status], cause, fix)
    for code, status, cause, fix in _ROWS
}
register({code: entry.exit_code for code, entry in ENTRIES.items() if code not in IMAGE_CODES})


# Errors of the operating system that follow from the machine's state or its owner's settings.
_REFUSALS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ENOTDIR, errno.ENAMETOOLONG),
    }
)
_FILES = "Raise the limit on open files ('ulimit -n'), or end programs that have many files open."
_REMEDIES = {
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.ENOMEM: "Free memory, or raise the limit on this process's memory ('ulimit -v').",
    errno.EFBIG: "Raise the limit on the size of files ('ulimit -f'), or set TMPDIR and "
    "CAPSULE_CACHE to folders of a file system that takes larger files.",
}
_NO_TEMPORARY_FOLDER = "No usable temporary directory found"  # of Python's tempfile


@contextmanager
def coded(code: str, what: str, *, fix: str) -> Iterator[None]:
    """Turn an error of the operating system into a coded one, which says ``what`` and the reason.

    Every OSError of the ``with`` block gets this message, whatever raised it.
    """
    try:
        yield
    except OSError as error:
        # An error that a library raises may have no text of the system.
        raise CapsuleError(code, f"{what}: {error.strerror or error}", fix=fix) from error


def refusal_of(error: OSError | MemoryError) -> CapsuleError | None:
    """Return the coded error of a full disk, a missing permission and the like; None of others."""
    if isinstance(error, MemoryError):
        return refusal_of(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
    reason = error.strerror or ""
    if error.errno not in _REFUSALS and not reason.startswith(_NO_TEMPORARY_FOLDER):
        return None
    where = f" at {error.filename!r}" if isinstance(error.filename, str) else ""
    return CapsuleError(
        "CAP-X003",
        f"the operating system reported an error{where}: {reason}",
        fix=_REMEDIES.get(
            error.errno or 0,
            "Free disk space, or set TMPDIR and CAPSULE_CACHE to folders that you may write to.",
        ),
    )


def innermost_reason(error: BaseException) -> str:
    """Return the first cause of an error of a library for HTTP, whose other layers repeat it."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return " ".join(str(error).split()) or type(error).__name__
