"""Queues with one reader, whose order of arrival is recorded or repeated."""

from __future__ import annotations

import asyncio
import hashlib
import queue as queues
from collections.abc import Coroutine
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from capsule.experiment.arrival_log import MAX_NAME
from capsule.training.arrivals.attempts import Attempts, arrival, cancelled_again
from capsule.training.arrivals.rooms import AsyncRooms, async_rooms, repeated
from capsule.training.arrivals.scopes import Scope, clock, next_place, waited_in_vain
from capsule.training.arrivals.waits import (
    NothingCameError,
    Wait,
    current_task,
    recorded_messages,
    recorded_waits,
    run_directory,
    wait_name,
)

Item = TypeVar("Item")
_Message = tuple[str, int, Item]  # the source, the number of the message, and the item
SHOWN_CHARACTERS = 64  # of a source, in the name of a wait; a longer one is named by its SHA-256
_REORDERING = (
    *(queues.LifoQueue, queues.PriorityQueue),
    *(asyncio.LifoQueue, asyncio.PriorityQueue),
)


class Queue(Protocol):
    """The part of a queue that :class:`Inbox` uses."""

    def put(self, item: Any) -> Any:
        """Append an item."""

    def get(self, block: bool = ..., timeout: float | None = ...) -> Any:
        """Remove and return the first item."""


def _require_fifo(queue: object) -> None:
    """Reject a queue that reorders its items, also without Capsule.

    A recorded run takes messages in the order of arrival, and would have another result.
    """
    if isinstance(queue, _REORDERING):
        name = type(queue).__name__
        raise TypeError(f"an inbox needs a queue that is first in, first out, which {name} is not")


class _Messages(Generic[Item]):
    """Numbers messages at one end of a queue, and checks their numbers at the other.

    Attributes:
        name: Name of the wait; None without Capsule.
        repeats: The run directory of a replay; None if the run is recorded, or without Capsule.
    """

    def __init__(self, name: str | None) -> None:
        self._directory = directory = run_directory()
        recorded = None if directory is None else recorded_waits(directory)
        self.repeats = None if recorded is None else directory
        # The thread that makes the inbox determines its name. The wait begins in the reader, which
        # may be in another process.
        self.name = None if directory is None else wait_name(directory, name)
        self._wait: Wait[_Message[Item]] | None = None
        self._sent: dict[str, int] = {}
        self._puts: dict[str, Attempts] = {}
        self._received: dict[str, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        # The wait belongs to the reader, and may contain a long recorded order.
        return {**self.__dict__, "_wait": None}

    def numbered(self, item: Item, source: str) -> Any:
        """Return what is put into the queue for an item: itself, or with source and number.

        Raises:
            ValueError: The name of the source is empty or too long.
        """
        if not 0 < len(source) <= MAX_NAME:
            raise ValueError(f"a source has a name of 1 to {MAX_NAME} characters, not {source!r}")
        if self._directory is None:
            return item
        number = self._sent.get(source, 0)
        self._sent[source] = number + 1
        return source, number, item

    def withdraw(self, source: str) -> None:
        """Give back the number of a source's last message, which was not put into the queue."""
        if self._directory is not None:
            self._sent[source] -= 1

    def puts(self, source: str) -> Attempts | None:
        """Return the attempts to put a message of a source; None without Capsule."""
        if self._directory is None or self.name is None:
            return None
        if source not in self._puts:
            # The name of a wait has no more room than that of a source.
            long = len(source) > SHOWN_CHARACTERS
            shown = hashlib.sha256(source.encode()).hexdigest() if long else source
            name = f"{self.name} cancellations of {shown}"
            self._puts[source] = Attempts(self._directory, name, source)
        return self._puts[source]

    def wait(self) -> Wait[_Message[Item]] | None:
        """Return the wait, which begins with the first call; None without Capsule."""
        if self._wait is None and self._directory is not None and self.name is not None:
            self._wait = Wait(self._directory, "messages", self.name)
        return self._wait

    def offer(self, wait: Wait[_Message[Item]], message: _Message[Item]) -> None:
        """Offer a message to the wait.

        Raises:
            CapsuleError: CAP-T382, two threads or processes send as one source.
        """
        source, number, _ = message
        # A queue keeps the order of one sender, so an unexpected number shows that there are two.
        if number != self._received.get(source, 0):
            wait.misused(f"gets messages that two threads or processes sent as {source!r}")
        self._received[source] = number + 1
        wait.offer((source, number), message)


class Inbox(Generic[Item]):
    """A queue of threads or processes with one reader, whose order of arrival is recorded.

    It can be passed to other processes like the queue that it wraps.
    """

    def __init__(self, queue: Queue, *, name: str | None = None) -> None:
        """Wrap a queue, which must be used only through this inbox.

        Args:
            queue: A ``queue.Queue``, ``queue.SimpleQueue``, ``multiprocessing.Queue``, or a similar
                queue.
            name: Name of the wait; by default the calling thread's path and a number.

        Raises:
            CapsuleError: CAP-T382, the name cannot be used, or one is required.
            TypeError: The queue is not first in, first out.
        """
        _require_fifo(queue)
        self._messages: _Messages[Item] = _Messages(name)
        directory = self._messages.repeats
        self._repeated = None if directory is None else repeated(queue, directory)
        self._queue = queue
        self._scope: Scope | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_scope": None}  # which belongs to the reader

    def put(self, item: Item, *, source: str) -> None:
        """Put an item.

        Args:
            item: Any object; queues of processes pickle it.
            source: Name of the sender. Only one thread of one process may send as one source.

        Raises:
            ValueError: The name is empty or too long.
        """
        message = self._messages.numbered(item, source)
        (self._repeated or self._queue).put(message)

    def get(self, timeout: float | None = None) -> Item:
        """Remove and return the next item.

        Args:
            timeout: Seconds to wait for an item; None for no limit. A time-out is recorded and
                repeated as well.

        Raises:
            queue.Empty: No item arrived in time.
            CapsuleError: CAP-T131, an arrival cannot be recorded; CAP-T381, the program does not
                repeat the recorded run; CAP-T382, the inbox has two readers, or two senders use one
                source; CAP-T383, there are more arrivals than a log can contain.
        """
        wait = self._messages.wait()
        if wait is None:
            item: Item = self._arrived(timeout)
            return item
        if self._scope is None:
            # Restoring an object of another process may draw entropy: torch asks for the file of a
            # tensor with a secret. In a replay, messages are restored at other moments.
            is_shared = not isinstance(self._queue, (queues.Queue, queues.SimpleQueue))
            self._scope = Scope(next_place() if is_shared else None)
        begun = clock()
        try:
            return self._next(wait, self._scope, timeout)
        except queues.Empty:
            # A repetition does not wait, but the program must read the same dates afterwards.
            waited_in_vain(begun, timeout or 0)
            raise

    def _next(self, wait: Wait[_Message[Item]], scope: Scope, timeout: float | None) -> Item:
        try:
            while not wait.due():
                with scope:
                    message = self._arrived(timeout)
                self._messages.offer(wait, message)
        except queues.Empty:
            wait.nothing()
            raise
        try:
            source, _, item = wait.take()
        except NothingCameError:
            raise queues.Empty from None
        if self._repeated is not None:
            self._repeated.taken(source)
        return item

    def _arrived(self, timeout: float | None) -> Any:
        if self._repeated is not None:
            # A message that arrived in time in the recorded run may take longer in a repetition.
            return self._repeated.get()
        # multiprocessing.SimpleQueue.get() takes no arguments.
        return self._queue.get() if timeout is None else self._queue.get(True, timeout)


class AsyncInbox(Generic[Item]):
    """An ``asyncio.Queue`` with one reader, whose order of arrival is recorded."""

    def __init__(self, queue: asyncio.Queue[Any], *, name: str | None = None) -> None:
        """Wrap a queue, which must be used only through this inbox; see :class:`Inbox`."""
        _require_fifo(queue)
        self._messages: _Messages[Item] = _Messages(name)
        self._rooms: AsyncRooms | None = None
        if (directory := self._messages.repeats) is not None:
            self._rooms = async_rooms(queue, recorded_messages(directory, self._messages.name))
        self._queue = queue
        self._is_read = False

    def put(self, item: Item, *, source: str) -> Coroutine[Any, Any, None]:
        """Return a coroutine that puts an item.

        The cancellation while the queue is full, for example by ``asyncio.wait_for`` or
        ``asyncio.timeout``, is recorded and repeated as well: a repetition waits for it.

        Args:
            item: Any object.
            source: Name of the sender, which only one task may use.

        Raises:
            CapsuleError: As :meth:`Inbox.get`; CAP-T382 also if a put is cancelled while another
                one of its source waits.
        """
        # The sender is the task that calls this method, as the reader is that which calls get().
        return self._attempted(item, source, current_task())

    async def _attempted(self, item: Item, source: str, sender: asyncio.Task[Any] | None) -> None:
        puts, put = self._messages.puts(source), partial(self._put, item, source, sender)
        await (put() if puts is None else puts.make(put))

    async def _put(self, item: Item, source: str, sender: asyncio.Task[Any] | None) -> None:
        message = self._messages.numbered(item, source)
        try:
            if self._rooms is not None:
                await self._rooms.enter(source, message[1], sender)
            await self._queue.put(message)
        except asyncio.CancelledError:
            self._messages.withdraw(source)
            raise

    def get(self) -> Coroutine[Any, Any, Item]:
        """Return a coroutine that removes and returns the next item.

        Its cancellation, for example by ``asyncio.wait_for`` or ``asyncio.timeout``, is recorded
        and repeated as well: a repetition waits for it.

        Raises:
            CapsuleError: As :meth:`Inbox.get`.
        """
        # The reader is the task that calls this method, because wait_for() of Python 3.11 awaits
        # the coroutine in another task each time.
        return self._get(current_task())

    async def _get(self, reader: asyncio.Task[Any] | None) -> Item:
        wait = self._messages.wait()
        if wait is None:
            item: Item = await self._queue.get()
            return item
        if self._is_read:
            wait.misused("is read twice at the same time")
        self._is_read = True
        try:
            return await self._next(wait, reader)
        finally:
            self._is_read = False

    async def _next(self, wait: Wait[_Message[Item]], reader: asyncio.Task[Any] | None) -> Item:
        while not wait.due(reader):
            try:
                message = await arrival(self._queue.get, will_come=wait.follows)
            except asyncio.CancelledError:
                if not wait.replays:
                    wait.nothing()
                raise
            self._messages.offer(wait, message)
        try:
            source, _, item = wait.take()
        except NothingCameError:
            await cancelled_again()
        if self._rooms is not None:
            self._rooms.leave(source)
        return item
