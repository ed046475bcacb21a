"""Coroutines of a program that it may cancel before they end, recorded and repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

from capsule.training.arrivals.waits import NothingCameError, Wait, current_task, recorded_waits

Result = TypeVar("Result")


# The cancellations that a replay has kept from a task, because what the task awaited had come in
# time when the run was recorded.
_kept: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()


async def arrival(awaited: Callable[[], Coroutine[Any, Any, Result]], *, will_come: bool) -> Result:
    """Await something that can be cancelled before it comes.

    Args:
        awaited: Makes the coroutine, again after each cancellation that is kept from the task.
        will_come: Whether it came when the run was recorded. It may take longer in a replay, in
            which a time-out can pass that had not passed before.
    """
    if not will_come:
        _raise_kept()
        return await awaited()
    while True:
        try:
            return await awaited()
        except asyncio.CancelledError:
            if (task := current_task()) is None:
                raise
            _kept[task] = _kept.get(task, 0) + 1


async def cancelled_again(task: asyncio.Task[Any] | None = None) -> NoReturn:
    """Wait to be cancelled: the program did so when it was recorded, and will do so again.

    It may have done so already, while the replay awaited something before.

    Args:
        task: A task that the program cancels only once, when it ends. wait_for() of Python 3.11
            loses this cancellation if what it awaited has just ended.
    """
    _raise_kept()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
    await asyncio.get_running_loop().create_future()
    raise AssertionError("a future without a result has ended")


def _raise_kept() -> None:
    """Raise a cancellation that was kept from the task and still applies.

    It no longer applies when the program has left the ``asyncio.timeout`` that cancelled the task,
    which then takes back its cancellation (``Task.uncancel``).
    """
    task = current_task()
    if task is None or task not in _kept:
        return
    left = min(_kept.pop(task), task.cancelling())
    if left > 1:
        _kept[task] = left - 1
    if left:
        raise asyncio.CancelledError


class Attempts:
    """Attempts to do one thing after another, of which the program may cancel some.

    Which ones it cancels depends on time, so the log has a wait for them: it is given a message of
    ``source`` for each attempt that ended, and nothing where one was cancelled. The wait is begun
    when the first one is cancelled, and then contains those before it, too. So the log of a program
    that cancels none does not list every arrival twice.
    """

    def __init__(self, directory: Path, name: str, source: str) -> None:
        """Record or repeat the attempts that ``name`` describes.

        Raises:
            CapsuleError: As of :class:`Wait`.
        """
        self._directory = directory
        self._name = name
        self._source = source
        # Attempts of several tasks are allowed if one has ended before the next begins.
        self._task = current_task()
        self._ended = 0
        self._under_way = 0
        recorded = recorded_waits(directory)
        self._replays = recorded is not None
        self._wait = self._begun() if recorded is not None and name in recorded else None

    async def make(self, attempt: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Make an attempt, which leaves everything as it was if it is cancelled.

        Raises:
            CapsuleError: CAP-T382, two attempts are made at the same time, of which one may be
                cancelled; CAP-T383, there are more arrivals than a log can contain; CAP-T131, it
                cannot be written down.
        """
        self._under_way += 1
        try:
            return await self._make(attempt)
        finally:
            self._under_way -= 1

    async def _make(self, attempt: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        if self._wait is not None and (self._wait.follows or not self._wait.replays):
            self._require_one(self._wait)
        if self._replays:
            return await self._repeat(attempt)
        try:
            result = await attempt()
        except asyncio.CancelledError:
            self._note_cancelled()
            raise
        self._note_end()
        return result

    async def _repeat(self, attempt: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        wait = self._wait
        # The program may be cancelled after more attempts than in the recorded run.
        if wait is None or not wait.follows:
            return await attempt()
        if wait.due(self._task):
            with suppress(NothingCameError):
                wait.take()
            await cancelled_again()
        result = await attempt()
        self._note_end()
        return result

    def _note_end(self) -> None:
        if self._wait is not None:
            self._write_end(self._wait, self._ended)
        self._ended += 1

    def _note_cancelled(self) -> None:
        if self._wait is None:
            self._wait = self._begun()
            for number in range(self._ended):
                self._write_end(self._wait, number)
        self._require_one(self._wait)
        self._wait.nothing()

    def _write_end(self, wait: Wait[None], number: int) -> None:
        wait.offer((self._source, number), None)
        wait.take()

    def _require_one(self, wait: Wait[None]) -> None:
        if self._under_way > 1:
            wait.misused("has two attempts at the same time, of which one may be cancelled")

    def _begun(self) -> Wait[None]:
        return Wait(self._directory, "messages", self._name)
