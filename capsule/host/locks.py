"""The kernel's locks on files and folders, by which processes exclude one another (flock(2)).

A lock ends with the last descriptor of the file that holds it, so a killed process leaves none.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

from capsule.host.errors import CapsuleError

PATIENCE_SECONDS = 0.5
_POLL_SECONDS = 0.02


def lock(descriptor: int, path: Path, patience: float = PATIENCE_SECONDS) -> bool:
    """Lock an open file or folder; tell whether no other process has it locked.

    :func:`is_locked` of another process has the lock for a moment, too, hence the attempts.

    Args:
        descriptor: Descriptor of the open file.
        path: Its name, for the message.
        patience: Seconds to try.

    Raises:
        CapsuleError: CAP-Y020, the file system has no locks.
    """
    deadline = time.monotonic() + patience
    while not _locked(descriptor, fcntl.LOCK_EX, path):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def is_locked(path: Path) -> bool:
    """Tell whether a process has a file or folder locked; False if there is none.

    Raises:
        CapsuleError: CAP-Y020, the file system has no locks.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _locked(descriptor, fcntl.LOCK_SH, path)
    finally:
        os.close(descriptor)


def _locked(descriptor: int, kind: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        raise CapsuleError(
            "CAP-Y020",
            f"{path} cannot be locked: {error.strerror}",
            fix="Choose a folder on a file system with locks (Lustre: mount option flock).",
        ) from error
    return True
