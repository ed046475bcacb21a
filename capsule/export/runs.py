"""What is exported of a run: its metrics over the steps, its evaluations and its identity."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from capsule.bundle import run_bundle
from capsule.bundle.bundle import OpenedBundle, open_bundle
from capsule.bundle.claims import ProgramClaims, TrainingClaims
from capsule.bundle.events import sound_events
from capsule.bundle.run_bundle import RecordedRun
from capsule.bundle.trust import TrustPolicy
from capsule.experiment import contract
from capsule.experiment.beneath import UnboundedError, open_beneath
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.lock import Lock
from capsule.experiment.trainers import CommandTrainer
from capsule.host.encoding import is_utf8
from capsule.host.errors import CapsuleError
from capsule.host.run_directory import LOCK, MEMBERS, WORK, run_directories
from capsule.host.validation import first_reason
from capsule.image.lockfile import read_lock
from capsule.report.runs import RunState, evaluated, read_run, workspace_lines
from capsule.report.scores import by_task
from capsule.report.subject import (
    MAX_STEP,
    METRICS,
    JsonLines,
    NetworkReturns,
    claimed_evaluation,
    recorded_lines,
)
from capsule.report.text import printable
from capsule.study.study_bundle import open_study
from capsule.verification.integrity.consistency import check_consistency

EVENT_METRICS = ("episode_return", "loss", "exploration", "episodes", "steps_per_second")
TRAINING = "training/"
EVALUATION = "evaluation/"
MAX_TIME = 1 << 33  # seconds since the epoch, in the year 2242; MLflow counts milliseconds
NON_FINITE = ("nan", "inf", "-inf")  # as the recorder of a program writes them
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")  # in the name of a folder
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class Point(NamedTuple):
    """One value of a metric. The time is in seconds since the epoch; None if none was recorded."""

    step: int
    value: float
    time: float | None


Write = Callable[[str, Point], None]  # a value of a metric, by its name


@dataclass(frozen=True)
class Metric:
    """A quantity over the steps of a run, in ascending order of steps."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class ExportedRun:
    """A run as other tools see it.

    Attributes:
        name: Name of the run among those that are exported together.
        lock: What was run.
        claims: What a bundle claims of it; None for a run directory.
        state: How the run stands.
        started: When, in seconds since the epoch; None if that is not stated.
        finished: Likewise.
        logged: Metrics that the run logged while it ran.
        evaluations: Returns of the evaluated networks, by the beginning of the metrics' names: a
            run in several games has one for each.
    """

    name: str
    lock: Lock
    claims: TrainingClaims | ProgramClaims | None
    state: RunState
    started: float | None
    finished: float | None
    logged: tuple[Metric, ...]
    evaluations: Mapping[str, Sequence[NetworkReturns]]

    @property
    def id(self) -> str:
        """32 hexadecimal digits that follow from what was run, its claims and the name."""
        claimed = "" if self.claims is None else self.claims.claim_id()
        return sha256_hex(f"{self.lock.digest()} {claimed} {self.name}".encode())[:32]

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """What was logged, and mean, lowest and highest return of each evaluation."""
        summaries: Mapping[str, Callable[[NetworkReturns], float]] = {
            "mean_return": lambda point: point.mean,
            "min_return": lambda point: min(point.returns),
            "max_return": lambda point: max(point.returns),
        }
        return self.logged + tuple(
            Metric(prefix + name, tuple(Point(each.step, of(each), None) for each in evaluated))
            for prefix, points in self.evaluations.items()
            if (evaluated := [each for each in points if _has_place(each)])
            for name, of in summaries.items()
        )

    @property
    def facts(self) -> dict[str, str]:
        """What identifies the run: by these names in every format."""
        facts = {"capsule.experiment": self.lock.spec.name, "capsule.lock": self.lock.digest()}
        if self.claims is not None:
            facts["capsule.claim_id"] = self.claims.claim_id()
            if self.claims.image is not None:
                facts["capsule.image"] = self.claims.image.config
        return facts

    @property
    def parameters(self) -> dict[str, str]:
        """Every setting of the spec, by its dotted name."""
        return dict(_flat(self.lock.spec.model_dump(mode="json", by_alias=True), ""))


def _has_place(point: NetworkReturns) -> bool:
    return bool(point.returns) and 0 <= point.step <= MAX_STEP


def _by_game(lock: Lock, points: Sequence[NetworkReturns]) -> dict[str, Sequence[NetworkReturns]]:
    """Part evaluations by game, as :attr:`ExportedRun.evaluations`; they take turns in a claim."""
    games = list(by_task(lock, points))
    if len(games) == 1:
        return {EVALUATION: points}
    return {f"{EVALUATION}{task.name}/": found for task, found in games}


def _flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield the leaves of a document; a mapping with unusual keys is a leaf, as JSON."""
    # In MLflow's store, the name of a setting becomes the name of a file.
    if isinstance(value, dict) and value and all(map(_PLAIN_KEY.fullmatch, value)):
        for key, each in value.items():
            yield from _flat(each, f"{name}.{key}" if name else key)
    else:
        yield name, value if isinstance(value, str) else json.dumps(value)


def read_runs(path: Path, policy: TrustPolicy) -> tuple[ExportedRun, ...]:
    """Read the run of a bundle, every member of a study's bundle, or the runs in a folder.

    Raises:
        CapsuleError: CAP-P201, it is a folder without runs, or a spec; CAP-P202, a file of a run
            directory is malformed; CAP-B…, CAP-V…, CAP-Y…, a bundle is not intact and consistent.
    """
    directories = sorted(run_directories(path)) if path.is_dir() else []
    if directories:
        return _named_apart(
            [(each.relative_to(path), read_directory(each)) for each in directories]
        )
    if path.is_dir() or path.suffix in (".yaml", ".yml", ".json"):
        raise CapsuleError(
            "CAP-P201",
            f"{path} is neither a bundle nor a folder with a run",
            fix="Name the bundle of a run or of a study, a folder that 'capsule run' made, or one "
            "with several of them.",
        )
    with open_bundle(path, policy, kind=None) as opened:
        if opened.manifest.kind == "run":
            return (_of_bundle(opened),)
    return tuple(_of_study(path, policy))


def _of_bundle(bundle: OpenedBundle) -> ExportedRun:
    run = RecordedRun.read(bundle)
    check_consistency(run)
    lock, claims, observed = run.lock, run.claims, run.observations()
    if isinstance(claims, TrainingClaims):
        events = bundle.member(run_bundle.RUN + contract.EVENTS)
        logged = _logged(lambda: events.open("rb"))
    else:
        logged = _recorded(recorded_lines(bundle, claims, METRICS))
    evaluations = _by_game(lock, claimed_evaluation(bundle, claims))
    return ExportedRun(
        name=f"{lock.spec.name}-{claims.claim_id()[:8]}",
        lock=lock,
        claims=claims,
        state="finished",
        started=_seconds(observed.started),
        finished=_seconds(observed.finished),
        logged=logged,
        evaluations=evaluations,
    )


def _seconds(text: str) -> float | None:
    """Return a time that a signer states, in seconds since the epoch; None if it is no time."""
    try:
        return sound_time(datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError):
        return None


def sound_time(time: float) -> float | None:
    """Return a time that an untrusted file states, or None if other tools have no place for it."""
    return time if 0 <= time <= MAX_TIME else None


def _of_study(path: Path, policy: TrustPolicy) -> Iterator[ExportedRun]:
    """Yield the members of a study. Its bundle has their claims, and not what they logged."""
    with open_study(path, policy) as (_, bundle):
        study = bundle.results.lock
        for planned, member in zip(study.members, bundle.results.members, strict=True):
            # A program's scores in several tasks are evaluations of different things.
            several = len(member.tasks) > 1
            for task, points in member.tasks:
                name = member.identity.name
                yield ExportedRun(
                    name=f"{name}.{_UNSAFE.sub('-', task.name)}" if several else name,
                    lock=study.lock_of(planned),
                    claims=member.claims,
                    state="finished",
                    started=None,
                    finished=None,
                    logged=(),
                    evaluations={EVALUATION: points},
                )


def _named_apart(runs: Sequence[tuple[Path, ExportedRun]]) -> tuple[ExportedRun, ...]:
    """Return runs at their places in one folder. Members of two studies may have equal names."""
    counts = Counter(run.name for _, run in runs)
    return tuple(
        run
        if counts[run.name] == 1
        else replace(run, name=printable(".".join(part for part in place.parts if part != MEMBERS)))
        for place, run in runs
    )


def read_directory(path: Path) -> ExportedRun:
    """Read the run of a run directory, whether it has ended or not.

    Raises:
        CapsuleError: CAP-P202, a file of it is malformed.
    """
    found, lock, work = read_run(path), read_lock(path / LOCK), path / WORK
    try:
        if isinstance(lock.spec.trainer, CommandTrainer):
            logged = _recorded(workspace_lines(work, METRICS))
        else:
            logged = _logged(partial(open_beneath, work, contract.EVENTS))
        evaluations = _by_game(lock, evaluated(lock, work))
    except (OSError, ValueError, UnboundedError) as error:
        raise CapsuleError(
            "CAP-P202",
            f"{path} cannot be read: {first_reason(error)}",
            fix="Export the bundle of the run, or run it again.",
        ) from error
    return ExportedRun(
        name=printable(path.resolve().name),  # which need not be UTF-8
        lock=lock,
        claims=None,
        state=found.state,
        started=found.started.timestamp(),
        finished=None,
        logged=logged,
        evaluations=evaluations,
    )


def _logged(open_file: Callable[[], BinaryIO]) -> tuple[Metric, ...]:
    """Gather the metrics of a training's events."""
    values: dict[str, dict[int, Point]] = {name: {} for name in EVENT_METRICS}
    try:
        with open_file() as stream:
            for line in sound_events(stream):
                event = contract.Event.model_validate_json(line)
                for name, value in event_values(event).items():
                    values[name][event.step] = Point(event.step, value, sound_time(event.time))
    except FileNotFoundError:  # the run has not begun
        return ()
    return _metrics(values)


def event_values(event: contract.Event) -> dict[str, float]:
    """Return the metrics that an event reports; none of a step that cannot be."""
    if not 0 <= event.step <= MAX_STEP:
        return {}
    numbers = {name: _number(getattr(event, name)) for name in EVENT_METRICS}
    return {name: value for name, value in numbers.items() if value is not None}


def _recorded(lines: JsonLines) -> tuple[Metric, ...]:
    """Gather the metrics that the recorder of a program wrote."""
    values: dict[str, dict[int, Point]] = {}
    for line in lines.bounded():
        for name, value in line_values(line).items():
            values.setdefault(name, {})[line["step"]] = Point(line["step"], value, None)
    return _metrics(values)


def line_values(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics in a line of a program's recorder."""
    named = {name: value for name, value in line.items() if name != "step" and is_utf8(name)}
    numbers = {name: _number(value) for name, value in named.items()}
    return {name: value for name, value in sorted(numbers.items()) if value is not None}


def _number(value: Any) -> float | None:
    # To Python, true and false are integers.
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer of 400 digits
            return float(value)
    return float(value) if value in NON_FINITE else None


def _metrics(values: Mapping[str, Mapping[int, Point]]) -> tuple[Metric, ...]:
    """Order metrics by name, and points by step. The last point of a step counts."""
    return tuple(
        Metric(TRAINING + name, tuple(points[step] for step in sorted(points)))
        for name, points in sorted(values.items())
        if points
    )
