"""Metrics of a run while it runs, written by the host from the events that the run reports.

Nothing of it reaches into the image, so a run with and without it is the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from capsule.execution import Reporter
from capsule.experiment.contract import Event
from capsule.export.runs import TRAINING, Point, event_values
from capsule.export.table import COLUMNS, row, table_text
from capsule.export.tensorboard import EVENT_FILE, EventWriter
from capsule.host.errors import CapsuleError


class _Sink(Protocol):
    def write(self, name: str, point: Point) -> None:
        """Write a value so that readers see it at once."""


_Opener = Callable[[Path, str, ExitStack], _Sink]


class FollowingReporter:
    """Passes everything on to another reporter, and the metrics of events to a file."""

    def __init__(self, reporter: Reporter, sink: _Sink) -> None:
        self._reporter = reporter
        self._sink: _Sink | None = sink
        self._last: Event | None = None

    def note(self, message: str) -> None:
        """Pass the message on."""
        self._reporter.note(message)

    def event(self, event: Event) -> None:
        """Pass the event on, and write its metrics unless the last one had the same."""
        self._reporter.event(event)
        last, self._last = self._last, event
        values = event_values(event)
        if last is None or (last.step, event_values(last)) != (event.step, values):
            self._write(event, values)

    def _write(self, event: Event, values: Mapping[str, float]) -> None:
        """Write values. A full disk ends the writing, with a message, and not the run."""
        if self._sink is None:
            return
        try:
            for name, value in values.items():
                self._sink.write(TRAINING + name, Point(event.step, value, event.time))
        except OSError as error:
            self._sink = None
            self.note(f"--metrics: no further metrics are written: {error.strerror}")


def check_target(target: str | None) -> None:
    """Check that ``--metrics`` has a known form, before anything runs.

    Raises:
        CapsuleError: CAP-P206.
    """
    if target is not None:
        _parse(target)


@contextmanager
def follow(target: str | None, run: str, reporter: Reporter) -> Iterator[Reporter]:
    """Yield a reporter that also writes metrics, if ``target`` says where.

    Args:
        target: ``tensorboard:FOLDER`` or ``csv:FILE``. A file of CSV is appended to.
        run: Name of the run.
        reporter: Told about everything.

    Raises:
        CapsuleError: CAP-P206, the target has another form or cannot be written.
    """
    if target is None:
        yield reporter
        return
    opener, place = _parse(target)
    with ExitStack() as stack:
        try:
            sink = opener(place, run, stack)
        except OSError as error:
            raise CapsuleError(
                "CAP-P206",
                f"--metrics {target!a} cannot be written: {error.strerror}",
                fix="Name a place that you may write to.",
            ) from error
        yield FollowingReporter(reporter, sink)


def _open_events(folder: Path, run: str, stack: ExitStack) -> _Sink:
    """Open a new event file in the run's folder; a resumed run gets a further one."""
    started = time.time()
    path = folder / run / EVENT_FILE.format(seconds=int(started))
    path.parent.mkdir(parents=True, exist_ok=True)
    return EventWriter(stack.enter_context(path.open("ab", buffering=0)), started)


def _open_table(path: Path, run: str, stack: ExitStack) -> _Sink:
    path.parent.mkdir(parents=True, exist_ok=True)
    return _Table(stack.enter_context(path.open("ab", buffering=0)), run)


class _Table:
    """Appends rows to a file of CSV, after a header in a new one."""

    def __init__(self, stream: BinaryIO, run: str) -> None:
        self._stream = stream
        self._run = run
        if stream.tell() == 0:
            stream.write(table_text([COLUMNS]).encode())

    def write(self, name: str, point: Point) -> None:
        self._stream.write(table_text([row(self._run, name, *point)]).encode())


_OPENERS: dict[str, _Opener] = {"tensorboard": _open_events, "csv": _open_table}


def _parse(target: str) -> tuple[_Opener, Path]:
    form, _, place = target.partition(":")
    if form not in _OPENERS or not place:
        raise CapsuleError(
            "CAP-P206",
            f"--metrics {target!a} is neither tensorboard:FOLDER nor csv:FILE",
            fix="Write for example --metrics tensorboard:logs",
        )
    return _OPENERS[form], Path(place)
