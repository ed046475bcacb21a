"""Run directories as ``capsule run`` leaves them: how each run stands, read from its files.

A run directory has ``lock.json``, the folder ``work`` that the training side writes
(:mod:`capsule.experiment.contract`) and, once the run has ended, its bundle.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import ValidationError

from capsule.bundle.claims import read_document
from capsule.engine.supervise import is_held
from capsule.experiment import contract
from capsule.experiment.beneath import UnboundedError, entries_beneath, open_beneath
from capsule.experiment.files import open_regular
from capsule.experiment.lock import Lock
from capsule.experiment.trainers import CommandTrainer
from capsule.host.errors import CapsuleError
from capsule.host.folders import occupied_bytes
from capsule.host.run_directory import BUNDLES, LOCK, WORK, run_directories, started
from capsule.host.validation import first_reason
from capsule.image.lockfile import read_lock
from capsule.report.scores import tasks
from capsule.report.subject import (
    EVALUATIONS,
    MAX_STEP,
    JsonLines,
    NetworkReturns,
    evaluation_points,
    evaluations_of,
    first_named,
)
from capsule.report.text import bytes_text, printable

if TYPE_CHECKING:
    from rich.table import Table

MAX_TAIL_BYTES = 1 << 16
_CLAIM = re.compile(r"-([0-9a-f]{8})\Z")  # the end of a bundle's name, by pack_run()

RunState = Literal["not started", "running", "interrupted", "failed", "finished", "damaged"]
_UNITS = ((10**3, "k"), (10**6, "M"), (10**9, "G"))
_AGES = ((86_400, "d"), (3_600, "h"), (60, "min"))


class FoundRun(NamedTuple):
    """A run directory.

    Attributes:
        path: The directory.
        state: "interrupted": it began and did not end, and no process executes it; "damaged": a
            file of it cannot be read.
        started: When the directory was made.
        bytes: Disk space of all its files.
        lock: What is run; None if it is damaged.
        step: Agent steps done, as the run last reported; None if it has not.
        total_steps: Agent steps of the whole run; None where a program does not say.
        evaluation_return: Mean return of the last evaluation; None without one, or with several
            games.
        episode_return: Mean return of the last 100 episodes of the training, as last reported; None
            with several games.
        bundle: The signed bundle; None before the end.
        problem: Why a run failed or is damaged: a code and a message.
    """

    path: Path
    state: RunState
    started: datetime
    bytes: int = 0
    lock: Lock | None = None
    step: int | None = None
    total_steps: int | None = None
    evaluation_return: float | None = None
    episode_return: float | None = None
    bundle: Path | None = None
    problem: str | None = None

    @property
    def claim(self) -> str | None:
        """The first eight digits of the claim id, if the bundle has them at the end of its name."""
        name = "" if self.bundle is None else self.bundle.name.removesuffix(BUNDLES[1:])
        found = _CLAIM.search(name)
        return None if found is None else found[1]

    def document(self) -> dict[str, Any]:
        """Return the facts as JSON values."""
        return {
            "path": str(self.path),
            "name": None if self.lock is None else self.lock.spec.name,
            "state": self.state,
            "started": self.started.isoformat(timespec="seconds"),
            "bytes": self.bytes,
            "lock": None if self.lock is None else self.lock.digest(),
            "step": self.step,
            "total_steps": self.total_steps,
            "evaluation_return": _finite(self.evaluation_return),
            "episode_return": _finite(self.episode_return),
            "claim": self.claim,
            "bundle": None if self.bundle is None else str(self.bundle),
            "problem": self.problem,
        }


def _finite(value: float | None) -> float | None:
    """Return a number, or None for one that JSON has no form for."""
    return value if value is not None and math.isfinite(value) else None


def find_runs(folder: Path) -> list[FoundRun]:
    """Return the runs in a folder, or in the folder of a study, the newest first.

    Raises:
        CapsuleError: CAP-P105, it is not a folder.
    """
    if not folder.is_dir():
        raise CapsuleError(
            "CAP-P105",
            f"{folder} is not a folder",
            fix="Name the folder that 'capsule run --output' was given; by default, it is 'runs'.",
        )
    found = []
    for path in run_directories(folder):
        with suppress(FileNotFoundError):  # it has been removed meanwhile
            found.append(read_run(path))
    return sorted(found, key=lambda run: (run.started, run.path), reverse=True)


def read_run(path: Path) -> FoundRun:
    """Read how the run of a directory stands."""
    try:
        return _read_run(path)
    except (CapsuleError, UnboundedError, OSError, ValueError) as error:
        # A program can write anything into its run directory, and one damaged run must not hide the
        # others.
        code = f"{error.code}: " if isinstance(error, CapsuleError) else ""
        made = datetime.fromtimestamp((path / LOCK).stat().st_mtime, tz=UTC)
        return FoundRun(path, "damaged", made, problem=code + first_reason(error))


def _read_run(path: Path) -> FoundRun:
    work, bundles = path / WORK, sorted(path.glob(BUNDLES))
    event, failure = last_event(work / contract.EVENTS), None
    if bundles:
        state: RunState = "finished"
    elif not work.is_dir():
        state = "not started"
    elif is_held(work):
        state = "running"
    elif (work / contract.FAILURE).exists():
        state, failure = "failed", read_document(work / contract.FAILURE, contract.Failure)
    else:
        state = "interrupted"
    lock = read_lock(path / LOCK)
    one_task = len(tasks(lock)) == 1  # returns of different games have no mean
    return FoundRun(
        path=path,
        state=state,
        started=started(path),
        bytes=sum(occupied_bytes(entry.facts) for entry in entries_beneath(path)),
        lock=lock,
        step=None if event is None else event.step,
        total_steps=None if event is None else event.total_steps,
        evaluation_return=_evaluation_return(lock, work) if one_task else None,
        episode_return=_episode_return(work / contract.EVENTS) if one_task else None,
        bundle=bundles[-1] if bundles else None,
        problem=None if failure is None else f"{failure.code}: {failure.message}",
    )


def last_event(path: Path) -> contract.Event | None:
    """Return the last whole event of a run; None if there is none."""
    return next(_events(path), None)


def last_speed(path: Path) -> float | None:
    """Return the agent steps per second that a run reported last; not every event has them."""
    speeds = (event.steps_per_second for event in _events(path))
    return next((speed for speed in speeds if speed is not None), None)


def _events(path: Path) -> Iterator[contract.Event]:
    """Yield the last events of a run, the last one first."""
    try:
        with open_regular(path, follow=False) as stream:
            # The file may be large, and only its last events are wanted.
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - MAX_TAIL_BYTES))
            lines = stream.read().splitlines(keepends=True)
    except FileNotFoundError:
        return
    for line in reversed(lines):
        # A last line without its end is being written.
        if line.endswith(b"\n"):
            try:
                event = contract.Event.model_validate_json(line)
            except ValidationError:  # the first of the tail may be cut off
                continue
            # A program writes its events itself, and may write any numbers.
            if 0 <= event.step <= MAX_STEP and 0 <= (event.total_steps or 0) <= MAX_STEP:
                yield event


def _episode_return(path: Path) -> float | None:
    returns = (event.episode_return for event in _events(path))
    return next((value for value in returns if value is not None), None)


def evaluated(lock: Lock, work: Path) -> tuple[NetworkReturns, ...]:
    """Return the evaluations that a run has written; none if it has not come so far.

    Raises:
        CapsuleError: The file is malformed.
        UnboundedError: A program made too many files.
        ValueError: A return is not a C99 hexadecimal float.
    """
    if isinstance(lock.spec.trainer, CommandTrainer):
        return evaluations_of(workspace_lines(work, EVALUATIONS))
    path = work / contract.EVALUATION
    if not path.exists():
        return ()
    return evaluation_points(read_document(path, contract.Evaluation))


def _evaluation_return(lock: Lock, work: Path) -> float | None:
    """Return the mean return of the last network that was evaluated."""
    scored = [point for point in evaluated(lock, work) if point.returns]
    return scored[-1].mean if scored else None


def workspace_lines(work: Path, name: str) -> JsonLines:
    """Return the lines of a file that a program's recorder wrote anywhere in the working folder.

    Raises:
        UnboundedError: The program made too many files.
    """
    workspace = work / contract.WORKSPACE
    if not workspace.is_dir():
        return JsonLines(None)
    files = (each.path for each in entries_beneath(workspace) if stat.S_ISREG(each.facts.st_mode))
    found = first_named(files, name)
    return JsonLines(None if found is None else partial(open_beneath, workspace, found))


# --- a table ------------------------------------------------------------------------------------


def runs_table(runs: Sequence[FoundRun], folder: Path, now: datetime) -> Table:
    """Return a table of runs that fits 80 columns; long names take several lines."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    for heading in ("steps", "return"):
        table.add_column(heading, no_wrap=True, justify="right")
    table.add_column("claim", no_wrap=True)
    for heading in ("age", "size"):
        table.add_column(heading, no_wrap=True, justify="right")
    for run in runs:
        name = run.path.name if run.path == folder else str(run.path.relative_to(folder))
        cells = (run.claim or "-", _age((now - run.started).total_seconds()))
        table.add_row(
            printable(name), run.state, _steps(run), _return(run), *cells, bytes_text(run.bytes)
        )
    return table


def _steps(run: FoundRun) -> str:
    if run.step is None or (run.step == 0 and run.total_steps is None):
        return "-"
    whole = run.total_steps is None or run.step == run.total_steps
    return _short(run.step) if whole else f"{_short(run.step)}/{_short(run.total_steps or 0)}"


def _return(run: FoundRun) -> str:
    """Return the evaluation's mean or, in parentheses, the training's."""
    if run.evaluation_return is not None:
        return f"{run.evaluation_return:.4g}"
    return "-" if run.episode_return is None else f"({run.episode_return:.4g})"


def _short(number: int) -> str:
    if number < _UNITS[0][0]:
        return str(number)
    for unit, letter in _UNITS:
        # Three digits of a number just below the next unit would be 1000 of this one.
        if float(text := f"{number / unit:.3g}") < 1000:
            return f"{text}{letter}"
    unit, letter = _UNITS[-1]
    return f"{number / unit:.0f}{letter}"


def _age(seconds: float) -> str:
    for unit, letter in _AGES:
        if seconds >= unit:
            return f"{seconds / unit:.0f} {letter}"
    return f"{max(seconds, 0):.0f} s"
