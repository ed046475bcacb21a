"""Folders that an untrusted program writes: listing, reading and removal without following links.

``O_NOFOLLOW`` applies to the last component of a path only, and a path can be longer than the
kernel accepts. So every component is opened separately, relative to the folder above it
(``openat(2)``). :mod:`capsule.experiment.files` describes the behaviour on Windows.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from capsule.experiment.files import (
    FOLDERS_OPEN,
    READ,
    NotRegularError,
    Place,
    descriptor_of,
    open_file,
    open_folder,
)

MAX_DEPTH = 64
MAX_ENTRIES = 100_000


class UnboundedError(Exception):
    """A folder is deeper than :data:`MAX_DEPTH`, or contains more than :data:`MAX_ENTRIES`."""


@dataclass(frozen=True)
class FolderEntry:
    """A file, link or folder in a folder.

    Attributes:
        path: Path relative to the folder; its bytes need not be UTF-8 (PEP 383).
        facts: The result of ``lstat``.
    """

    path: str
    facts: os.stat_result


def entries_beneath(folder: Path) -> Iterator[FolderEntry]:
    """Yield everything in a folder and its sub-folders, which may change meanwhile.

    Entries that vanish are omitted. At most :data:`MAX_DEPTH` descriptors are open at a time.

    Raises:
        UnboundedError: Beyond the bounds on depth and number.
        PermissionError: A sub-folder cannot be read.
    """
    left = MAX_ENTRIES
    with suppress(FileNotFoundError), open_folder(folder) as place:
        for entry in _entries(place, "", 1):
            left -= 1
            if left < 0:
                raise UnboundedError(f"more than {MAX_ENTRIES:,} entries")
            yield entry


def open_beneath(folder: Path, path: str) -> BufferedReader:
    """Open the regular file at ``path`` below ``folder``, if no component of it is a link.

    Raises:
        OSError: There is no such file, or it cannot be read; :class:`NotRegularError` if it is
            another kind of file.
    """
    *parents, leaf = path.split("/")
    if not all(part not in {"", ".", ".."} for part in (*parents, leaf)):
        raise OSError(errno.EINVAL, "not a plain relative path", path)
    with open_folder(folder, below=parents) as place:
        # READ has O_NONBLOCK: the opening of a pipe does not wait for its writer.
        opened = open_file(leaf, READ, place)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise NotRegularError(errno.EINVAL, "not a regular file", path)
    return os.fdopen(opened, "rb")


def give_folder(folder: Path, owner: int) -> None:
    """Make ``owner`` the owner and the group of a folder and of all in it, links included (POSIX).

    Every entry is reached through a descriptor of the folder above it, so that a link that replaces
    a folder meanwhile is not followed.

    Raises:
        UnboundedError: The folder is deeper than :data:`MAX_DEPTH`.
        OSError: The kernel denies it.
    """
    with _opened(folder) as descriptor:
        _give(descriptor, owner, 1)


def _give(folder: int, owner: int, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise UnboundedError(f"folders more than {MAX_DEPTH} deep")
    for name in _names(folder):
        if stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
            with _opened(name, folder) as below:
                _give(below, owner, depth + 1)
        else:
            os.chown(name, owner, owner, dir_fd=folder, follow_symlinks=False)
    os.fchown(folder, owner, owner)


def clear(path: Path) -> None:
    """Remove a folder as :func:`remove_folder` does, or a file or a link of this name, if any.

    Raises:
        OSError: The kernel denies it.
    """
    if path.is_dir() and not path.is_symlink():
        remove_folder(path)
    else:
        path.unlink(missing_ok=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder to which no process writes, at any depth and with any permissions.

    Sub-folders are moved to the top before they are removed, so that neither the stack nor the
    number of descriptors grows with the depth.

    Raises:
        OSError: The kernel denies it, and a part of the folder remains.
    """
    if not FOLDERS_OPEN:
        shutil.rmtree(folder)
        return
    folder.chmod(0o700)
    with _opened(folder) as top:
        # The names are not random, because the randomness of a run's first process is recorded.
        taken = set(_names(top))
        free = (name for name in map(str, itertools.count()) if name not in taken)
        while names := _names(top):
            for name in names:
                if _unlinked(name, top):
                    continue
                with _opened(name, top) as inside:
                    for inner in _names(inside):
                        if not _unlinked(inner, inside):
                            os.rename(inner, next(free), src_dir_fd=inside, dst_dir_fd=top)
                os.rmdir(name, dir_fd=top)
    folder.rmdir()


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def _unlinked(name: str, folder: int) -> bool:
    """Unlink an entry that is not a folder; give a folder the permissions to empty and move it."""
    if not stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
        os.unlink(name, dir_fd=folder)
        return True
    os.chmod(name, 0o700, dir_fd=folder)  # no process is left that could put a link here
    return False


def _entries(folder: Place, prefix: str, depth: int) -> Iterator[FolderEntry]:
    if depth > MAX_DEPTH:
        raise UnboundedError(f"folders more than {MAX_DEPTH} deep")
    with os.scandir(folder) as found:
        for entry in found:
            try:
                facts = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield FolderEntry(prefix + entry.name, facts)
            if stat.S_ISDIR(facts.st_mode):
                # It may have vanished by now, or become a link, which is not opened.
                with (
                    suppress(FileNotFoundError, NotADirectoryError),
                    open_folder(entry.name, folder) as below,
                ):
                    yield from _entries(below, f"{prefix}{entry.name}/", depth + 1)


@contextmanager
def _opened(folder: Path | str, above: int | None = None) -> Iterator[int]:
    with open_folder(folder, above) as place:
        yield descriptor_of(place)
