"""The members of an open bundle: read in place, or copied for users that need a path.

The bundle was checked through one descriptor, and everything is read through that descriptor, at
the offsets that were checked: replacing the file, or appending to it, changes nothing. A file can
also be written to in place, so whatever is handed out is hashed again on its way.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from capsule.bundle.archive import create_file, other_content, tampered
from capsule.bundle.manifest import BundleFile
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.files import read_at
from capsule.host.streams import copy


@dataclass(frozen=True)
class Member:
    """A file of the manifest, and where its content is.

    Attributes:
        file: What was signed.
        offset: Offset of its content in the archive, in bytes.
    """

    file: BundleFile
    offset: int


class Members(Mapping[str, Path]):
    """The files of an open bundle by path: a mapping to private copies, made when asked for."""

    def __init__(self, archive: BinaryIO, members: Mapping[str, Member], root: Path) -> None:
        self._archive = archive
        self._members = members
        self._root = root
        self._copies: dict[str, Path] = {}

    def __getitem__(self, path: str) -> Path:
        """Return a private copy.

        Raises:
            CapsuleError: CAP-B108, the bundle has changed since it was checked.
            OSError: The copy cannot be written.
        """
        if path not in self._copies:
            self._stage(self._members[path])
        return self._copies[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    # The one of Mapping would call __getitem__, which makes a copy.
    def __contains__(self, path: object) -> bool:
        return path in self._members

    def signed(self, path: str) -> BundleFile:
        """Return what was signed of a file."""
        return self._members[path].file

    def open(self, path: str) -> BinaryIO:
        """Open a file where it lies.

        The content may have changed since it was checked: compare it with a signed digest.
        """
        member = self._members[path]
        return io.BufferedReader(_Slice(self._archive.fileno(), member.offset, member.file.size))

    def content(self, path: str, limit: int) -> bytes:
        """Return what a small file holds.

        Raises:
            CapsuleError: CAP-B160, it is larger than ``limit`` bytes; CAP-B108, the bundle has
                changed since it was checked.
        """
        file = self._members[path].file
        if file.size > limit:
            raise tampered(
                "CAP-B160",
                f"{path} has {file.size} bytes; the limit is {limit}",
                fix="Do not trust this bundle; no run makes such a file.",
            )
        with self.open(path) as stream:
            # The digest below notices a file that has become shorter since it was checked, too.
            data = stream.read()
        if (found := sha256_hex(data)) != file.sha256:
            raise other_content(path, found, file.sha256)
        return data

    def _stage(self, member: Member) -> None:
        path, size = member.file.path, member.file.size
        with self.open(path) as source, create_file(self._root, path) as target:
            found = copy(source, target, size).sha256
        if found != member.file.sha256:
            # create_file replaces nothing, so a second attempt needs the name to be free.
            (self._root / path).unlink()
            raise other_content(path, found, member.file.sha256)
        self._copies[path] = self._root / path


class _Slice(io.RawIOBase):
    """Bytes ``offset`` to ``offset + size`` of a descriptor, whose own position is left alone."""

    def __init__(self, descriptor: int, offset: int, size: int) -> None:
        self._descriptor = descriptor
        self._offset = offset
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        wanted = min(len(buffer), self._size - self._position)
        place = self._offset + self._position
        count = read_at(self._descriptor, memoryview(buffer)[:wanted], place)
        self._position += count
        return count
