"""The waits of a program whose order of arrival is recorded or repeated.

A :class:`Wait` is a place at which a program takes whatever arrives first: a loop over the results
of tasks, or the reading end of a queue. Each arrival is appended to a file of the process in the
run directory. When a run is repeated, items that arrive early are kept until their turn in the
recorded order. The same lines are written again, so the arrival logs of both runs are equal.

User programs import ``capsule.training.arrivals``. :mod:`capsule.training.arrivals.files` makes the
arrival log from the lines.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Hashable, Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Generic, Literal, NoReturn, TypeVar
from weakref import WeakValueDictionary

from capsule.experiment import contract
from capsule.experiment.arrival_log import ENTRIES_OF_WAIT, LINES, MAX_ENTRIES, NOTHING
from capsule.experiment.errors import CapsuleError
from capsule.training.arrivals.files import arrival_lost, leave_error, not_repeated, too_many
from capsule.training.arrivals.scopes import Place, next_place

NAMES = "names"  # folder with an empty file for each name and inbox that a process has taken

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9 _.-]{0,99}")
_READERS = "is read by two threads, processes or asyncio tasks"
_END = object()  # marks the end of the recorded arrivals

Item = TypeVar("Item")


class NothingCameError(Exception):
    """The program continues without an arrival, as in the recorded run."""


def run_directory() -> Path | None:
    """Return the run directory; None if the program does not run under Capsule."""
    path = os.environ.get(contract.RUN_VARIABLE)
    return None if path is None else Path(path)


class Wait(Generic[Item]):
    """The arrivals at one place of a program, in the order in which the program receives them.

    The caller offers items as they come until the next arrival is due, and then takes it.

    Attributes:
        replays: Whether a recorded order is followed.
    """

    def __init__(
        self,
        directory: Path,
        kind: Literal["completions", "messages"],
        name: str,
        tasks: int | None = None,
    ) -> None:
        """Begin a wait.

        Args:
            directory: The run directory.
            kind: Kind of the arrivals.
            name: A name from :func:`wait_name`, which is unique in the run, and the same in each
                repetition.
            tasks: Number of tasks, if it is known.

        Raises:
            CapsuleError: CAP-T381, the recorded run has no such wait of this name; CAP-T382,
                another process has one, or has read the same inbox; CAP-T131, the wait cannot be
                recorded.
        """
        self._directory = directory
        self._name = name
        self._taken = 0
        self._early: dict[Hashable, Item] = {}
        self._sources: set[Hashable] = set()
        self._reader: object = None
        recorded = recorded_waits(directory)
        self.replays = recorded is not None
        self._expected: list[Hashable] = []
        if recorded is not None:
            # Checked before the wait is recorded, because ArrivalWatch looks up every recorded wait
            # in the log of the recorded run.
            self._follow(recorded.get(name), kind, tasks)
        _claim(directory, name)
        # An inbox can be passed to other processes, so several of them could read it under the same
        # name. All other waits are used where they are named.
        if kind == "messages" and not _reserved(directory, name):
            self.misused(_READERS)
        _lines(directory).append([name, kind, tasks], ENTRIES_OF_WAIT)

    def due(self, task: asyncio.Task[Any] | None = None) -> bool:
        """Return whether the reader, which calls this, can take the next arrival.

        Args:
            task: The asyncio task that reads; by default the current one.

        Raises:
            CapsuleError: CAP-T382, two threads, processes or asyncio tasks read this wait;
                CAP-T381, the recorded run took nothing more here.
        """
        # The process id is included, because a fork copies the wait, and the thread id is the same
        # in the child.
        reader = os.getpid(), threading.get_ident(), task or current_task()
        self._reader = self._reader or reader
        if reader != self._reader:
            self.misused(_READERS)
        if not self.replays:
            return bool(self._early)
        wanted = self._wanted()
        # Items that arrived early are not offered again, so an excess is detected here.
        if wanted is _END and self._early:
            self._exceeds(next(iter(self._early)))
        # None means that nothing had arrived in time, which is repeated at once.
        return wanted is None or wanted in self._early

    @property
    def follows(self) -> bool:
        """Whether the next arrival is that of a recorded order."""
        return self._wanted() is not _END

    def offer(self, label: Hashable, item: Item) -> None:
        """Add an item that has arrived.

        Raises:
            CapsuleError: CAP-T381, the recorded run took nothing more here.
        """
        if self.replays and self._wanted() is _END:
            self._exceeds(label)
        self._early[label] = item

    def take(self) -> Item:
        """Return the next arrival, which must be due.

        Raises:
            NothingCameError: The recorded run continued here without an arrival.
            CapsuleError: CAP-T383, there are more arrivals than a log can contain; CAP-T131, the
                arrival cannot be recorded.
        """
        # A dictionary keeps the order of insertion, so its first label is the one that came first.
        label = self._wanted() if self.replays else next(iter(self._early))
        self._write(label)
        if label is None:
            raise NothingCameError
        return self._early.pop(label)

    def nothing(self) -> None:
        """Record that the program continues although nothing has arrived.

        Raises:
            CapsuleError: As :meth:`take`.
        """
        self._write(None)

    def finish(self) -> None:
        """Check that everything has been taken, when nothing more can arrive.

        Raises:
            CapsuleError: CAP-T381, the recorded run took more here.
        """
        if not self.replays or (wanted := self._wanted()) is _END:
            return
        if wanted is None:
            self.differs("ends, but the recorded run waited once more, and nothing came")
        self.differs(f"never gets {_shown(wanted)}, which the recorded run took next")

    def differs(self, how: str) -> NoReturn:
        """Raise the error of a run that differs from the recorded one (CAP-T381)."""
        _reject(self._directory, not_repeated(f"its wait {self._name!r} {how}"))

    def misused(self, how: str) -> NoReturn:
        """Raise the error of a wait whose order of arrival is not well defined (CAP-T382)."""
        _misnamed(self._directory, f"the wait {self._name!r} {how}")

    def _exceeds(self, label: Hashable) -> NoReturn:
        self.differs(f"takes {_shown(label)}, but the recorded run took nothing more")

    def _follow(self, recorded: Any, kind: str, tasks: int | None) -> None:
        if recorded is None:
            self.differs("does not occur in the recorded run")
        found = recorded["kind"], recorded.get("tasks")
        if found != (kind, tasks):
            self.differs(
                f"is for {_awaited(kind, tasks)}, but for {_awaited(*found)} when recorded"
            )
        messages = kind == "messages"
        self._expected = [*_messages(recorded)] if messages else recorded["order"]

    def _wanted(self) -> Hashable:
        return self._expected[self._taken] if self._taken < len(self._expected) else _END

    def _write(self, label: Hashable) -> None:
        self._taken += 1
        # The messages of a source arrive in order, so their numbers follow from the source.
        entries = 1
        if isinstance(label, tuple):
            label = label[0]
            # The log lists each source once, besides its messages.
            entries += label not in self._sources
            self._sources.add(label)
        _lines(self._directory).append([self._name, label], entries)


def wait_name(directory: Path, name: str | None, place: Place | None = None) -> str:
    """Return the name of a new wait.

    Args:
        directory: The run directory.
        name: The program's name for it. A number is appended, so that a loop can use one name.
        place: Its place, if the caller has it; it names a wait without a name of the program.

    Raises:
        CapsuleError: CAP-T382, the name is malformed or used by another thread, or there is neither
            a name nor a place.
    """
    if name is None:
        place = place or submitted(directory)
        if place is None:
            _misnamed(
                directory,
                "a wait has no name, and this run has no preloaded library that gives it one",
            )
        return str(place)
    if not _NAME.fullmatch(name):
        _misnamed(directory, f"a wait cannot be called {name!r}")
    # If two threads used one name, their speed would decide which number each of them gets.
    thread = threading.get_ident()
    if _threads.setdefault((os.getpid(), name), thread) != thread or not _is_owner((name,)):
        _misnamed(directory, f"two threads or asyncio tasks have a wait called {name!r}")
    return f"{name}~{next(_numbers(name))}"


def submitted(directory: Path) -> Place | None:
    """Return the place of the next piece of work, or wait, of the calling thread or asyncio task.

    None without the library of random profiles.

    Raises:
        CapsuleError: CAP-T382, several asyncio tasks share the numbers of one thread, so that
            their speed would decide which number each of them gets.
    """
    place = next_place()
    if place is not None and not _is_owner((place.process, place.thread)):
        _misnamed(directory, "two asyncio tasks that are not scoped wait or submit work")
    return place


def _reject(directory: Path, error: CapsuleError) -> NoReturn:
    """Raise an error, and record it so that Capsule's own process ends the program."""
    leave_error(directory, error)
    raise error


def _misnamed(directory: Path, what: str) -> NoReturn:
    error = CapsuleError(
        "CAP-T382",
        what,
        fix="Give each wait a name of its own (name=...), of letters, digits, spaces, '_', '.' and "
        "'-'; let one thread or asyncio task read it; give each sender, such as a task of a pool, "
        "a source of its own, and await one put of each source at a time; start coroutines with "
        "arrivals.scoped().",
    )
    _reject(directory, error)


class _Lines:
    """The file to which a process appends its waits and arrivals, one JSON document per line."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._entries = 0
        folder = directory / contract.ARRIVALS_FOLDER
        folder.mkdir(exist_ok=True)
        # A process of the run that has ended may have had the same process id.
        paths = (folder / LINES.replace("*", f"{os.getpid()}-{number}") for number in count())
        path = next(path for path in paths if _created(path))
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def append(self, line: list[Any], entries: int) -> None:
        """Write a line without buffering, because the process can be killed at any moment.

        Raises:
            CapsuleError: CAP-T383, there are more arrivals than a log can contain; CAP-T131, the
                line cannot be written.
        """
        self._entries += entries
        # This limits the entries of one process; collect_arrivals() counts those of all processes.
        if self._entries > MAX_ENTRIES:
            _reject(self._directory, too_many())
        data = json.dumps(line).encode() + b"\n"
        try:
            # On a full disk, write() may write a part of the line before it fails.
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            _reject(self._directory, arrival_lost(str(error.strerror)))


# Weak, so that another task can use a name or path when its owner no longer exists.
_owners: WeakValueDictionary[tuple[str, ...], asyncio.Task[Any]] = WeakValueDictionary()
_threads: dict[tuple[int, str], int] = {}


def _is_owner(key: tuple[str, ...]) -> bool:
    """Return whether no other existing asyncio task has used a key."""
    task = current_task()
    return task is None or _owners.setdefault(key, task) is task


def current_task() -> asyncio.Task[Any] | None:
    """Return the asyncio task that is running in this thread, if there is one."""
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None


@cache
def _numbers(_name: str) -> Iterator[int]:
    return count(1)


def _lines(directory: Path) -> _Lines:
    # A forked child inherits the cache, but has its own process id, and so a file of its own.
    return _lines_of(directory, os.getpid())


@cache
def _lines_of(directory: Path, _process: int) -> _Lines:
    return _Lines(directory)


def _claim(directory: Path, name: str) -> None:
    """Reserve a name for this process; names that are places are unique in any case."""
    given = name.rpartition("~")[0]
    if _NAME.fullmatch(given) and not _claimed(directory, given, os.getpid()):
        _misnamed(directory, f"two processes have a wait called {given!r}")


@cache
def _claimed(directory: Path, name: str, _process: int) -> bool:
    # The key of the cache includes the process id, because a forked child inherits the cache, and
    # its parent's reservations are not its own.
    return _reserved(directory, name)


def _reserved(directory: Path, name: str) -> bool:
    """Reserve a name; return whether it was free in the whole run."""
    folder = directory / contract.ARRIVALS_FOLDER / NAMES
    folder.mkdir(parents=True, exist_ok=True)
    return _created(folder / hashlib.sha256(name.encode()).hexdigest())


def _created(path: Path) -> bool:
    try:
        # The file is created with O_EXCL, so exactly one of several processes succeeds.
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@cache
def recorded_waits(directory: Path) -> dict[str, Any] | None:
    """Return the waits of the arrival log to repeat, which the host has checked; None if none."""
    path = directory / contract.ARRIVALS_REPLAY
    if not path.exists():
        return None
    waits: dict[str, Any] = json.loads(path.read_bytes())["waits"]
    return waits


def recorded_messages(directory: Path, name: str | None) -> Counter[str]:
    """Return how many messages of each source a wait took when it was recorded."""
    recorded = None if name is None else (recorded_waits(directory) or {}).get(name)
    labels = [] if recorded is None else _messages(recorded)
    return Counter(label[0] for label in labels if label is not None)


def _messages(recorded: Any) -> Iterator[tuple[str, int] | None]:
    """Yield the label of each message: source and number, from 0; None if nothing had arrived."""
    numbers = {source: count() for source in recorded["sources"]}
    for place in recorded["order"]:
        source = None if place == NOTHING else recorded["sources"][place]
        yield None if source is None else (source, next(numbers[source]))


def _awaited(kind: str, tasks: int | None) -> str:
    return kind if tasks is None else f"{kind} of {tasks} tasks"


def _shown(label: Hashable) -> str:
    if isinstance(label, tuple):
        return f"message {label[1]} of {label[0]!r}"
    return "nothing" if label is None else f"the result of task {label}"
