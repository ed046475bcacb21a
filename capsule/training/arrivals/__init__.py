"""The order of arrival, recorded and repeated, for user programs.

    from capsule.training import arrivals

    for future in arrivals.as_completed(futures): ...  # concurrent.futures
    for result in arrivals.imap_unordered(pool, work, items): ...  # multiprocessing.Pool
    async for task in arrivals.completions(tasks): ...  # asyncio
    inbox = arrivals.Inbox(queue)  # of threads or processes; AsyncInbox for asyncio
    inbox.put(item, source="actor 3")
    item = inbox.get()

A program that uses what comes first gives another result in every run. Under ``capsule run`` these
functions record the order of arrival, and under ``capsule verify`` they repeat it. Without Capsule
they do the same as the functions whose names they have.

Tasks that draw randomness from the operating system also need :func:`submit` or :func:`scoped`, so
that a task draws the same bytes whichever worker does it. See ``docs/own-program.md``.
"""

from __future__ import annotations

import asyncio
import queue as queues
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator
from concurrent import futures as pools
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any, Generic, TypeVar

from capsule.training.arrivals.attempts import Attempts
from capsule.training.arrivals.inboxes import AsyncInbox, Inbox
from capsule.training.arrivals.scopes import Place, Scope
from capsule.training.arrivals.waits import (
    Wait,
    current_task,
    run_directory,
    submitted,
    wait_name,
)

__all__ = [
    "AsyncInbox",
    "Inbox",
    "as_completed",
    "completions",
    "imap_unordered",
    "scoped",
    "submit",
]

Item = TypeVar("Item")
Result = TypeVar("Result")


# ---- tasks ----


def submit(
    executor: pools.Executor, function: Callable[..., Result], /, *args: Any, **kwargs: Any
) -> pools.Future[Result]:
    """Submit a task that draws the same randomness whichever worker does it.

    Args:
        executor: Of threads or of processes.
        function: What is called; executors of processes pickle it.
        args: Its arguments.
        kwargs: Its named arguments.

    Returns:
        The future of ``executor.submit``.

    Raises:
        CapsuleError: CAP-T382, two asyncio tasks of one thread submit work.
    """
    directory = run_directory()
    if directory is None:
        return executor.submit(function, *args, **kwargs)
    task = _Task(function, submitted(directory))
    # An executor starts a worker if none is idle at this moment. In a scope, that does not count as
    # a thread or a child of the calling thread's.
    with Scope(submitted(directory)):
        return executor.submit(task, *args, **kwargs)


def as_completed(
    futures: Iterable[pools.Future[Result]], *, name: str | None = None
) -> Iterator[pools.Future[Result]]:
    """Yield futures as they complete, as ``concurrent.futures.as_completed`` does.

    Args:
        futures: In an order that does not depend on time. A future is numbered by its place.
        name: Name of this wait; by default the calling thread's path and a number.

    Raises:
        CapsuleError: CAP-T381, the program does not repeat the recorded run; CAP-T382, the name
            cannot be used, or one is needed.
    """
    # Each future once, as in concurrent.futures, which has a set of them; the order of a set
    # depends on addresses.
    directory, waited = run_directory(), list(dict.fromkeys(futures))
    if directory is None:
        return pools.as_completed(waited)
    name = wait_name(directory, name)
    # This is not a generator itself, so that the wait has its number from the call. A generator
    # would begin with the first result that is asked for, perhaps after that of a later wait.
    return _completed(Wait(directory, "completions", name, len(waited)), waited)


def _completed(
    wait: Wait[pools.Future[Result]], waited: list[pools.Future[Result]]
) -> Iterator[pools.Future[Result]]:
    done: queues.SimpleQueue[int] = queues.SimpleQueue()
    for number, future in enumerate(waited):
        # The thread that completes the future calls this, so it only hands over the number: the
        # wait is used by its reader alone.
        future.add_done_callback(lambda _, number=number: done.put(number))  # type: ignore[misc]
    for _ in waited:
        while not wait.due():
            number = done.get()
            wait.offer(number, waited[number])
        yield wait.take()


def imap_unordered(
    pool: Pool,
    function: Callable[[Item], Result],
    items: Iterable[Item],
    chunksize: int = 1,
    *,
    name: str | None = None,
) -> Iterator[Result]:
    """Yield results as they come, as ``pool.imap_unordered`` does.

    The call for an item draws the same randomness whichever worker makes it.

    Args:
        pool: Of processes, or of threads (``multiprocessing.pool.ThreadPool``).
        function: Called with each item.
        items: In an order that does not depend on time.
        chunksize: Items that a worker takes at a time.
        name: Name of this wait; by default the calling thread's path and a number.

    Raises:
        CapsuleError: CAP-T381 and CAP-T382, as of :func:`as_completed`.
        Exception: What ``function`` raised, in its turn.
    """
    directory = run_directory()
    if directory is None:
        return pool.imap_unordered(function, items, chunksize)
    place = submitted(directory)
    wait: Wait[_Outcome] = Wait(directory, "completions", wait_name(directory, name, place))
    # The items carry their numbers, because a result of the pool does not say of which item it is.
    called = pool.imap_unordered(_Call(function, place), enumerate(items), chunksize)
    return _Results(wait, called)


@dataclass(frozen=True)
class _Results(Iterator[Any]):
    """Results of calls. An exception is raised in its turn; the results behind it follow."""

    wait: Wait[_Outcome]
    called: Iterator[tuple[int, _Outcome]]

    def __next__(self) -> Any:
        while not self.wait.due():
            try:
                number, outcome = next(self.called)
            except StopIteration:
                self.wait.finish()
                raise
            self.wait.offer(number, outcome)
        return self.wait.take().result()


@dataclass(frozen=True)
class _Task(Generic[Result]):
    """A function that is called in the scope of its place."""

    function: Callable[..., Result]
    place: Place | None

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        with Scope(self.place):
            return self.function(*args, **kwargs)


@dataclass(frozen=True)
class _Outcome:
    """The outcome of a call: a value or an exception."""

    value: Any
    error: Exception | None = None

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


@dataclass(frozen=True)
class _Call:
    """A call of a function with one numbered item, in the scope of that item."""

    function: Callable[[Any], Any]
    place: Place | None

    def __call__(self, numbered: tuple[int, Any]) -> tuple[int, _Outcome]:
        number, item = numbered
        with Scope(self.place, number):
            try:
                # An exception is returned as an outcome, too: raised from here, it would leave the
                # pool without the number of its item.
                return number, _Outcome(self.function(item))
            except Exception as error:  # noqa: BLE001 - it is raised again where the result is taken
                error.add_note("".join(traceback.format_exception(error)))  # pickling drops it
                return number, _Outcome(None, error)


# ---- asyncio ----


def scoped(coroutine: Coroutine[Any, Any, Result]) -> Coroutine[Any, Any, Result]:
    """Return a coroutine that draws the same randomness whenever it is resumed.

    To be used where tasks are created: ``asyncio.create_task(arrivals.scoped(agent(3)))``.

    Raises:
        CapsuleError: CAP-T382, two asyncio tasks that are not scoped submit work.
    """
    directory = run_directory()
    return coroutine if directory is None else _stepped(coroutine, Scope(submitted(directory)))


async def _stepped(coroutine: Coroutine[Any, Any, Result], scope: Scope) -> Result:
    return await _Steps(coroutine, scope)


@dataclass(frozen=True)
class _Steps(Generic[Result]):
    """Awaits a coroutine, and is in a scope while it runs, but not while it is suspended."""

    coroutine: Coroutine[Any, Any, Result]
    scope: Scope

    def __await__(self) -> Generator[Any, Any, Result]:
        step, argument = self.coroutine.send, None
        while True:
            try:
                with self.scope:
                    awaited = step(argument)
            except StopIteration as end:
                result: Result = end.value
                return result
            try:
                argument = yield awaited
                step = self.coroutine.send
            except BaseException as error:  # noqa: BLE001 - it is the coroutine's to handle
                step, argument = self.coroutine.throw, error


def completions(
    tasks: Iterable[asyncio.Future[Result]], *, name: str | None = None
) -> AsyncIterator[asyncio.Future[Result]]:
    """Yield asyncio's tasks or futures as they complete; they are done when they are yielded.

    Args:
        tasks: In an order that does not depend on time. A task is numbered by its place.
        name: Name of this wait; by default the calling thread's path and a number.

    That the wait for the next one was cancelled, by ``asyncio.wait_for(anext(...), ...)`` or
    ``asyncio.timeout`` for example, is recorded and repeated, too. A replay waits for the
    cancellation.

    Raises:
        CapsuleError: CAP-T381 and CAP-T382, as of :func:`as_completed`.
    """
    directory, waited = run_directory(), list(dict.fromkeys(tasks))
    if directory is None:
        return _Completions(waited)
    return _RecordedCompletions(waited, directory, wait_name(directory, name))


class _Completions(AsyncIterator[asyncio.Future[Result]]):
    """Futures as they complete. If a wait for the next one is cancelled, it is not lost."""

    def __init__(self, waited: list[asyncio.Future[Result]]) -> None:
        self._waited = waited
        self._left = len(waited)
        self._done: asyncio.Queue[int] = asyncio.Queue()
        for number, task in enumerate(waited):
            task.add_done_callback(lambda _, number=number: self._done.put_nowait(number))  # type: ignore[misc]

    def __anext__(self) -> Coroutine[Any, Any, asyncio.Future[Result]]:
        # The reader is the task that calls this: wait_for() of Python 3.11 awaits the coroutine in
        # another task each time.
        return self._next(current_task())

    async def _next(self, reader: asyncio.Task[Any] | None) -> asyncio.Future[Result]:
        if not self._left:
            raise StopAsyncIteration
        task = await self._take(reader)
        self._left -= 1
        return task

    async def _take(self, _reader: asyncio.Task[Any] | None) -> asyncio.Future[Result]:
        return self._waited[await self._done.get()]


class _RecordedCompletions(_Completions[Result]):
    """The same in the order of arrival, recorded or repeated."""

    def __init__(self, waited: list[asyncio.Future[Result]], directory: Path, name: str) -> None:
        super().__init__(waited)
        self._wait: Wait[asyncio.Future[Result]] = Wait(directory, "completions", name, len(waited))
        # The log of completions has no place for a wait in which nothing came.
        self._attempts = Attempts(directory, f"{name} cancellations", "completed")
        self._is_read = False

    async def _take(self, reader: asyncio.Task[Any] | None) -> asyncio.Future[Result]:
        if self._is_read:
            self._wait.misused("is read twice at the same time")
        self._is_read = True
        try:
            return await self._attempts.make(partial(self._arrived, reader))
        finally:
            self._is_read = False

    async def _arrived(self, reader: asyncio.Task[Any] | None) -> asyncio.Future[Result]:
        while not self._wait.due(reader):
            number = await self._done.get()
            self._wait.offer(number, self._waited[number])
        return self._wait.take()
