"""Run an experiment twice under instruments, compare, and explain."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from capsule import execution
from capsule.bundle.claims import read_document
from capsule.diagnosis.attribution import RUNS, asked_findings, line_findings, operator_findings
from capsule.diagnosis.entropy import (
    STRACE,
    entropy_findings,
    race_findings,
    read_draws,
    unreached_findings,
)
from capsule.diagnosis.findings import Finding, finding
from capsule.diagnosis.settings import UNKNOWN, given_up, tailored, unexplained
from capsule.engine.interface import RUN_DIRECTORY, ChangedEngine, Engine, Exit, Task
from capsule.entropy.report import EntropyReport
from capsule.experiment import contract
from capsule.experiment.beneath import open_beneath
from capsule.experiment.fields import Model
from capsule.experiment.lock import Lock
from capsule.experiment.spec import Spec
from capsule.experiment.trainers import (
    AlgorithmTrainer,
    CommandTrainer,
    ImpalaTrainer,
    R2d2Trainer,
)
from capsule.host.errors import CapsuleError, ExitCode
from capsule.host.reporter import Reporter
from capsule.host.streams import read_whole
from capsule.host.validation import first_reason
from capsule.image.data.places import FoundData
from capsule.training.instruments.operator_rules import STATUSES
from capsule.training.instruments.report import InstrumentReport, OperatorUse
from capsule.verification.analysis.comparison import compare_traces
from capsule.verification.analysis.outputs import compare_outputs, outputs_in
from capsule.verification.verdict import OutputComparison

VARIABLE = "CAPSULE_DIAGNOSE"
FOLDER = "instruments"  # of the run directory
STRACE_OUTPUT = "strace.txt"
MAX_REPORT_BYTES = 256 << 20
LEAST_STEPS = 256  # of a run, if the user names no number
_LEVELS = ("error", "warning", "note")


class OperatorCensus(Model):
    """The number of operators of each status that were executed, and re-executed."""

    calls: int
    repeated: int
    differing: int
    statuses: dict[str, int] = Field(description="Number of distinct operators, by status.")


class Diagnosis(Model):
    """The result of capsule diagnose."""

    schema_id: Literal["capsule/diagnosis/v1"] = Field("capsule/diagnosis/v1", alias="schema")
    name: str
    steps: int | None = Field(
        description="Agent steps of each run; null for a program, which is run to its end."
    )
    equal: bool = Field(description="Whether the two runs gave the same bits.")
    operators: OperatorCensus
    findings: tuple[Finding, ...] = Field(description="The findings, errors first.")

    @property
    def exit_code(self) -> ExitCode:
        """1 if there is a finding at the level of an error, else 0."""
        found = any(item.level == "error" for item in self.findings)
        return ExitCode.DIFFERS if found else ExitCode.OK


@dataclass(frozen=True)
class Instrumented(ChangedEngine):
    """An engine that asks the training side to watch itself.

    Attributes:
        strace: Whether to let strace write down the requests for randomness, as well.
        draws: The requests of each thread, once the run has ended well.
    """

    strace: bool = False
    draws: dict[tuple[str, str], int] = field(default_factory=dict)

    def run(self, task: Task, on_poll: Callable[[], None] = lambda: None) -> Exit:
        """Execute a task under instruments."""
        # The instruments are part of the training code, and are on where this variable is set.
        watched = replace(task, environment={**task.environment, VARIABLE: FOLDER})
        if self.strace:
            output = f"{RUN_DIRECTORY}/{STRACE_OUTPUT}"
            watched = replace(watched, arguments=(*STRACE, "-o", output, "--", *task.arguments))
        ended = self.engine.run(watched, on_poll=on_poll)
        if ended.status == 0:  # the journal is removed when the run is finished
            self.draws.update(read_draws(task.run_directory))
        return ended


def diagnose(
    lock: Lock,
    engine: Engine,
    directory: Path,
    *,
    steps: int | None,
    data: Mapping[str, FoundData] | None = None,
    reporter: Reporter,
) -> Diagnosis:
    """Run a locked experiment twice and explain every difference.

    Args:
        lock: The locked experiment; ``engine`` must have been prepared for it.
        engine: Where it runs.
        directory: Where the two run directories go; must not contain any yet.
        steps: Steps of each run; None for as few as fit the trainer, but at least
            :data:`LEAST_STEPS`. A user program is run to its end.
        data: The data sets of the lock, if it has any.
        reporter: Called with each event.

    Raises:
        CapsuleError: CAP-D001 the steps do not fit, CAP-D002 a run left no report of its
            instruments, or a run fails and no instrument tells why.
    """
    lock, prefix = _shortened(lock, steps)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    runs: list[_Run] = []
    failure: CapsuleError | None = None
    for number, name in enumerate(RUNS, 1):
        reporter.note(f"run {number} of 2, under instruments")
        # The second run is the one that is traced: tracing must not change a bit.
        strace = number == 2 and engine.name == "process" and shutil.which("strace") is not None
        runs.append(_Run(directory / name, Instrumented(engine, strace=strace)))
        try:
            _execute(lock, runs, prefix, data, reporter)
        except CapsuleError as error:
            # A run that failed may have been stopped by an operator without a deterministic
            # implementation, and the second one is ended where it does not repeat the first one.
            # Any other error is of this machine or of the request.
            departs = number == 2 and error.exit_code == ExitCode.DIFFERS
            if not departs and error.exit_code != ExitCode.TRAINING_FAILED:
                raise
            failure = error
            break
    return _explain(lock, runs, failure, prefix)


@dataclass(frozen=True)
class _Run:
    directory: Path
    engine: Instrumented

    def reports(self) -> list[InstrumentReport]:
        return read_reports(self.directory) if (self.directory / FOLDER).exists() else []


def _execute(
    lock: Lock,
    runs: list[_Run],
    prefix: int | None,
    data: Mapping[str, FoundData] | None,
    reporter: Reporter,
) -> None:
    """Execute the last of some runs; what the first one recorded is repeated."""

    def recorded(name: str) -> Path | None:
        path = runs[0].directory / name
        return path if len(runs) > 1 and path.exists() else None

    # Recorded randomness, arrivals and schedules are repeated, so that none of them can be what
    # makes the second run differ.
    options = execution.ExecutionOptions(
        stop_after=prefix,
        replay=recorded(contract.ENTROPY_PROFILE),
        arrivals=recorded(contract.ARRIVALS),
        schedule=recorded(contract.SCHEDULE),
        data=data or {},
    )
    execution.execute(lock, runs[-1].engine, runs[-1].directory, options, reporter=reporter)


def _explain(
    lock: Lock, runs: list[_Run], failure: CapsuleError | None, prefix: int | None
) -> Diagnosis:
    departure = failure if failure and failure.exit_code == ExitCode.DIFFERS else None
    stopped = None if departure else failure
    # A run that was ended may have left no report.
    watched = runs[:1] if departure else runs
    reports = [run.reports() for run in watched]
    everything = [report for each in reports for report in each]
    findings = operator_findings(everything, failed=stopped is not None)
    if stopped is None:
        findings += _explain_difference(lock.spec, watched, reports, departure)
    if any(report.truncated for report in everything):
        findings.append(finding("CAP-D304", "the run was not watched to its end"))
    if stopped is not None:
        findings = _explain_failure(stopped, findings)
    return Diagnosis(
        name=lock.spec.name,
        steps=prefix,
        equal=failure is None and all(item.code != "CAP-D101" for item in findings),
        operators=_census([use for report in everything for use in report.operators]),
        findings=tuple(
            tailored(item, lock.spec)
            for item in sorted(findings, key=lambda item: (_LEVELS.index(item.level), item.code))
        ),
    )


def _explain_difference(
    spec: Spec,
    watched: list[_Run],
    reports: list[list[InstrumentReport]],
    departure: CapsuleError | None,
) -> list[Finding]:
    """Return what the accounts of randomness say, and if the second run differs, in what and why.

    Args:
        spec: What was run.
        watched: The runs that ended well.
        reports: The reports of each of them.
        departure: The error that ended the second run, if it did not repeat the first one.
    """
    last = watched[-1].directory
    entropy = read_document(last / contract.ENTROPY_REPORT, EntropyReport)
    found = entropy_findings(entropy, last / STRACE_OUTPUT)
    if departure is not None:
        text = f"the second run ended with {departure.code}: {departure.message}"
        return [*found, finding("CAP-D101", text), *_candidates(spec, reports[0], entropy)]
    if differences := compare_runs(*(run.directory for run in watched)):
        found += [finding("CAP-D101", text) for text in differences]
        found += _causes(spec, watched, reports, entropy)
    return found


def _causes(
    spec: Spec, runs: list[_Run], reports: list[list[InstrumentReport]], entropy: EntropyReport
) -> list[Finding]:
    """Explain a difference: by what was seen, and failing that, by what could not be."""
    found = [
        item
        # Processes correspond by the order of their starts, and one that was killed has no report.
        for first, second in zip(*reports, strict=False)
        for item in line_findings(first, second, spec)
    ]
    races = race_findings(*(run.engine.draws for run in runs))
    if not unexplained(found):  # other amounts may follow from another cause
        return found + [item.model_copy(update={"level": "note"}) for item in races]
    if races:
        return [item for item in found if item.code != UNKNOWN] + races
    return (found + _candidates(spec, reports[0], entropy)) or _suspected_race(spec)


def _suspected_race(spec: Spec) -> list[Finding]:
    """Return the cause that remains for a program; the trace of a trainer shows its schedule."""
    if not isinstance(spec.trainer, CommandTrainer):
        return []
    message = (
        "no cause of the difference was observed. Races of threads or processes for shared state, "
        "such as a model that several of them update, cannot be observed."
    )
    return [finding("CAP-D111", message, level="warning")]


def _candidates(
    spec: Spec, reports: list[InstrumentReport], entropy: EntropyReport
) -> list[Finding]:
    """Return possible causes of which no effect on a result was seen."""
    asked = asked_findings(reports, spec, numbers_pinned=entropy.numbers_pinned)
    return [*asked, *given_up(spec), *unreached_findings(entropy)]


def _explain_failure(failure: CapsuleError, findings: list[Finding]) -> list[Finding]:
    """A run that stopped at an operator without deterministic implementation is a finding."""
    stopped = [item for item in findings if item.code == "CAP-D203"]
    if not stopped:
        raise failure
    return [
        item.model_copy(update={"level": "error"}) if item in stopped else item
        for item in findings
    ]  # fmt: skip


def compare_runs(first: Path, second: Path) -> list[str]:
    """Name what differs in the results of two run directories, causes before effects."""
    differences = []
    # Trainers leave a trace, and programs outputs.
    if (first / contract.TRACE).exists():
        found = compare_traces(first / contract.TRACE, second / contract.TRACE)
        if found is not None:
            inside = f", {found.name}" if found.name else ""
            part = f"the traces diverge at step {found.step}, in {found.component}{inside}"
            differences.append(part)
    if (first / contract.OUTPUTS).exists():
        outputs = compare_outputs(outputs_in(first), outputs_in(second))
        differences += _differing(outputs) if outputs is not None else ()
    return differences


def _differing(outputs: OutputComparison) -> Iterator[str]:
    """Describe each output that differs, with its first part that differs."""
    for file in outputs.files:
        where = f" in {file.where}" if file.where else ""
        yield f"{file.name} differs{where}: {file.claimed} / {file.found}"
    if more := outputs.beyond(len(outputs.files)):
        yield more


def read_reports(run_directory: Path) -> list[InstrumentReport]:
    """Read the reports of a run's processes, in the order in which they started.

    A process that was killed leaves none.

    Raises:
        CapsuleError: CAP-D002, there is none at all, or one is malformed.
    """
    reports = []
    for path in sorted((run_directory / FOLDER).glob("*.json")):
        try:
            # The program can put a link in the place of the folder, too.
            with open_beneath(run_directory, f"{FOLDER}/{path.name}") as stream:
                data = read_whole(stream, MAX_REPORT_BYTES)
            # A report is reserved, empty, when its process starts.
            if data:
                reports.append(InstrumentReport.model_validate_json(data))
        except (OSError, ValidationError) as error:
            raise _unreadable(f"{path.name}: {first_reason(error)}") from error
    if not reports:
        raise _unreadable("none was written")
    return reports


def _unreadable(what: str) -> CapsuleError:
    return CapsuleError(
        "CAP-D002",
        f"the report of the run's instruments cannot be used: {what}",
        fix="See output.log in the run directory. A program that ends with os._exit has no report.",
    )


def _shortened(lock: Lock, steps: int | None) -> tuple[Lock, int | None]:
    """Make learning start half way through the steps, and every trace record complete.

    Returns:
        The lock to execute and the step to stop at; a program's own stays as it is.
    """
    spec, trainer = lock.spec, lock.spec.trainer
    if isinstance(trainer, CommandTrainer):
        return lock, None
    # The first half must end with a whole number of intervals, and hold enough to learn from.
    unit = trainer.interval_steps
    least, total = 2 * _multiple(_steps_to_learn_from(trainer), unit), trainer.total_steps
    if steps is None:
        steps = max(least, _multiple(LEAST_STEPS, 2 * unit))
    elif not least <= steps <= total or steps % (2 * unit):
        fitting = max(least, min(steps, total) // (2 * unit) * 2 * unit)
        raise CapsuleError(
            "CAP-D001",
            f"--steps {steps} is not a multiple of {2 * unit} between {least} and "
            f"trainer.total_steps, which is {total}",
            fix=f"Use, for example, --steps {fitting}, or remove --steps."
            if fitting <= total
            else "Remove --steps.",
        )
    # Every record has every tensor, so that the first difference is found where it arises.
    dense = {"trace_interval": unit, "tensor_interval": unit}
    watched = spec.model_copy(
        update={
            "trainer": _learning_soon(trainer, steps),
            "recording": spec.recording.model_copy(update=dense),
        }
    )
    # The whole run may have fewer steps than the default.
    return lock.model_copy(update={"spec": watched}), min(steps, total)


def _multiple(number: int, unit: int) -> int:
    """Return the least multiple of a unit that is not below a number."""
    return -(-number // unit) * unit


def _steps_to_learn_from(trainer: AlgorithmTrainer) -> int:
    """Return how many steps a replay memory must hold, at the least, when learning starts."""
    if isinstance(trainer, R2d2Trainer):  # a whole sequence of each actor, as the spec requires
        rows = trainer.burn_in + trainer.sequence_length + trainer.n_step
        return trainer.actors * rows
    return trainer.batch_size


def _learning_soon(trainer: AlgorithmTrainer, steps: int) -> AlgorithmTrainer:
    """Return a trainer that learns from the first half of some steps on."""
    if isinstance(trainer, ImpalaTrainer):
        return trainer  # learns from the first step on
    # The replay memory must hold the steps before the start, as the spec requires, and the target
    # network is then updated at least once.
    start = min(trainer.replay_start, steps // 2)
    return trainer.model_copy(
        update={
            "replay_start": start,
            "replay_capacity": min(trainer.replay_capacity, max(start, steps)),
            "target_interval": min(trainer.target_interval, steps // 2),
        }
    )


def _census(uses: list[OperatorUse]) -> OperatorCensus:
    return OperatorCensus(
        calls=sum(use.calls for use in uses),
        repeated=sum(use.repeated for use in uses),
        differing=sum(use.differing for use in uses),
        statuses={
            status: len({use.operator for use in uses if use.status == status})
            for status in STATUSES
        },
    )
