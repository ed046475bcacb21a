"""Metrics of a run while it runs, written by the host from what the run writes.

These are the events of Capsule's trainers, and the metrics of a program's recorder. Nothing of it
reaches into the image, so a run with and without it is the same run.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from capsule.experiment.beneath import open_beneath
from capsule.experiment.contract import WORKSPACE, Event
from capsule.export.mlflow import open_mlflow
from capsule.export.runs import TRAINING, Point, Write, event_values, line_values, sound_time
from capsule.export.table import COLUMNS, row, table_text
from capsule.export.tensorboard import EVENT_FILE, EventWriter
from capsule.export.wandb import open_wandb, require_wandb
from capsule.host.errors import CapsuleError, coded
from capsule.host.outputs import append, check_folder, check_output
from capsule.host.reporter import Reporter
from capsule.host.run_directory import WORK
from capsule.report.subject import METRICS, JsonLines

RECORDED = f"{WORKSPACE}/outputs/{METRICS}"  # in a run directory
MAX_READ_BYTES = 16 << 20  # of what came since the last event, which was about a second ago


_Opener = Callable[[Path, Path], AbstractContextManager[Write]]  # of a place and a run directory


class FollowingReporter:
    """Passes everything on to another reporter, and metrics to a file."""

    def __init__(self, reporter: Reporter, write: Write, work: Path) -> None:
        self._reporter = reporter
        self._write_value: Write | None = write
        self._recorded = _RecorderTail(work)
        self._last: tuple[int, dict[str, float]] | None = None
        self._time: float | None = None  # of the last event

    def note(self, message: str) -> None:
        """Pass the message on."""
        self._reporter.note(message)

    def event(self, event: Event) -> None:
        """Pass the event on, and write what is new."""
        self._reporter.event(event)
        last, self._last = self._last, (event.step, event_values(event))
        self._time = sound_time(event.time)
        self._write([self._last] if self._last != last else [])

    def finish(self) -> None:
        """Write what a program logged after the last event."""
        self._write([])

    def _write(self, reported: list[tuple[int, dict[str, float]]]) -> None:
        """Write metrics of an event, and a program's. An error ends the writing, not the run."""
        if self._write_value is None:
            return
        try:
            recorded = ((line["step"], line_values(line)) for line in self._recorded.poll())
            for step, values in chain(reported, recorded):
                for name, value in values.items():
                    self._write_value(TRAINING + name, Point(step, value, self._time))
        # Whatever it is, such as a full disk or the end of W&B's own process, the run continues.
        except Exception as error:  # noqa: BLE001
            self._write_value = None
            self.note(f"--metrics: no further metrics are written: {_reason(error)}")


class _RecorderTail:
    """Follows the metrics of a program, which its recorder appends as lines of JSON."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._offset = 0
        # What an earlier attempt wrote was followed then. If the program left something else than a
        # file, poll() says so.
        with suppress(OSError), open_beneath(work, RECORDED) as stream:
            self._offset = stream.seek(0, os.SEEK_END)

    def poll(self) -> Iterator[dict[str, Any]]:
        """Yield the new lines.

        Raises:
            OSError: The program put something else in the place of the file.
        """
        try:
            stream = open_beneath(self._work, RECORDED)
        except FileNotFoundError:  # the program has not logged anything
            return
        with stream:
            # A resumed program may have cut off lines, which come again.
            self._offset = min(self._offset, stream.seek(0, os.SEEK_END))
            stream.seek(self._offset)
            data = stream.read(MAX_READ_BYTES)
        # The recorder may be writing the last line, which is then read the next time.
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        yield from JsonLines(lambda: io.BytesIO(whole))


@contextmanager
def follow(target: str, directory: Path, reporter: Reporter) -> Iterator[Reporter]:
    """Yield a reporter that also writes metrics.

    Args:
        target: Form and place, as ``--metrics`` names them.
        directory: Folder of the run, which has its lock.
        reporter: Told about everything.

    Raises:
        CapsuleError: CAP-P206, the target has another form or cannot be written; CAP-P205, the
            package that writes it is not installed.
    """
    opener, place = parse_target(target)
    opened = ExitStack()
    # Only errors of opening the place are reported in this way. Those of the run itself pass
    # through the yield below.
    with _writing(target):
        write = opened.enter_context(opener(place, directory))
    following = FollowingReporter(reporter, write, directory / WORK)
    try:
        try:
            yield following
        finally:
            following.finish()
    except BaseException:
        with _noting(reporter):
            opened.__exit__(*sys.exc_info())
        raise
    with _noting(reporter):
        opened.close()


def require_target(target: str) -> None:
    """Check before a run begins that its metrics can be written, and write nothing.

    Raises:
        CapsuleError: CAP-P205, CAP-P206, as of :func:`follow`.
    """
    opener, place = parse_target(target)
    if opener is open_wandb:
        require_wandb()
    with _writing(target):
        if opener is _open_table:
            check_output(place)
            _check_header(place)
        else:
            check_folder(place)


def _writing(target: str) -> AbstractContextManager[None]:
    what = f"--metrics {target!a} cannot be written"
    return coded("CAP-P206", what, fix="Name a place that you may write to.")


@contextmanager
def _noting(reporter: Reporter) -> Iterator[None]:
    """Tell of an error of closing the place, which must not replace the outcome of the run."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a library may raise anything
        reporter.note(f"--metrics: the end of the run is not written: {_reason(error)}")


def _reason(error: Exception) -> str:
    """Return what an error says. One that a library raises may have no text of the system."""
    if isinstance(error, CapsuleError):
        return error.message
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


@contextmanager
def _open_events(folder: Path, directory: Path) -> Iterator[Write]:
    """Open a new event file in the run's folder; a resumed run gets a further one."""
    started = time.time()
    path = folder / directory.name / EVENT_FILE.format(seconds=int(started))
    path.parent.mkdir(parents=True, exist_ok=True)
    yield EventWriter(partial(append, path), started).write


@contextmanager
def _open_table(path: Path, directory: Path) -> Iterator[Write]:
    """Open a new file of CSV, which gets a header, or append to an existing one."""
    _check_header(path)
    path.parent.mkdir(parents=True, exist_ok=True)

    def add(text: str) -> None:
        append(path, text.encode(), heading=_HEADER)

    add("")
    yield lambda name, point: add(table_text([row(directory.name, name, *point)]))


def _check_header(path: Path) -> None:
    """Reject a file that is not a table of metrics: rows are appended to it.

    Raises:
        CapsuleError: CAP-P206.
        OSError: The file cannot be read.
    """
    if not path.is_file() or path.stat().st_size == 0:
        return
    with path.open("rb") as stream:
        if stream.read(len(_HEADER)) == _HEADER:
            return
    raise CapsuleError(
        "CAP-P206",
        f"--metrics csv:{path} exists, and does not begin with the line {_HEADER.decode().strip()}",
        fix="Name a new file, or one that --metrics csv or 'capsule export --to csv' wrote.",
    )


_HEADER = table_text([COLUMNS]).encode()
_OPENERS: dict[str, _Opener] = {
    "tensorboard": _open_events,
    "csv": _open_table,
    "mlflow": open_mlflow,
    "wandb": open_wandb,
}


def parse_target(target: str) -> tuple[_Opener, Path]:
    """Return what opens the place that ``--metrics`` names, and the place.

    Raises:
        CapsuleError: CAP-P206, the target has another form.
    """
    form, _, place = target.partition(":")
    if form not in _OPENERS or not place:
        raise CapsuleError(
            "CAP-P206",
            f"--metrics {target!a} is not tensorboard:FOLDER, csv:FILE, mlflow:FOLDER or "
            "wandb:FOLDER",
            fix="Write, for example, --metrics tensorboard:logs.",
        )
    return _OPENERS[form], Path(place)
