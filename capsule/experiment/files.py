"""Operations on files: opening, links, atomic writing, positions and locks.

Linux and macOS reject a link in the moment of opening (``O_NOFOLLOW``), and open a name relative to
an open folder (``openat(2)``), so that a later change of the path does not matter. Python offers
neither on Windows. There, names are checked before they are opened. The check finds every existing
link and junction, but not one that another program makes between the check and the opening. No
program of a bundle is executed on Windows, so only the user's programs could do that.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import reduce
from io import BufferedReader
from operator import or_
from pathlib import Path
from typing import BinaryIO

FOLDERS_OPEN = os.open in os.supports_dir_fd  # folders have descriptors, and names relative to them
HAVE_OWNERS = hasattr(os, "geteuid")  # files have owners, and modes restrict other users

Place = int | Path  # an open folder: its descriptor, or its path where FOLDERS_OPEN is false

_NAME_SURROGATE = 0x2000_0000  # bit of the reparse tags of Windows' symbolic links and junctions
# Names that Windows interprets as a device, as a stream within a file, or as another name.
_NOT_ON_WINDOWS = re.compile(
    r"(con|prn|aux|nul|conin\$|conout\$|com[0-9¹²³]|lpt[0-9¹²³]) *(\..*)?"
    r'|.*[<>:"/\\|?*\x00-\x1f].*|.*[. ]',
    re.IGNORECASE | re.DOTALL,
)
_UNFINISHED = re.compile(r"\..+\.[a-z0-9_]{8}")  # open_atomic(): the last 8 are mkstemp()'s
_POSITION = threading.Lock()  # of every descriptor, while read_at moves one


class UnusableNameError(OSError):
    """Windows has no file of this name."""


def flags_of(names: str) -> int:
    """Return the combination of flags of ``open(2)``, without those that this system lacks.

    Args:
        names: Their names without ``O_``. BINARY is one of Windows, whose C library translates line
            ends without it.
    """
    return reduce(or_, (getattr(os, f"O_{name}", 0) for name in names.split()))


READ = flags_of("RDONLY CLOEXEC NONBLOCK NOCTTY BINARY")  # does not wait for a pipe's writer
CREATE = flags_of("WRONLY CREAT EXCL CLOEXEC BINARY")
LOCK = flags_of("RDWR CREAT CLOEXEC BINARY")
_FOLDER = flags_of("RDONLY DIRECTORY NOFOLLOW CLOEXEC")
_NOFOLLOW = flags_of("NOFOLLOW")


def open_file(name: str | Path, flags: int, above: Place | None = None) -> int:
    """Open a file, or make one for its owner alone, unless its name is that of a link.

    Args:
        name: Its name in ``above``, or its path without that.
        flags: Such as :data:`READ` or :data:`CREATE`.
        above: The folder that it is in.

    Raises:
        UnusableNameError: Windows has no such name.
        OSError: It is a link, or cannot be opened.
    """
    if FOLDERS_OPEN:
        return os.open(
            name, flags | _NOFOLLOW, 0o600, dir_fd=None if above is None else descriptor_of(above)
        )
    path = _path(name, above)
    with suppress(FileNotFoundError):
        if is_link(path.lstat()):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return os.open(path, flags, 0o600)


@contextmanager
def open_folder(
    folder: str | Path, above: Place | None = None, *, below: Iterable[str] = (), make: bool = False
) -> Iterator[Place]:
    """Open a folder, or one below it, if no component of the path is a link.

    Args:
        folder: Its name in ``above``, or its path without that.
        above: The folder that it is in.
        below: Names of the folders from it down to the one to be opened.
        make: Whether to make missing folders of these names, for their owner alone.

    Raises:
        UnusableNameError: Windows has no such name.
        OSError: One of them is a link or not a folder, or cannot be opened or made.
    """
    place = _open_folder(folder, above)
    try:
        for name in below:
            if make:
                with suppress(FileExistsError):
                    _make_folder(name, place)
            # Each folder is opened relative to the one above it, so that a link that replaces a
            # folder meanwhile is not followed. One is open at a time, at any depth.
            inner = _open_folder(name, place)
            _close(place)
            place = inner
        yield place
    finally:
        _close(place)


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
    with open_atomic(path, mode) as stream:
        stream.write(data)


@contextmanager
def open_atomic(path: Path, mode: int = 0o644) -> Iterator[BinaryIO]:
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
    """Remove the temporary files of processes that were killed inside of :func:`open_atomic`."""
    for path in folder.glob(".*"):
        if _UNFINISHED.fullmatch(path.name):
            path.unlink()


def is_link(facts: os.stat_result) -> bool:
    """Return whether ``facts``, of ``lstat``, are those of a link, or of a junction of Windows."""
    tag: int = getattr(facts, "st_reparse_tag", 0)
    return stat.S_ISLNK(facts.st_mode) or bool(tag & _NAME_SURROGATE)


def descriptor_of(place: Place) -> int:
    """Return the descriptor of an open folder.

    Raises:
        TypeError: Folders have none on this system.
    """
    if isinstance(place, Path):
        raise TypeError(f"not a descriptor: {place}")
    return place


def read_at(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Read from an offset in bytes, and leave the position of the descriptor as it is.

    Where the system cannot do that (Windows), the position is moved and moved back, so no other
    thread may read or write through the descriptor in another way meanwhile.

    Returns:
        The number of bytes that were read; 0 at the end.
    """
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [buffer], offset)
    with _POSITION:
        before = os.lseek(descriptor, 0, os.SEEK_CUR)
        try:
            os.lseek(descriptor, offset, os.SEEK_SET)
            data = os.read(descriptor, len(buffer))
        finally:
            os.lseek(descriptor, before, os.SEEK_SET)
    buffer[: len(data)] = data
    return len(data)


def _open_folder(name: str | Path, above: Place | None) -> Place:
    if FOLDERS_OPEN:
        return os.open(name, _FOLDER, dir_fd=None if above is None else descriptor_of(above))
    path = _path(name, above)
    facts = path.lstat()
    if is_link(facts) or not stat.S_ISDIR(facts.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    return path


def _make_folder(name: str, above: Place) -> None:
    if FOLDERS_OPEN:
        os.mkdir(name, 0o700, dir_fd=descriptor_of(above))
    else:
        _path(name, above).mkdir(0o700)


def _close(place: Place) -> None:
    if isinstance(place, int):
        os.close(place)


def _path(name: str | Path, above: Place | None) -> Path:
    """Return the path of a name where folders have no descriptors."""
    if above is None:
        return Path(name)
    if not isinstance(above, Path):
        raise TypeError(f"not a path: {above}")
    if _NOT_ON_WINDOWS.fullmatch(str(name)):
        raise UnusableNameError(errno.EINVAL, "not a name of a file on Windows", str(name))
    return above / name


if sys.platform == "win32":
    import ctypes
    import msvcrt
    from ctypes import wintypes

    _LOCK_NOW, _LOCK_EXCLUSIVE = 1, 2  # LOCKFILE_FAIL_IMMEDIATELY, LOCKFILE_EXCLUSIVE_LOCK
    _IS_LOCKED = 33  # ERROR_LOCK_VIOLATION
    _kernel = ctypes.WinDLL("kernel32", use_last_error=True)

    class _Overlapped(ctypes.Structure):
        _fields_ = (
            ("internal", ctypes.c_void_p),
            ("internal_high", ctypes.c_void_p),
            ("offset", wintypes.DWORD),
            ("offset_high", wintypes.DWORD),
            ("event", wintypes.HANDLE),
        )

    def _locked(descriptor: int, *, shared: bool, wait: bool) -> bool:
        # A locked byte cannot be read or written, so it is beyond the end of any file.
        place = _Overlapped(offset_high=0x7FFF_FFFF)
        flags = (0 if shared else _LOCK_EXCLUSIVE) | (0 if wait else _LOCK_NOW)
        handle = wintypes.HANDLE(msvcrt.get_osfhandle(descriptor))
        if _kernel.LockFileEx(handle, flags, 0, 1, 0, ctypes.byref(place)):
            return True
        if (code := ctypes.get_last_error()) != _IS_LOCKED:
            raise ctypes.WinError(code)
        return False

else:
    import fcntl

    def _locked(descriptor: int, *, shared: bool, wait: bool) -> bool:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def lock_file(descriptor: int, *, shared: bool = False, wait: bool = True) -> bool:
    """Lock an open file against other processes until it is closed (flock, LockFileEx).

    Args:
        descriptor: Descriptor of the file, or of a folder where folders have descriptors.
        shared: Whether other processes may hold a shared lock at the same time.
        wait: Whether to wait for processes that hold a lock.

    Returns:
        Whether the file is locked now; always True with ``wait``.

    Raises:
        OSError: The file system has no locks.
    """
    return _locked(descriptor, shared=shared, wait=wait)
