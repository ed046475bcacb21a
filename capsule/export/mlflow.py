"""Runs as MLflow's file store: ``OUT/EXPERIMENT/RUN`` with a file for each metric, setting and tag.

The layout is that of ``mlflow/store/tracking/file_store.py``. MLflow reads it where
``MLFLOW_ALLOW_FILE_STORE`` is true, and ``mlflow migrate-filestore`` copies it into a database.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from capsule.engine.supervise import IN_USE
from capsule.export.folders import TAKEN, new_folder, new_folders
from capsule.export.runs import ExportedRun, Point, Write, read_directory
from capsule.host.errors import CapsuleError, ExitCode
from capsule.host.outputs import append, write_output

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\- ]*(/[A-Za-z0-9_][A-Za-z0-9_.\- ]*)*")
_MAX_NAME = 250  # of a metric or a parameter (mlflow/utils/validation.py)
_MAX_VALUE = 6000  # characters of a parameter
_LOCAL = 4  # SourceType: run on the user's machine
_STATUS = {"running": 1, "finished": 3, "failed": 4}  # RunStatus; every other state is KILLED
_KILLED = 5


@contextmanager
def open_mlflow(folder: Path, directory: Path) -> Iterator[Write]:
    """Add the run of a run directory to a file store while it is executed.

    It is a run in progress until the end of the block. Then it has finished, was killed (an
    interrupted run, which a later one with the same directory continues) or has failed. It stays in
    progress if another process executes it.

    Yields:
        A function that appends a value, which readers see at once.

    Raises:
        CapsuleError: CAP-P202, the run directory is malformed; CAP-P204, it has metrics whose names
            MLflow does not allow, as the function raises it, too.
        OSError: A file cannot be written.
    """
    run = read_directory(directory)
    experiment = _experiment(folder, run)
    _make_experiment(experiment, run)
    place = experiment / run.id
    # A resumed run continues in the folder of its first start, whose metrics stay.
    if not place.exists():
        with new_folder(place) as unfinished:
            _write_run(run, unfinished, experiment)
    _write_facts(place, _facts(run, experiment, _STATUS["running"], None))
    status: int | None = _STATUS["failed"]
    try:
        yield partial(_append_value, place)
        status = _STATUS["finished"]
    except BaseException as error:
        status = _status_after(error)
        raise
    finally:
        if status is not None:
            _write_facts(place, _facts(run, experiment, status, time.time()))


def _append_value(place: Path, name: str, point: Point) -> None:
    _check_name(name)
    path = place / "metrics" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    append(path, _line(point, None).encode())


def _status_after(error: BaseException) -> int | None:
    """Return how a run ended with an error; None if another process still executes it."""
    if isinstance(error, KeyboardInterrupt):
        return _KILLED
    if not isinstance(error, CapsuleError):
        return _STATUS["failed"]
    if error.code == IN_USE:
        return None
    return _KILLED if error.exit_code == ExitCode.INTERRUPTED else _STATUS["failed"]


def export_mlflow(runs: Iterable[ExportedRun], folder: Path) -> None:
    """Write runs into a new or an existing file store, an experiment for each name of a spec.

    A point without a time of its own has that of the run's start, or 0.

    Raises:
        CapsuleError: CAP-P203, a run is in the store already; CAP-P204, MLflow allows no such name
            of a metric.
        OSError: A file cannot be written.
    """
    # All folders get their names when the last one is written, so that an error leaves none.
    with new_folders(folder) as make:
        experiments: dict[Path, ExportedRun] = {}
        for run in runs:
            experiment = _experiment(folder, run)
            experiments.setdefault(experiment, run)
            _write_run(run, make(experiment / run.id), experiment)
        for experiment, run in experiments.items():
            _make_experiment(experiment, run)


def _experiment(folder: Path, run: ExportedRun) -> Path:
    """Return the folder of a run's experiment. Its name gives its number."""
    name = run.lock.spec.name
    # MLflow's default experiment has the number 0. Seven bytes stay within 64 bits.
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7]) + 1
    return folder.resolve() / str(number)


def _make_experiment(experiment: Path, run: ExportedRun) -> None:
    """Make the experiment of a run, unless there is one."""
    if experiment.exists():
        return
    made = _milliseconds(run.started)
    facts: dict[str, Any] = {
        "artifact_location": experiment.as_uri(),
        "creation_time": made,
        "experiment_id": experiment.name,
        "last_update_time": made,
        "lifecycle_stage": "active",
        "name": run.lock.spec.name,
    }
    try:
        with new_folder(experiment) as place:
            _write_facts(place, facts)
    except CapsuleError as error:
        if error.code != TAKEN:  # another process has made the same experiment meanwhile
            raise


def _write_run(run: ExportedRun, place: Path, experiment: Path) -> None:
    status = _STATUS.get(run.state, _KILLED)
    _write_facts(place, _facts(run, experiment, status, run.finished))
    # MLflow does not find a run that lacks one of them, as one without metrics would.
    for name in ("artifacts", "metrics", "params", "tags"):
        (place / name).mkdir()
    folders = {parent.as_posix() for metric in run.metrics for parent in Path(metric.name).parents}
    for metric in run.metrics:
        _check_name(metric.name)
        # A metric is a file, so MLflow's store has no place for metrics below its name.
        if metric.name in folders:
            raise _not_allowed(metric.name, ", because others are below it")
        lines = (_line(point, run.started) for point in metric.points)
        _write(place / "metrics" / metric.name, "".join(lines))
    for name, value in run.parameters.items():
        _write(place / "params" / name, value[:_MAX_VALUE])
    for name, value in {"mlflow.runName": run.name, **run.facts}.items():
        _write(place / "tags" / name, value)


def _facts(
    run: ExportedRun, experiment: Path, status: int, finished: float | None
) -> dict[str, Any]:
    """Return the content of a run's ``meta.yaml``."""
    return {
        "artifact_uri": (experiment / run.id / "artifacts").as_uri(),
        "end_time": None if finished is None else _milliseconds(finished),
        "entry_point_name": "",
        "experiment_id": experiment.name,
        "lifecycle_stage": "active",
        "run_id": run.id,
        "run_name": run.name,
        "run_uuid": run.id,
        "source_name": "",
        "source_type": _LOCAL,
        "source_version": "",
        "start_time": _milliseconds(run.started),
        "status": status,
        "tags": [],
        "user_id": "",
    }


def _line(point: Point, started: float | None) -> str:
    """Return the line of a value; one without a time has that of the run's start."""
    moment = started if point.time is None else point.time
    return f"{_milliseconds(moment)} {point.value!r} {point.step}\n"


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or len(name) > _MAX_NAME:
        raise _not_allowed(name)


def _not_allowed(name: str, reason: str = "") -> CapsuleError:
    return CapsuleError(
        "CAP-P204",
        f"MLflow does not allow the name of the metric {name!a}{reason}",
        fix="Export the run to csv or tensorboard, or log the metric under another name of "
        "letters, digits, '_', '-', '.', ' ' and '/'.",
    )


def _write_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write ``meta.yaml``; the values are JSON, which is YAML."""
    lines = (f"{name}: {json.dumps(value)}\n" for name, value in facts.items())
    # Without it, MLflow would not read the run, so a full disk must not empty it.
    write_output(folder / "meta.yaml", "".join(lines).encode())


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())


def _milliseconds(seconds: float | None) -> int:
    return round(1000 * (seconds or 0))
