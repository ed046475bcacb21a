"""The kernel's locks on files and folders, by which processes exclude one another.

A lock ends with the last descriptor of the file that holds it, so a killed process leaves none.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from capsule.experiment.files import FOLDERS_OPEN, flags_of, lock_file
from capsule.host.errors import CapsuleError

PATIENCE_SECONDS = 0.5
NOTICE_SECONDS = 2.0  # until the user reads what is waited for
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
    while not lock_open(descriptor, path, wait=False):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def is_locked(path: Path) -> bool:
    """Tell whether a process has a file or folder locked; False if there is none.

    Folders cannot be locked on Windows, where nothing is executed in them.

    Raises:
        CapsuleError: CAP-Y020, the file system has no locks.
    """
    if not FOLDERS_OPEN and path.is_dir():
        return False
    try:
        # A shared lock needs no right to write, and lets several processes ask at a time.
        descriptor = os.open(path, flags_of("RDONLY CLOEXEC BINARY"))
    except FileNotFoundError:
        return False
    try:
        return not lock_open(descriptor, path, shared=True, wait=False)
    finally:
        os.close(descriptor)


def lock_open(descriptor: int, path: Path, *, shared: bool = False, wait: bool = True) -> bool:
    """Lock an open file or folder as :func:`capsule.experiment.files.lock_file` does.

    Args:
        descriptor: Its descriptor.
        path: Its name, for the message.
        shared: Whether others may have a shared lock, too.
        wait: Whether to wait for those who have it locked. If this takes long, standard error says
            so.

    Returns:
        Whether it is locked now; True after waiting.

    Raises:
        CapsuleError: CAP-Y020, the file system has no locks.
    """
    try:
        if lock_file(descriptor, shared=shared, wait=False):
            return True
        if not wait:
            return False
        with _noticed(path):
            return lock_file(descriptor, shared=shared)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        raise CapsuleError(
            "CAP-Y020",
            f"{path} cannot be locked: {error.strerror}",
            fix="Choose a folder on a file system with locks (Lustre: mount option flock). The "
            "variable TMPDIR names the one for temporary folders, CAPSULE_CACHE the cache.",
        ) from error


@contextmanager
def _noticed(path: Path) -> Iterator[None]:
    """Say on standard error what a block waits for, if it takes long."""
    message = f"waiting for another Capsule process, which has locked {path}\n"
    notice = threading.Timer(NOTICE_SECONDS, lambda: sys.stderr.write(message))
    notice.daemon = True  # as the block may be in another thread than the main one
    notice.start()
    try:
        yield
    finally:
        notice.cancel()
