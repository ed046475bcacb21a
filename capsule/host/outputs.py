"""Files and folders that a command writes where the user says.

A place that cannot be written is found before hours of work, and its error names the place. Missing
folders above it are made.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from capsule.experiment.canonical import NotRegularError, check_output, is_device, write_output
from capsule.host.errors import CapsuleError, refusal_of
from capsule.host.folders import existing_folder


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
    """Check the same, for callers that name the place themselves.

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
    if is_device(path):
        with _named(path):
            check_output(path)
            device = path.open("wb")
        with device:
            yield device
        return
    with _named(path):
        check_output(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, because a rename is atomic within one file system only.
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
        # mkstemp() makes the file private, which an output is not meant to be.
        temporary.chmod(0o644)
        with _named(path):
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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
