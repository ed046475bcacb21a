"""Which file system a path is on."""

from __future__ import annotations

import re
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_ESCAPED = re.compile(r"\\([0-7]{3})")


def file_system_of(path: Path, mounts: Path = _MOUNTS) -> str | None:
    """Return the type of the file system of a path, such as ``ext4``; None if it is unknown.

    Args:
        path: An absolute path without links.
        mounts: A file in the form of Linux's ``/proc/<id>/mountinfo``.
    """
    found: tuple[int, str] | None = None
    text = mounts.read_text(encoding="utf-8", errors="surrogateescape") if mounts.exists() else ""
    for line in text.splitlines():
        fields, _, kind = line.partition(" - ")
        point = Path(_ESCAPED.sub(lambda code: chr(int(code[1], 8)), fields.split()[4]))
        depth = len(point.parts)
        # A later mount hides an earlier one of the same place.
        if path.is_relative_to(point) and (found is None or depth >= found[0]):
            found = depth, kind.split()[0]
    return None if found is None else found[1]
