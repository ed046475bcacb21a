"""Runs in W&B's offline form, which ``wandb sync`` uploads. W&B's own package writes it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capsule.export.runs import ExportedRun, Point, Write, read_directory
from capsule.host.errors import CapsuleError

if TYPE_CHECKING:
    from types import ModuleType


def export_wandb(runs: Iterable[ExportedRun], folder: Path) -> None:
    """Write each run as ``FOLDER/wandb/offline-run-…``.

    Nothing is sent, and this machine is not named: the runs need not be of it.

    Raises:
        CapsuleError: CAP-P205, the package ``wandb`` is not installed.
        OSError: A file cannot be written.
    """
    wandb = require_wandb()
    with _as_os_error(wandb.Error):
        for run in runs:
            opened = _init(wandb, run, folder)
            for step, values in _by_step(run):
                opened.log(values, step=step)
            opened.finish()
        wandb.teardown()  # its own process writes the files, and the end of them only now


@contextmanager
def open_wandb(folder: Path, directory: Path) -> Iterator[Write]:
    """Log the run of a run directory while it is executed, as :func:`export_wandb` writes it.

    A run that is continued has another offline run with the same id, which W&B's server joins to
    the first. After an error, W&B has the run as failed.

    Yields:
        A function that logs a value. W&B keeps the values of a step together and writes them with
        the next.

    Raises:
        CapsuleError: CAP-P205, the package ``wandb`` is not installed; CAP-P202, the run directory
            is malformed.
        OSError: A file cannot be written.
    """
    wandb = require_wandb()
    run = read_directory(directory)
    with _as_os_error(wandb.Error):
        opened = _init(wandb, run, folder)

    def write(name: str, point: Point) -> None:
        time = {} if point.time is None else {"_timestamp": point.time}
        with _as_os_error(wandb.Error):
            opened.log({name: point.value, **time}, step=point.step)

    status = 1
    try:
        yield write
        status = 0
    finally:
        with _as_os_error(wandb.Error):
            opened.finish(exit_code=status)
            wandb.teardown()


@contextmanager
def _as_os_error(kind: type[Exception]) -> Iterator[None]:
    """Raise errors of W&B as the errors of the files that it writes."""
    try:
        yield
    except kind as error:
        raise OSError(errno.EIO, str(error)) from error


def _init(wandb: ModuleType, run: ExportedRun, folder: Path) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    return wandb.init(
        mode="offline",
        dir=folder,
        project=run.lock.spec.name,
        name=run.name,
        id=run.id,
        config={**run.parameters, **run.facts},
        # By default, W&B records this machine, its Git repository and packages, and the output of
        # this process. None of these belongs to the exported run.
        settings=wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            host="unknown",
            quiet=True,
            silent=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        ),
    )


def require_wandb() -> ModuleType:
    """Return W&B's package.

    Raises:
        CapsuleError: CAP-P205, it is not installed.
    """
    # Even offline, W&B reports to its servers how it is used and which errors it had, unless these
    # are set before its import.
    os.environ |= {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}
    try:
        import wandb
    except ImportError as error:
        raise CapsuleError(
            "CAP-P205",
            "the package wandb, which writes W&B's files, is not installed",
            fix="Run: pip install 'capsule-rl[wandb]'",
        ) from error
    return wandb


def _by_step(run: ExportedRun) -> Iterable[tuple[int, dict[str, Any]]]:
    """Yield the values of each step, in ascending order, as W&B requires."""
    values = sorted(
        (point.step, metric.name, point) for metric in run.metrics for point in metric.points
    )
    for step, group in groupby(values, itemgetter(0)):
        rows = list(group)
        times = [point.time for _, _, point in rows if point.time is not None]
        time = {"_timestamp": max(times)} if times else {}
        yield step, {**{name: point.value for _, name, point in rows}, **time}
