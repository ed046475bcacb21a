"""Progress on standard error: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from capsule.experiment.contract import Event
from capsule.report.text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

PLAIN_SECONDS = 5.0
_MOST_SECONDS = 1e11  # three thousand years: a longer time follows from absurd numbers only
_MOST_STEPS = 1 << 62  # rich computes with floats, and integers of JSON may be larger than these


class SilentReporter:
    """Says nothing."""

    def note(self, message: str) -> None:
        """Drop the message."""

    def event(self, event: Event) -> None:
        """Drop the event."""


class PlainReporter:
    """One line per note, and one per few seconds of training."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        # The first event is printed whatever it is: monotonic clocks may start at 0.
        self._last = -PLAIN_SECONDS

    def note(self, message: str) -> None:
        """Print the message."""
        self._print(f"  {printable(message)}")

    def event(self, event: Event) -> None:
        """Print the event, unless it is a progress event soon after the last."""
        now = time.monotonic()
        if event.kind == "progress" and now - self._last < PLAIN_SECONDS:
            return
        self._last = now
        self._print(f"  {event.kind:<10} {event_line(event)}")

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class LiveReporter:
    """A progress bar that stays in place, with notes above it."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self._console = console
        self._progress = progress
        self._task: TaskID | None = None

    def note(self, message: str) -> None:
        """Print the message above the bar."""
        self._console.print(f"  {printable(message)}", style="dim", markup=False, highlight=False)

    def event(self, event: Event) -> None:
        """Move the bar."""
        total = None if event.total_steps is None else _bounded(event.total_steps)
        if self._task is None:
            self._task = self._progress.add_task("", total=total)
        self._progress.update(
            self._task, completed=_bounded(event.step), total=total, description=event_line(event)
        )
        if event.kind not in ("progress", "checkpoint"):
            self.note(f"{event.kind}: {event_line(event)}")


@contextmanager
def open_reporter(*, quiet: bool) -> Iterator[SilentReporter | PlainReporter | LiveReporter]:
    """Yield the reporter that suits standard error."""
    if quiet:
        yield SilentReporter()
        return
    if not sys.stderr.isatty():
        yield PlainReporter(sys.stderr)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    # Descriptions have text of the training process, in which brackets are no markup.
    said = TextColumn("{task.description}", markup=False)
    columns = (BarColumn(bar_width=24), said, TimeRemainingColumn())
    # The bar is erased at the end, and the notes above it stay.
    with Progress(*columns, console=console, transient=True) as progress:
        yield LiveReporter(console, progress)


def event_line(event: Event) -> str:
    """Describe an event in one line: step, speed, return, loss, exploration, time left."""
    total = event.total_steps
    parts = [f"step {event.step:,}" + (f"/{total:,}" if total else "")] * bool(total or event.step)
    if total and event.steps_per_second:
        parts.append(f"{event.steps_per_second:,.0f} steps/s")
        if event.kind == "progress":
            left = seconds_left(total - event.step, event.steps_per_second)
            parts.append(f"{'?' if left is None else duration(left)} left")
    if event.episode_return is not None:
        parts.append(f"return {event.episode_return:.2f}")
    if event.loss is not None:
        parts.append(f"loss {event.loss:.4g}")
    if event.exploration is not None:
        parts.append(f"exploration {event.exploration:.2f}")
    if event.message:
        parts.append(printable(event.message))
    return "  ".join(parts)


def _bounded(steps: int) -> int:
    return max(0, min(steps, _MOST_STEPS))


def seconds_left(steps: int, steps_per_second: float) -> float | None:
    """Return the time that steps take; None if the numbers of a program give none.

    A program writes its events itself, and may write anything that has their form.
    """
    try:
        seconds = steps / steps_per_second
    except OverflowError:
        return None
    # NaN is not smaller than any number.
    return max(0.0, seconds) if abs(seconds) < _MOST_SECONDS else None


def duration(seconds: float) -> str:
    """Return a time as text: ``2h05m``, ``3m20s`` or ``45s``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
