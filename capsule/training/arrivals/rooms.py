"""Room in the queue of an inbox, when a run is repeated.

In a replay, messages are put into a queue in another order than in the recorded run. A sender could
then wait for room that a later message takes up, while the reader waits for that sender and takes
nothing. So in a replay, each source has the whole room of the queue to itself: its message *n* is
put when its message *n - limit* has been taken. In the recorded run, no source had more room than
that. A replay therefore waits for nothing for which the recorded run did not wait, and a sender is
never further ahead of the reader than the queue allows.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import queue as queues
from collections import Counter
from contextlib import suppress
from multiprocessing.queues import Queue as ProcessesQueue
from multiprocessing.synchronize import SEM_VALUE_MAX  # type: ignore[attr-defined]
from pathlib import Path
from threading import Semaphore
from typing import Any
from weakref import WeakKeyDictionary

from capsule.experiment import contract
from capsule.training.arrivals.attempts import arrival, cancelled_again

ROOMS = "rooms"  # folder with a file for each source of a queue of processes

# All inboxes of a queue share its rooms: by source, if it is a queue of threads.
_rooms: WeakKeyDictionary[queues.Queue[Any], dict[str, Semaphore]] = WeakKeyDictionary()
_async_rooms: WeakKeyDictionary[asyncio.Queue[Any], AsyncRooms] = WeakKeyDictionary()


def repeated(queue: Any, directory: Path) -> RepeatedQueue:
    """Return a queue as an inbox uses it in a replay."""
    if isinstance(queue, ProcessesQueue):
        return _ProcessQueue(queue, directory)
    if isinstance(queue, queues.Queue) and queue.maxsize > 0:
        return _ThreadQueue(queue)
    return RepeatedQueue(queue)


class RepeatedQueue:
    """A queue in a replay. Without a known limit, it is used as it is."""

    def __init__(self, queue: Any) -> None:
        """Repeat a queue."""
        self._queue = queue

    def put(self, message: tuple[str, int, Any]) -> None:
        """Append a message: source, number, item."""
        self._queue.put(message)

    def get(self) -> tuple[str, int, Any]:
        """Remove and return the first message."""
        message: tuple[str, int, Any] = self._queue.get()
        return message

    def taken(self, source: str) -> None:
        """Give the place of a message to the next one of its source."""


class _ThreadQueue(RepeatedQueue):
    """A queue of threads with a limit."""

    def __init__(self, queue: queues.Queue[Any]) -> None:
        super().__init__(queue)
        self._rooms = _rooms.setdefault(queue, {})

    def put(self, message: tuple[str, int, Any]) -> None:
        self._room(message[0]).acquire()
        queue = self._queue
        with queue.mutex:  # as Queue.put(), which would wait for room in the whole queue
            queue._put(message)  # noqa: SLF001
            queue.unfinished_tasks += 1
            queue.not_empty.notify()

    def taken(self, source: str) -> None:
        self._room(source).release()

    def _room(self, source: str) -> Semaphore:
        return self._rooms.setdefault(source, Semaphore(self._queue.maxsize))


class _ProcessQueue(RepeatedQueue):
    """A queue of processes, which is used as it is, because its threads draw entropy.

    The number of messages that were taken of a source is the size of a file, to which the reader
    appends. A sender that waits for it reads a named pipe. Each process finds such files, however
    it was started, and they remain usable if a process that waits is killed.
    """

    def __init__(self, queue: Any, directory: Path) -> None:
        super().__init__(queue)
        self._limit = queue._maxsize  # noqa: SLF001 - has no public name
        queue._sem = _Limitless(queue._sem)  # noqa: SLF001
        # The number of the pipe is the same in each process, whereas each may have its own inbox.
        pipe = os.fstat(queue._reader.fileno()).st_ino  # noqa: SLF001
        self._folder = directory / contract.ARRIVALS_FOLDER / ROOMS / str(pipe)

    def put(self, message: tuple[str, int, Any]) -> None:
        source, number, _ = message
        if number >= self._limit:
            self._await_taken(source, number - self._limit)
        super().put(message)

    def taken(self, source: str) -> None:
        if self._limit == SEM_VALUE_MAX:  # without a limit
            return
        path = self._path(source)
        with path.open("ab") as file:
            file.write(b"\n")
        try:
            bell = os.open(path.with_suffix(".bell"), os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            # No sender has waited yet, or none is waiting now.
            if error.errno in (errno.ENOENT, errno.ENXIO):
                return
            raise
        try:
            # If the pipe is full, its reader will look again. If it is broken, the reader has
            # looked since the pipe was opened here, and found what it waited for.
            with suppress(BlockingIOError, BrokenPipeError):
                os.write(bell, b"\n")
        finally:
            os.close(bell)

    def _await_taken(self, source: str, number: int) -> None:
        path = self._path(source)
        path.touch()
        if path.stat().st_size > number:
            return
        with suppress(FileExistsError):
            os.mkfifo(path.with_suffix(".bell"))
        bell = os.open(path.with_suffix(".bell"), os.O_RDWR)
        try:
            # Looked at again now that the pipe is open, so that no byte is missed.
            while path.stat().st_size <= number:
                os.read(bell, 4096)
        finally:
            os.close(bell)

    def _path(self, source: str) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / hashlib.sha256(source.encode()).hexdigest()


def async_rooms(queue: asyncio.Queue[Any], taken: Counter[str]) -> AsyncRooms:
    """Return the rooms of an asyncio queue, for one more inbox.

    Args:
        queue: The queue.
        taken: How many messages of each source this inbox took when the run was recorded.
    """
    rooms = _async_rooms.setdefault(queue, AsyncRooms(queue))
    rooms.taken += taken
    return rooms


class AsyncRooms:
    """The rooms of an asyncio queue.

    The program may cancel a put, so a replay must know which ones end.

    Attributes:
        taken: How many messages of each source were taken when the run was recorded.
    """

    def __init__(self, queue: asyncio.Queue[Any]) -> None:
        """Make the rooms of a queue."""
        self.taken: Counter[str] = Counter()
        self._limit = queue.maxsize
        # The queue itself has room for everything that is let in.
        queue.full = lambda: False  # type: ignore[method-assign]
        self._rooms: dict[str, asyncio.Semaphore] = {}

    async def enter(self, source: str, number: int, sender: asyncio.Task[Any] | None) -> None:
        """Wait until the message of a task may be put."""
        if self._limit <= 0:
            return
        left = number - self.taken[source]  # messages before it that the reader leaves
        if left < 0:
            # It was put when the run was recorded, perhaps in less time.
            await arrival(self._room(source).acquire, will_come=True)
        elif left >= self._limit:
            # There was no room for it when the run was recorded.
            await cancelled_again(sender)

    def leave(self, source: str) -> None:
        """Give the place of a message that was taken to the next one of its source."""
        if self._limit > 0:
            self._room(source).release()

    def _room(self, source: str) -> asyncio.Semaphore:
        return self._rooms.setdefault(source, asyncio.Semaphore(self._limit))


class _Limitless:
    """The semaphore of a queue of processes, without its limit; the rest is as it was."""

    def __init__(self, semaphore: Any) -> None:
        self._semaphore = semaphore

    @property
    def _semlock(self) -> Any:
        return self._semaphore._semlock  # noqa: SLF001 - for qsize() and full()

    def acquire(self, _block: bool = True, _timeout: float | None = None) -> bool:
        return True

    def release(self) -> None:
        pass
