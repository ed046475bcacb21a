"""The one error type that people see: a code, a cause and a fix."""

from __future__ import annotations

import errno
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit statuses of every command (documented in ``docs/exit-codes.md``)."""

    OK = 0
    DIFFERS = 1
    USAGE = 2
    TAMPERED = 3
    INCONCLUSIVE = 4
    BUILD_FAILED = 5
    TRAINING_FAILED = 6
    INTERNAL = 70
    NO_ENGINE = 125
    INTERRUPTED = 130


class CapsuleError(Exception):
    """A foreseen failure.

    Attributes:
        code: Stable identifier such as ``CAP-S002``; catalogued in ``docs/errors.md``. The letter
            names the room: S spec, L lock, I image, E engine, T training, B bundle, V verification,
            M machine, N native parts, R random profiles (entropy), D diagnosis.
        message: One sentence: what is wrong, with the field and the value.
        fix: What to do about it.
        exit_code: Status the command ends with.
    """

    def __init__(self, code: str, message: str, *, fix: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.fix = fix
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.code} {self.message}"


# What the operating system refuses because of the machine's state or its owner's settings.
_REFUSALS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ENOTDIR, errno.ENAMETOOLONG),
    }
)
_NO_TEMPORARY_FOLDER = "No usable temporary directory found"  # of Python's tempfile


def refusal_of(error: OSError) -> CapsuleError | None:
    """Return the coded error of a full disk, a missing permission and the like; None of others."""
    reason = error.strerror or ""
    if error.errno not in _REFUSALS and not reason.startswith(_NO_TEMPORARY_FOLDER):
        return None
    where = f" at {error.filename!a}" if isinstance(error.filename, str) else ""
    return CapsuleError(
        "CAP-X003",
        f"the operating system refused{where}: {reason}",
        fix="Free disk space, or set TMPDIR and CAPSULE_CACHE to folders that you may write to.",
        exit_code=ExitCode.INCONCLUSIVE,
    )
