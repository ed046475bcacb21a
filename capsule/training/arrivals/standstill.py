"""Detecting a standstill of a program: all its threads wait for one another.

A program that repeats a recorded order of arrival waits for one particular message. If the program
behaves differently, the message may never be sent, because its sender waits as well. The kernel
reports the system call in which each thread sleeps. If all threads of all processes sleep in calls
that end only when another thread acts, and none has run since the last check, the program will not
continue.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

LOOK_SECONDS = 1.0  # between two checks
LOOKS = 10  # checks without any activity, because something outside may still wake the program

# System calls of x86-64 (arch/x86/entry/syscalls/syscall_64.tbl) that wait: the position of the
# argument with the time limit, and its value for no limit; None for calls without such an argument.
_INFINITE = 0xFFFFFFFF  # -1, of 32 bits
_WAITS: dict[int, tuple[int, int] | None] = {
    0: None,  # read
    45: None,  # recvfrom
    47: None,  # recvmsg
    61: None,  # wait4
    247: None,  # waitid
    7: (2, _INFINITE),  # poll
    23: (4, 0),  # select
    202: (3, 0),  # futex
    232: (3, _INFINITE),  # epoll_wait
    270: (4, 0),  # pselect6
    271: (2, 0),  # ppoll
    281: (3, _INFINITE),  # epoll_pwait
    441: (3, 0),  # epoll_pwait2
}


class Standstill:
    """Checks the descendants of this process from time to time."""

    def __init__(self) -> None:
        self._next = time.monotonic()
        self._seen: dict[Path, str] | None = None
        self._looks = 0

    def reached(self) -> bool:
        """Return whether nothing has run during :data:`LOOKS` checks, and nothing can."""
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + LOOK_SECONDS
        seen = _sleeping()
        # If no thread is found, the program has ended, which is not a standstill.
        self._looks = self._looks + 1 if seen and seen == self._seen else 0
        self._seen = seen
        return self._looks >= LOOKS


def _sleeping() -> dict[Path, str] | None:
    """Return the context switches of each thread; None if a thread can continue by itself."""
    switches = {}
    try:
        for thread in _threads():
            if _can_go_on(thread):
                return None
            # The file ends with the numbers of voluntary and involuntary switches. They change if
            # the thread has run since the last check and sleeps in the same call again.
            switches[thread] = (thread / "status").read_text().partition("\nvoluntary_ctxt")[2]
    except OSError:  # a thread has just ended, or may not be examined
        return None
    return switches


def _threads() -> Iterator[Path]:
    """Yield the folder of each thread of the descendants that have not ended."""
    parents: dict[int, list[Path]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        state, parent = state_and_parent(folder)
        if state not in "ZX":
            parents.setdefault(parent, []).append(folder)
    # The list grows during the iteration, so that all descendants follow.
    found = parents.get(os.getpid(), [])
    for folder in found:
        found += parents.get(int(folder.name), [])
        yield from sorted((folder / "task").iterdir())


def state_and_parent(folder: Path) -> tuple[str, int]:
    """Return the state of a process or thread and its parent's id; ``X`` and 0 if it has ended."""
    try:
        # The name in parentheses may contain blanks and parentheses itself.
        state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "X", 0
    return state, int(parent)


def _can_go_on(thread: Path) -> bool:
    if state_and_parent(thread)[0] in "ZX":
        return False
    # The number of the call and its arguments; "running", or -1 outside of a call
    # (proc_pid_syscall(5)).
    call = (thread / "syscall").read_text().split()
    if state_and_parent(thread)[0] != "S" or not call[0].isdecimal() or int(call[0]) not in _WAITS:
        return True
    limit = _WAITS[int(call[0])]
    if limit is None:
        return False
    place, without = limit
    given = int(call[1 + place], 16)
    # The upper half of the register is undefined for an int of 32 bits.
    return (given & _INFINITE if without == _INFINITE else given) != without
