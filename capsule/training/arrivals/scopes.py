"""Scopes, in which a task draws entropy that does not depend on its thread or process.

Capsule derives and records the operating system's entropy for each thread of each process
(``docs/random-profiles.md``). The worker of a pool that executes a task depends on the speed of all
workers. A task therefore has a *place*, which is the path of the thread that submits it and a
number. It is executed in a :class:`Scope`, in which the worker has the path of the place instead of
its own.

The functions for this are in ``capsule/native/source/interposer/scopes.c``. They exist if the
library of random profiles is loaded; without it, a scope has no effect.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from types import TracebackType

_LONGEST_SECONDS = 1e9  # which fit into 64 bits in nanoseconds
_PATH_SIZE = 192  # CAPSULE_PATH_SIZE of capsule/native/source/shared/entropy.h


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a piece of work: the ``number``-th that a thread submitted.

    Attributes:
        process: Path of the process that submitted it.
        thread: Path of the thread, or of the scope that the thread was in.
        number: Number of the piece of work, from 1.
        clock: Nanoseconds by which the calendar clock of the thread had advanced.
    """

    process: str
    thread: str
    number: int
    clock: int

    def __str__(self) -> str:
        return f"{self.process}/{self.thread}~{self.number}"


def next_place() -> Place | None:
    """Return the place of the calling thread's next piece of work; None without the library."""
    library = _library()
    if library is None:
        return None
    process, thread = (ctypes.create_string_buffer(_PATH_SIZE) for _ in range(2))
    clock = ctypes.c_int64()
    number = library.capsule_scope_next(process, thread, ctypes.byref(clock))
    return Place(process.value.decode(), thread.value.decode(), number, clock.value)


def clock() -> int:
    """Return the nanoseconds by which the calling thread's calendar clock has advanced.

    Without the library, the result is 0.
    """
    library = _library()
    return 0 if library is None else int(library.capsule_scope_clock(-1, 0))


def waited_in_vain(begun: int, seconds: float) -> None:
    """Advance the calling thread's calendar clock by the time-out of a wait.

    Args:
        begun: The result of :func:`clock` before the wait.
        seconds: The time-out, by which the clock advances whether or not the thread has waited.
    """
    library = _library()
    if library is not None:
        library.capsule_scope_clock(begun, int(min(max(seconds, 0), _LONGEST_SECONDS) * 1e9))


class Scope:
    """A context in which the calling thread draws the entropy of a place.

    It can be entered several times, by any thread, and continues where it was left. Two threads
    cannot be in it at the same time.
    """

    def __init__(self, place: Place | None, item: int | None = None) -> None:
        """Make the scope of a place, or of one item of it (from 0).

        Raises:
            MemoryError: There is not enough memory.
        """
        library = None if place is None else _library()
        self._library, self._state = library, None
        if library is None or place is None:
            return
        self._state = library.capsule_scope_open(
            place.process.encode(),
            place.thread.encode(),
            place.number,
            # The library counts items from 1; 0 means the whole piece of work.
            0 if item is None else item + 1,
            place.clock,
        )
        if self._state is None:
            raise MemoryError

    def __enter__(self) -> None:
        # The thread and the scope exchange their states, and exchange them back at the exit.
        self._switch()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._switch()

    def _switch(self) -> None:
        if self._library is not None:
            self._library.capsule_scope_switch(self._state)

    def __del__(self) -> None:
        if self._library is not None and self._state is not None:
            self._library.capsule_scope_close(self._state)


@cache
def _library() -> ctypes.PyDLL | None:
    """Return the library of random profiles; None if it is not loaded into this process."""
    # Without a name, this finds the symbols of the program and of preloaded libraries.
    library = ctypes.PyDLL(None)
    if not hasattr(library, "capsule_scope_next"):
        return None
    text, number, pointer = ctypes.c_char_p, ctypes.c_uint32, ctypes.c_void_p
    time = ctypes.c_int64
    for name, result, arguments in (
        ("next", number, (text, text, ctypes.POINTER(time))),
        ("open", pointer, (text, text, number, number, time)),
        ("switch", None, (pointer,)),
        ("close", None, (pointer,)),
        ("clock", time, (time, time)),
    ):
        function = getattr(library, f"capsule_scope_{name}")
        function.restype, function.argtypes = result, arguments
    return library
