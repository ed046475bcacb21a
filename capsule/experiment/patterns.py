"""The choice of paths by patterns, which follows the same rules in every section of a spec."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable


def chosen(path: str, patterns: Iterable[str]) -> bool:
    """Return whether ``patterns`` choose a path.

    Args:
        path: Relative POSIX path.
        patterns: ``*`` matches any characters, including ``/``; a leading ``!`` excludes. The last
            pattern that matches decides, and a path that no pattern matches is not chosen.
    """
    decision = False
    for pattern in patterns:
        # fnmatch() would ignore the case of letters on Windows, and so choose other files.
        if fnmatch.fnmatchcase(path, pattern.removeprefix("!")):
            decision = not pattern.startswith("!")
    return decision
