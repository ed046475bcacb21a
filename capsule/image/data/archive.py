"""A data set as an archive: how a bundle carries it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from capsule.host.errors import CapsuleError
from capsule.image.archives.layer_reader import read_layer
from capsule.image.archives.layers import (
    BLOCK,
    TarEntry,
    Write,
    rejected,
    tar_header,
    unchanged_chunks,
    write_tar,
)
from capsule.image.assembly.unpack import unpack_layer
from capsule.image.data.listing import FOLDER, Listing

_OWNER = "the archive of the data set"
_FIX = "Do not change the data set until the bundle is written."
_FILE_MODE, _FOLDER_MODE, _LINK_MODE = 0o644, 0o755, 0o777


def write_data(listing: Listing, path: Path, write: Write) -> None:
    """Write the layer archive of a data set.

    Args:
        listing: What is in it.
        path: Where it lies: a folder, or the only file.
        write: Takes the bytes, piece by piece.

    Raises:
        CapsuleError: CAP-I104, a file is not what is listed.
    """
    is_folder = path.is_dir()
    # A file may change after it was listed. unchanged_chunks() notices another size, and the
    # comparison of digests below every other change.
    facts = write_tar(_entries(listing, lambda name: path / name if is_folder else path), write)
    for name, fact in facts.items():
        if fact.startswith("file ") and fact.split()[-1] != listing[name].split()[-1]:
            raise _changed(name, "is another file than was listed")


def archive_size(listing: Listing) -> int:
    """Return the bytes of the archive that :func:`write_data` writes."""
    size = 2 * BLOCK  # of zeros, at the end
    # No content is read, so the places do not matter. A listing names every folder, so write_tar()
    # adds no entries to these.
    for entry in _entries(listing, Path):
        size += len(tar_header(entry)) + entry.size + -entry.size % BLOCK
    return size


def read_data(archive: Path) -> Listing:
    """Return the listing of what is in an archive; every file is hashed.

    Raises:
        CapsuleError: CAP-I107 or CAP-I110, it is not what :func:`write_data` writes.
    """
    with archive.open("rb") as stream:
        return {entry.path: _fact(entry) for entry in read_layer(stream, _OWNER)}


def unpack_data(archive: Path, target: Path) -> None:
    """Write what is in an archive below ``target``, a new folder. No link is followed.

    Raises:
        CapsuleError: CAP-I107 or CAP-I110, it is not what :func:`write_data` writes.
    """
    unpack_layer(archive, _OWNER, target)


def _entries(listing: Listing, place_of: Callable[[str], Path]) -> Iterator[TarEntry]:
    for name, fact in listing.items():
        kind, _, rest = fact.partition(" ")
        if kind == FOLDER:
            yield TarEntry(name, _OWNER, "directory", _FOLDER_MODE)
        elif kind == "symlink":
            yield TarEntry(name, _OWNER, "symlink", _LINK_MODE, target=rest)
        else:
            # The path of a data set that is one file may be a link, which file_chunks() does not
            # open.
            size = int(rest.split()[0])
            refuse = partial(_changed, name)
            content = partial(unchanged_chunks, place_of(name).resolve(), size, refuse)
            yield TarEntry(name, _OWNER, "file", _FILE_MODE, size, content)


def _changed(name: str, reason: str) -> CapsuleError:
    return rejected("CAP-I104", f"{_OWNER}: {name} {reason}", _FIX)


def _fact(entry: TarEntry) -> str:
    if entry.kind == "directory":
        mode, fact = _FOLDER_MODE, FOLDER
    elif entry.kind == "symlink":
        mode, fact = _LINK_MODE, f"symlink {entry.target}"
    else:
        digest = hashlib.sha256()
        for chunk in entry.content():
            digest.update(chunk)
        mode, fact = _FILE_MODE, f"file {entry.size} {digest.hexdigest()}"
    # A listing has no modes. With one accepted mode for each kind, it has one archive.
    if entry.mode != mode:
        raise rejected("CAP-I110", f"{_OWNER}: {entry.path} has mode {entry.mode:04o}")
    return fact
