"""The order of arrival, recorded and repeated, for user programs.

    from capsule.training import arrivals

    for future in arrivals.as_completed(futures): ...  # concurrent.futures
    for result in arrivals.imap_unordered(pool, work, items): ...  # multiprocessing.Pool
    async for task in arrivals.completions(tasks): ...  # asyncio
    inbox = arrivals.Inbox(queue)  # of threads or processes; AsyncInbox for asyncio
    inbox.put(item, source="actor 3")
    item = inbox.get()

The result of a program that uses the order of arrival differs from run to run. Under ``capsule
run`` these functions record the order, and under ``capsule verify`` they repeat it. Without Capsule
they do the same as the functions of the standard library with the same names.

Tasks that draw entropy from the operating system also need :func:`submit` or :func:`scoped`, so
that a task draws the same bytes whichever worker executes it. See ``docs/own-program.md``.
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

from capsule.training.arrivals.attempts import Attempts, arrival
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
    """Submit a task that draws the same entropy whichever worker executes it.

    Args:
        executor: An executor of threads or of processes.
        function: The function to call; executors of processes pickle it.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        The future of ``executor.submit``.

    Raises:
        CapsuleError: CAP-T382, two asyncio tasks of one thread submit work.
    """
    directory = run_directory()
    if directory is None:
        return executor.submit(function, *args, **kwargs)
    task = _Task(function, submitted(directory))
    # An executor starts a worker if none is idle at this moment, which depends on time. In a scope,
    # the worker does not count as a thread or child process of the calling thread.
    with Scope(submitted(directory)):
        return executor.submit(task, *args, **kwargs)


def as_completed(
    futures: Iterable[pools.Future[Result]], *, name: str | None = None
) -> Iterator[pools.Future[Result]]:
    """Yield futures as they complete, as ``concurrent.futures.as_completed`` does.

    Args:
        futures: The futures, in an order that does not depend on time. The position of a future is
            its number.
        name: Name of this wait; by default the calling thread's path and a number.

    Raises:
        CapsuleError: CAP-T381, the program does not repeat the recorded run; CAP-T382, the name
            cannot be used, or one is required.
    """
    # Duplicates are removed, as in concurrent.futures, but without a set, whose order depends on
    # addresses.
    directory, waited = run_directory(), list(dict.fromkeys(futures))
    if directory is None:
        return pools.as_completed(waited)
    name = wait_name(directory, name)
    # This function is not a generator, so that the wait is numbered when it is called. A generator
    # would number it when its first result is requested, perhaps after a later wait.
    return _completed(Wait(directory, "completions", name, len(waited)), waited)


def _completed(
    wait: Wait[pools.Future[Result]], waited: list[pools.Future[Result]]
) -> Iterator[pools.Future[Result]]:
    done: queues.SimpleQueue[int] = queues.SimpleQueue()
    for number, future in enumerate(waited):
        # The thread that completes the future executes the callback, which therefore only passes on
        # the number: only the reader may use the wait.
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

    The call for an item draws the same entropy whichever worker makes it.

    Args:
        pool: A pool of processes, or of threads (``multiprocessing.pool.ThreadPool``).
        function: The function that is called with each item.
        items: The items, in an order that does not depend on time.
        chunksize: Number of items that a worker takes at a time.
        name: Name of this wait; by default the calling thread's path and a number.

    Raises:
        CapsuleError: CAP-T381 or CAP-T382, as for :func:`as_completed`.
        Exception: An exception of ``function``, in place of its result.
    """
    directory = run_directory()
    if directory is None:
        return pool.imap_unordered(function, items, chunksize)
    place = submitted(directory)
    wait: Wait[_Outcome] = Wait(directory, "completions", wait_name(directory, name, place))
    # Items are passed with their numbers, because the results of the pool do not name their items.
    called = pool.imap_unordered(_Call(function, place), enumerate(items), chunksize)
    return _Results(wait, called)


@dataclass(frozen=True)
class _Results(Iterator[Any]):
    """The results of calls. An exception is raised in its turn, and further results follow."""

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
    """The outcome of a call: its result or an exception."""

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
                # An exception is returned as an outcome as well; if it were raised, the pool would
                # lose the number of its item.
                return number, _Outcome(self.function(item))
            except Exception as error:  # noqa: BLE001 - it is raised again where the result is taken
                error.add_note("".join(traceback.format_exception(error)))  # pickling loses it
                return number, _Outcome(None, error)


# ---- asyncio ----


def scoped(coroutine: Coroutine[Any, Any, Result]) -> Coroutine[Any, Any, Result]:
    """Return a coroutine that draws the same entropy whenever it is resumed.

    It is used where a task is created: ``asyncio.create_task(arrivals.scoped(agent(3)))``.

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
            except BaseException as error:  # noqa: BLE001 - passed on to the coroutine
                step, argument = self.coroutine.throw, error


def completions(
    tasks: Iterable[asyncio.Future[Result]], *, name: str | None = None
) -> AsyncIterator[asyncio.Future[Result]]:
    """Yield asyncio's tasks or futures as they complete; they are done when they are yielded.

    Args:
        tasks: The tasks, in an order that does not depend on time. The position of a task is its
            number.
        name: Name of this wait; by default the calling thread's path and a number.

    That the wait for the next one was cancelled, by ``asyncio.wait_for(anext(...), ...)`` or
    ``asyncio.timeout`` for example, is recorded and repeated, too. A replay waits for the
    cancellation.

    Raises:
        CapsuleError: CAP-T381 or CAP-T382, as for :func:`as_completed`.
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
            number = await arrival(self._done.get, will_come=self._wait.follows)
            self._wait.offer(number, self._waited[number])
        return self._wait.take()
