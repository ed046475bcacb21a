"""Coroutines of a program that it may cancel before they end, recorded and repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from capsule.training.arrivals.waits import NothingCameError, Wait, current_task, recorded_waits

Result = TypeVar("Result")


async def cancelled_again() -> NoReturn:
    """Wait to be cancelled: the program did so when it was recorded, and will do so again."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError("a future without a result has ended")


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
            CapsuleError: CAP-T381, the recorded run made no such attempt; CAP-T382, two attempts
                are made at the same time, of which one may be cancelled; CAP-T383, there are more
                arrivals than a log holds; CAP-T131, it cannot be written down.
        """
        self._under_way += 1
        try:
            return await self._make(attempt)
        finally:
            self._under_way -= 1

    async def _make(self, attempt: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        if self._wait is not None:
            self._require_one(self._wait)
            if self._replays and self._wait.due(self._task):
                with suppress(NothingCameError):
                    self._wait.take()
                await cancelled_again()
        while True:
            try:
                result = await attempt()
            except asyncio.CancelledError:
                # What ended in time when the run was recorded may take longer in a replay.
                if self._replays:
                    continue
                self._note_cancelled()
                raise
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
