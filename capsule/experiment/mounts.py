"""The type of the file system of a path, and whether it is mounted read-only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MOUNTS = Path("/proc/self/mountinfo")
# The kernel writes blanks, tabs, line feeds and backslashes in paths as octal numbers.
_ESCAPED = re.compile(r"\\([0-7]{3})")


class _Mount(NamedTuple):
    point: Path
    options: tuple[str, ...]
    kind: str


def file_system_of(path: Path, mounts: Path = _MOUNTS) -> str | None:
    """Return the type of the file system of a path, such as ``ext4``; None if it is unknown.

    Args:
        path: An absolute path without links.
        mounts: A file in the form of Linux's ``/proc/<id>/mountinfo``.
    """
    found: tuple[int, str] | None = None
    for mount in _mounts(mounts):
        depth = len(mount.point.parts)
        # A later mount hides an earlier mount at the same path.
        if path.is_relative_to(mount.point) and (found is None or depth >= found[0]):
            found = depth, mount.kind
    return None if found is None else found[1]


def is_mounted_read_only(folder: Path, mounts: Path = _MOUNTS) -> bool:
    """Return whether there are mounts at a folder or below it, and all are read-only.

    The arguments are those of :func:`file_system_of`.
    """
    inside = [mount for mount in _mounts(mounts) if mount.point.is_relative_to(folder)]
    return bool(inside) and all("ro" in mount.options for mount in inside)


def _mounts(mounts: Path) -> Iterator[_Mount]:
    text = mounts.read_text(encoding="utf-8", errors="surrogateescape") if mounts.exists() else ""
    for line in text.splitlines():
        # The number of optional fields before this mark varies (proc(5)).
        fields, _, kind = line.partition(" - ")
        words = fields.split()
        point = Path(_ESCAPED.sub(lambda code: chr(int(code[1], 8)), words[4]))
        yield _Mount(point, tuple(words[5].split(",")), kind.split()[0])
