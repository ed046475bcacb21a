"""Resources of a running Capsule process, and the remains of a killed one.

A process is named so that no later one is taken for it: by its number and start time, its process
id namespace, the boot of its machine, its machine, and its user. Temporary folders are held by a
lock, which the kernel releases when the process ends. Their names contain the machine, because NFS
and Lustre do not tell other machines of the lock on a folder. On Windows, which has no locks on
folders, those of a killed process stay.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from capsule.experiment.beneath import remove_folder
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.files import FOLDERS_OPEN, flags_of, lock_file
from capsule.host.errors import CapsuleError
from capsule.host.locks import lock_open

_BOOT = Path("/proc/sys/kernel/random/boot_id")
HELD = ".capsule-held"  # end of the names of folders that a process holds by a lock
_MACHINE_ID = Path("/etc/machine-id")  # machine-id(5); empty or missing in some containers
_FOLDER = flags_of("RDONLY DIRECTORY CLOEXEC")


def this_process() -> str:
    """Return the name of this process: user, machine, boot, namespace, number and start time."""
    return f"{_place()}/{os.getpid()}/{_started(os.getpid())}"


def is_gone(owner: str) -> bool:
    """Tell whether a process has ended, by the name that :func:`this_process` returned in it.

    False where that cannot be known: of another user, whose processes may be hidden; of another
    machine or namespace, whose processes are not seen; of a text that is no such name.
    """
    place, _, identity = owner.rpartition("/")
    place, _, number = place.rpartition("/")
    if place != _place() or not number.isdecimal():
        return False
    return _started(int(number)) != identity


def is_of_earlier_boot(owner: str) -> bool:
    """Tell whether a process was one of this user and machine before its last boot, by its name.

    A copy of a virtual machine may have the same name and number as this machine, and be another.
    """
    parts, here = owner.split("/"), _place().split("/")
    return len(parts) == len(here) + 2 and parts[:2] == here[:2] and parts[2] != here[2]


@contextmanager
def temporary_folder(
    prefix: str,
    parent: Path | None = None,
    *,
    note: Callable[[str], None] | None = None,
    require_lock: bool = True,
) -> Iterator[Path]:
    """Give an empty folder that only this user can enter; it is removed at the end.

    The next :func:`remove_abandoned` on this machine removes the folder if this process is killed.

    Args:
        prefix: Prefix of its name.
        parent: Where it is made; the system's folder for temporary files by default.
        note: Told if it cannot be removed.
        require_lock: Whether to reject a file system without locks, on which the folder stays if
            this process is killed.

    Raises:
        CapsuleError: CAP-Y020, the file system has no locks.
        OSError: It cannot be made; or it cannot be removed, and there is no ``note``.
    """
    suffix = _suffix() if FOLDERS_OPEN else ""
    held = None
    while held is None:  # a new folder may be taken for an abandoned one before it is locked
        new = Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=parent))
        held = _held(new, require_lock=require_lock)
    folder, descriptor = held
    try:
        yield folder
    finally:
        try:
            remove_folder(folder)
        except OSError as error:
            if note is None:
                raise
            note(f"{folder} cannot be removed: {error}")
        finally:
            # The lock is given up last. Otherwise another process could take the folder for an
            # abandoned one and remove it at the same time.
            if descriptor is not None:
                os.close(descriptor)


def _held(folder: Path, *, require_lock: bool) -> tuple[Path, int | None] | None:
    """Lock a new folder; None if :func:`remove_abandoned` was faster."""
    if not FOLDERS_OPEN:
        return folder, None
    try:
        descriptor = os.open(folder, _FOLDER)
    except FileNotFoundError:
        return None
    try:
        # This waits for a remove_abandoned() that has locked the folder since it was made.
        lock_open(descriptor, folder)
    except BaseException as error:
        if isinstance(error, CapsuleError) and not require_lock:
            return folder, descriptor  # remove_abandoned() cannot lock it either, so it leaves it
        os.close(descriptor)
        with suppress(FileNotFoundError):
            folder.rmdir()
        raise
    if folder.exists():
        return folder, descriptor
    os.close(descriptor)
    return None


def remove_abandoned(
    parent: Path | None = None, *, anywhere: bool = False, prefix: str = ""
) -> None:
    """Remove folders of this user that :func:`temporary_folder` made for a process that is gone.

    What cannot be removed stays for the next time.

    Args:
        parent: Where to look; the system's folder for temporary files by default.
        anywhere: Whether to remove those of other machines, too. The caller knows that no process
            there uses ``parent``.
        prefix: Of the names of those to remove.
    """
    for folder in abandoned(parent, anywhere=anywhere, prefix=prefix):
        with suppress(OSError):
            remove_folder(folder)


def abandoned(
    parent: Path | None = None, *, anywhere: bool = False, prefix: str = ""
) -> Iterator[Path]:
    """Yield the folders that :func:`remove_abandoned` removes; each is held while it is yielded."""
    if not FOLDERS_OPEN:
        return
    where = Path(tempfile.gettempdir()) if parent is None else parent
    for folder in where.glob(f"{prefix}*{HELD if anywhere else _suffix()}"):
        try:
            # No link: another user could put one into /tmp that leads to a folder of this user.
            descriptor = os.open(folder, _FOLDER | os.O_NOFOLLOW)
        except OSError:  # it has gone, or is no folder of this user
            continue
        try:
            if _is_abandoned(descriptor):
                yield folder
        finally:
            os.close(descriptor)


def _suffix() -> str:
    """Return the end of the names of folders that processes of this machine hold."""
    return f".{_machine()}{HELD}"


def _machine() -> str:
    """Return eight digits that stand for this machine."""
    number = _MACHINE_ID.read_bytes() if _MACHINE_ID.exists() else b""
    return sha256_hex(os.fsencode(os.uname().nodename) + number)[:8]


def _is_abandoned(descriptor: int) -> bool:
    """Hold a folder, unless its owner lives; tell whether it is one of this user.

    Unlike a file with a process number, a lock ends even with SIGKILL.
    """
    try:
        if not lock_file(descriptor, wait=False):
            return False
    except OSError:
        return False
    # /tmp is everybody's, and the suffix is no secret.
    return os.fstat(descriptor).st_uid == os.getuid()


def _place() -> str:
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    return f"{os.getuid()}/{_machine()}/{_BOOT.read_text().strip()}/{namespace}"


def _started(process: int) -> str | None:
    """Return when a process started, in clock ticks since the boot; None if it has ended."""
    try:
        # Fields 3 and 22 of proc(5). The name before them is in parentheses, which it may itself
        # contain.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    state, started = fields[0], fields[19]
    # A zombie keeps its number until its parent asks for its status, but does nothing any more.
    return None if state in "ZX" else started
