"""Runs as MLflow's file store: ``OUT/EXPERIMENT/RUN`` with a file for each metric, setting and tag.

The layout is that of ``mlflow/store/tracking/file_store.py``. MLflow reads it where
``MLFLOW_ALLOW_FILE_STORE`` is true, and ``mlflow migrate-filestore`` copies it into a database.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from capsule.export.folders import new_folder
from capsule.export.runs import ExportedRun, Metric
from capsule.host.errors import CapsuleError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\- ]*(/[A-Za-z0-9_][A-Za-z0-9_.\- ]*)*")
_MAX_NAME = 250  # of a metric or a parameter (mlflow/utils/validation.py)
_MAX_VALUE = 6000  # characters of a parameter
_LOCAL = 4  # SourceType: run on the user's machine
_STATUS = {"running": 1, "finished": 3, "failed": 4}  # RunStatus; every other state is KILLED
_KILLED = 5


def export_mlflow(runs: Iterable[ExportedRun], folder: Path) -> None:
    """Write runs into a new or an existing file store, an experiment for each name of a spec.

    A point without a time of its own has that of the run's start, or 0.

    Raises:
        CapsuleError: CAP-P203, a run is in the store already; CAP-P204, MLflow allows no such name
            of a metric.
        OSError: A file cannot be written.
    """
    for run in runs:
        experiment = _experiment(folder.resolve(), run)
        _check_names(run.metrics)
        with new_folder(experiment / run.id) as place:
            _write_run(run, place, experiment)


def _experiment(folder: Path, run: ExportedRun) -> Path:
    """Make the folder of a run's experiment, if it is missing. Its name gives its number."""
    name = run.lock.spec.name
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7]) + 1
    experiment = folder / str(number)
    if not experiment.exists():
        made = _milliseconds(run.started)
        facts: dict[str, Any] = {
            "artifact_location": experiment.as_uri(),
            "creation_time": made,
            "experiment_id": experiment.name,
            "last_update_time": made,
            "lifecycle_stage": "active",
            "name": name,
        }
        with new_folder(experiment) as place:
            _write_facts(place, facts)
    return experiment


def _write_run(run: ExportedRun, place: Path, experiment: Path) -> None:
    facts: dict[str, Any] = {
        "artifact_uri": (experiment / run.id / "artifacts").as_uri(),
        "end_time": None if run.finished is None else _milliseconds(run.finished),
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
        "status": _STATUS.get(run.state, _KILLED),
        "tags": [],
        "user_id": "",
    }
    _write_facts(place, facts)
    (place / "artifacts").mkdir()
    for metric in run.metrics:
        lines = (
            f"{_milliseconds(run.started if each.time is None else each.time)} "
            f"{each.value!r} {each.step}\n"
            for each in metric.points
        )
        _write(place / "metrics" / metric.name, "".join(lines))
    for name, value in run.parameters.items():
        _write(place / "params" / name, value[:_MAX_VALUE])
    for name, value in {"mlflow.runName": run.name, **run.facts}.items():
        _write(place / "tags" / name, value)


def _check_names(metrics: Iterable[Metric]) -> None:
    for metric in metrics:
        if not _NAME.fullmatch(metric.name) or len(metric.name) > _MAX_NAME:
            raise CapsuleError(
                "CAP-P204",
                f"MLflow does not allow the name of the metric {metric.name!a}",
                fix="Export the run to csv or tensorboard, or log the metric under a name of "
                "letters, digits, '_', '-', '.', ' ' and '/'.",
            )


def _write_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write ``meta.yaml``; the values are JSON, which is YAML."""
    _write(
        folder / "meta.yaml",
        "".join(f"{name}: {json.dumps(value)}\n" for name, value in facts.items()),
    )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())


def _milliseconds(seconds: float | None) -> int:
    return round(1000 * (seconds or 0))
