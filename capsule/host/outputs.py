"""Files and folders that a command writes where the user says.

A place that cannot be written is found before hours of work, and its error names the place. Missing
folders above it are made. Files get the mode that ``open()`` would give them, so the umask decides
who may read them.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from capsule.experiment.files import CREATE, NotRegularError
from capsule.host.errors import CapsuleError, refusal_of
from capsule.host.folders import existing_folder
from capsule.host.locks import lock
from capsule.host.owner import remove_abandoned, temporary_folder

# Of os.link() on a file system without hard links, such as FAT.
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
_SCRATCH = "."  # prefix of the names of temporary folders, which are hidden
# Shells pass '>(command)' as a pipe in /dev/fd.
_DEVICE_FOLDERS = frozenset({"/dev", "/dev/fd", "/dev/pts", "/proc/self/fd"})


def require_file(path: Path, inputs: Iterable[Path] = ()) -> None:
    """Check that a file can be written, and write nothing.

    Args:
        path: The file.
        inputs: Files that the command reads, none of which it may replace.

    Raises:
        CapsuleError: CAP-X003 or CAP-X004, it cannot.
    """
    require_other(path, inputs)
    with _named(path):
        check_output(path)


def require_other(path: Path, inputs: Iterable[Path]) -> None:
    """Check that an output is not one of the files that the command reads.

    Raises:
        CapsuleError: CAP-X004.
    """
    for each in inputs:
        # A device such as /dev/stdin and /dev/tty is not replaced.
        if _is_same(path, each) and not is_device(path):
            raise CapsuleError(
                "CAP-X004",
                f"the output {str(path)!r} would replace a file that the command reads",
                fix="Name another place.",
            )


def _is_same(one: Path, other: Path) -> bool:
    """Tell whether two paths lead to one file. What cannot be reached fails where it is used."""
    try:
        return one.samefile(other)
    except OSError:
        return False


def require_folder(path: Path) -> None:
    """Check that a folder can be made or written to, and make nothing.

    Raises:
        CapsuleError: CAP-X003 or CAP-X004, it cannot.
    """
    with _named(path):
        check_folder(path)


def check_folder(path: Path) -> None:
    """Check that a folder can be made or written to. The caller's error names it.

    Raises:
        OSError: The folder cannot be made or written to.
    """
    if path.exists() and not path.is_dir():
        raise FileExistsError(errno.EEXIST, "not a folder", str(path))
    with tempfile.TemporaryFile(dir=existing_folder(path)):
        pass


def write_file(path: Path, data: bytes) -> None:
    """Write a file all at once, or into a device or a pipe below ``/dev``.

    Raises:
        CapsuleError: CAP-X003 or CAP-X004, it cannot be written.
    """
    with _named(path):
        write_output(path, data)


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a stream whose content becomes a file at the end of the block, or leaves no trace.

    A device or a pipe below ``/dev`` is opened itself.

    Raises:
        CapsuleError: CAP-X003 or CAP-X004, the file cannot be made.
    """
    with ExitStack() as opened:
        with _named(path):
            check_output(path)
            output = path.open("wb") if is_device(path) else open_output(path)
            stream = opened.enter_context(output)
        yield stream
        with _named(path):
            opened.close()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn errors of the operating system into one that names the output."""
    try:
        yield
    except OSError as error:
        is_folder = isinstance(error, NotRegularError) and path.is_dir()
        reason = "it is a folder" if is_folder else error.strerror
        raise CapsuleError(
            "CAP-X004" if refusal_of(error) is None else "CAP-X003",
            f"the output {str(path)!r} cannot be written: {reason}",
            fix="Name another place, in a folder that you may write to.",
        ) from error


@contextmanager
def open_output(path: Path) -> Iterator[BinaryIO]:
    """Yield a stream whose content becomes a file at the end of the block, or leaves no trace.

    Raises:
        OSError: The file cannot be made.
    """
    with scratch_folder(path.parent) as folder:
        unfinished = folder / path.name
        with unfinished.open("xb") as stream:
            yield stream
            stream.flush()
            # Before the rename: after a crash the name must not lead to an incomplete file.
            os.fsync(stream.fileno())
        unfinished.replace(path)


def write_new(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file that does not exist yet: all of it, or none.

    Args:
        path: The file.
        data: Its content.
        mode: Its mode, from which the umask takes rights away.

    Raises:
        FileExistsError: Something is at ``path``, if only a link that leads nowhere.
        OSError: The file cannot be written.
    """
    with scratch_folder(path.parent) as folder:
        unfinished = folder / path.name
        with os.fdopen(os.open(unfinished, CREATE, mode), "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        try:
            os.link(unfinished, path)  # unlike a rename, it replaces nothing
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.close(os.open(path, CREATE, mode))
            unfinished.replace(path)


def append(path: Path, data: bytes, *, heading: bytes = b"") -> None:
    """Append to a file, which is made if it is missing: all of the data, or none.

    Args:
        path: The file.
        data: What is appended.
        heading: What an empty file begins with, unless it is a device or a pipe.

    Raises:
        OSError: The data cannot be written.
    """
    with path.open("ab", buffering=0) as stream:
        # Without the lock, two processes could both write the heading. A process that is stopped
        # may keep it, and some file systems have none.
        with suppress(CapsuleError):
            lock(stream.fileno(), path, patience=0.1)
        facts = os.fstat(stream.fileno())
        is_new = stat.S_ISREG(facts.st_mode) and facts.st_size == 0
        left = memoryview(heading + data if is_new else data)
        try:
            while left:
                # A disk that becomes full takes a part of the data, without an error.
                left = left[stream.write(left) :]
        except BaseException:
            # Readers may reject an empty file, or one with a part of a record.
            with suppress(OSError):
                path.unlink() if is_new else os.ftruncate(stream.fileno(), facts.st_size)
            raise


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Yield a temporary folder from which outputs are renamed into ``parent``, which is made.

    It is in ``parent``, because a rename works within one file system only. The folders of
    processes that were killed are removed.

    Raises:
        OSError: The temporary folder cannot be made.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:  # it is a file; the output itself does not exist
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(parent)) from error
    # The other folders there may be those of containers that still run (open_engine).
    remove_abandoned(parent, prefix=_SCRATCH)
    with temporary_folder(_SCRATCH, parent, require_lock=False) as folder:
        yield folder


def write_output(path: Path, data: bytes) -> None:
    """Write a file that the user named, all at once; or into a device or a pipe below ``/dev``.

    To replace ``/dev/null`` by a file, as :func:`open_output` would for root, breaks a machine.
    Elsewhere a device or a pipe was not put there for this output, and a symbolic link is replaced:
    in a folder that others can write to, it may lead to a disk.

    Raises:
        NotRegularError: A folder, device, pipe or socket stands at ``path``.
        OSError: The file cannot be written.
    """
    if is_device(path):
        path.write_bytes(data)
        return
    _require_replaceable(path)
    with open_output(path) as stream:
        stream.write(data)


def check_output(path: Path) -> None:
    """Find out before hours of work whether :func:`write_output` could write a file; write nothing.

    Raises:
        NotRegularError: A folder, device, pipe or socket stands at ``path``.
        OSError: No file can be made there.
    """
    if is_device(path):
        return
    _require_replaceable(path)
    with tempfile.TemporaryFile(dir=existing_folder(path.absolute().parent)):
        pass


def is_device(path: Path) -> bool:
    """Return whether :func:`write_output` writes into what stands at ``path``."""
    # To write into a block device would overwrite the file system on it.
    return str(path.absolute().parent) in _DEVICE_FOLDERS and not path.is_block_device()


def _require_replaceable(path: Path) -> None:
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(mode := path.lstat().st_mode) and not stat.S_ISLNK(mode):
            raise NotRegularError(errno.EEXIST, "not a regular file", str(path))
