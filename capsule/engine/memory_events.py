"""What the kernel says of processes that it killed for their memory, in this control group.

A batch system or a container limits the memory of a control group, whatever limit Capsule sets.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

_GROUPS = Path("/proc/self/cgroup")  # cgroups(7)
_MOUNTS = Path("/sys/fs/cgroup")
_OOM_KILL = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def oom_kills() -> int | None:
    """Return how many processes of this control group were killed; None if that is not known.

    With version 2, those of the groups below it are among them.
    """
    with suppress(OSError):
        for line in _GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if (number := _number(controllers, path.lstrip("/"))) is not None:
                return number
    return None


def _number(controllers: str, path: str) -> int | None:
    if controllers == "":
        file = _MOUNTS / path / "memory.events"
    elif "memory" in controllers.split(","):
        file = _MOUNTS / "memory" / path / "memory.oom_control"
    else:
        return None
    try:
        found = _OOM_KILL.search(file.read_text())
    except OSError:  # the group is the root, or its controller is one of version 1
        return None
    return int(found[1]) if found else None
