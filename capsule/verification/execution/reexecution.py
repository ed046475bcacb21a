"""The part of ``capsule verify`` that executes: the run again, a part of it, or what was not run.

Everything goes through :func:`capsule.execution.execute`, as ``capsule run`` does.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capsule import execution
from capsule.bundle import run_bundle
from capsule.bundle.bundle import OpenedBundle
from capsule.bundle.claims import (
    Observations,
    ProgramClaims,
    TrainingClaims,
    collect_claims,
    collect_program_claims,
    collect_training_claims,
    image_relaxations,
    read_document,
)
from capsule.engine.interface import Engine
from capsule.entropy.ledger import Ledger, compare_ledgers
from capsule.entropy.report import EntropyReport
from capsule.experiment import contract
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.lock import Lock
from capsule.experiment.spec import LimitsSpec
from capsule.image.assembly.assemble import Image
from capsule.verification.analysis.comparison import compare_checkpoints, compare_claims
from capsule.verification.analysis.divergence import analysis
from capsule.verification.analysis.outputs import COMPONENTS, STANDARD_OUTPUT, compare_outputs
from capsule.verification.content.parts import HARMLESS
from capsule.verification.content.times import Span, Times, stated_span
from capsule.verification.equivalence.returns import compare_returns
from capsule.verification.execution.bounds import reexecution_folder
from capsule.verification.execution.challenge import Recorded, challenge, fresh_seed, judge
from capsule.verification.execution.grading import beyond_arithmetic, grade_replica, inconsistent
from capsule.verification.integrity.consistency import recorded_outputs
from capsule.verification.integrity.contents import Contents
from capsule.verification.mode import Mode
from capsule.verification.verdict import ComponentDifference, Grade, OutputComparison


@dataclass(frozen=True)
class Reexecution:
    """What is to be executed, and where.

    Attributes:
        mode: How far.
        contents: The bundle, which was checked.
        image: The prepared image; None with the plain-process engine.
        engine: Where; it was prepared.
        limits: What it may use.
        reporter: Told about each event.
    """

    mode: Mode
    contents: Contents
    image: Image | None
    engine: Engine
    limits: LimitsSpec
    reporter: execution.Reporter

    def execute(
        self,
        lock: Lock,
        directory: Path,
        *,
        stop_after: int | None,
        schedule: Path | None,
        replay: Path | None = None,
        arrivals: Path | None = None,
        segment: bool = False,
    ) -> contract.Result | contract.ProgramResult:
        """Execute a lock like the bundle's; see :func:`capsule.execution.execute`."""
        return execution.execute(
            lock,
            self.engine,
            directory,
            stop_after=stop_after,
            replay=replay,
            schedule=schedule,
            arrivals=arrivals,
            segment=segment,
            limits=self.limits,
            reporter=self.reporter,
        )


def reexecute(run: Reexecution, facts: dict[str, Any]) -> tuple[Grade, str]:
    """Execute, compare and judge.

    Args:
        run: What to do.
        facts: Of the report; what is found goes into it.
    """
    parts = run.contents
    if run.mode.challenges and isinstance(parts.claims, TrainingClaims):
        return _challenge(run, Recorded(parts.bundle, parts.lock, parts.claims), facts)
    member, claims = parts.bundle.member, parts.claims
    started = time.time()
    with reexecution_folder(run.reporter.note) as directory:
        follows = isinstance(claims, TrainingClaims) and claims.schedule is not None
        repeats = isinstance(claims, ProgramClaims) and claims.arrivals is not None
        result = run.execute(
            parts.lock,
            directory,
            stop_after=run.mode.steps,
            replay=member(run_bundle.ENTROPY_PROFILE) if claims.entropy_profile else None,
            schedule=member(run_bundle.SCHEDULE) if follows else None,
            arrivals=member(run_bundle.ARRIVALS) if repeats else None,
        )
        ledger = read_document(directory / contract.LEDGER, Ledger)
        facts["ledger"] = ledger
        facts["ledger_differences"] = compare_ledgers(facts["recorded_ledger"], ledger)
        facts["relaxations"] = _all_relaxations(run, directory)
        if isinstance(claims, ProgramClaims):
            times = Times(recorded_span(parts.bundle), Span(started, time.time()))
            _compare_program(run, claims, directory, times, facts)
            return _judge_program(claims, facts)
        if isinstance(claims, TrainingClaims) and isinstance(result, contract.Result):
            facts["reexecuted_steps"] = result.steps
            _compare_training(run, claims, directory, facts)
            if run.mode.steps is None and facts["differences"]:
                return _judge_returns(run, claims, directory, facts)
    return _judge(run.mode, facts)


def _all_relaxations(run: Reexecution, directory: Path) -> tuple[str, ...]:
    """Name the guarantees that were given up by the recorded run, or here."""
    parts = run.contents
    report = read_document(directory / contract.ENTROPY_REPORT, EntropyReport)
    here = image_relaxations(parts.lock, run.engine.name, report)
    return tuple(sorted({*parts.claims.relaxations, *here}))


def _challenge(run: Reexecution, recorded: Recorded, facts: dict[str, Any]) -> tuple[Grade, str]:
    """Have a fresh seed's prefix executed, and then segments if they are asked for."""

    def execute(lock: Lock, directory: Path, *, stop_after: int, schedule: Path | None) -> object:
        return run.execute(lock, directory, stop_after=stop_after, schedule=schedule, segment=True)

    note = run.reporter.note
    note("executing a prefix with a fresh seed, twice")
    facts["fresh_seed"] = fresh_seed(recorded, execute, note)
    if run.mode.name == "segments":
        note("executing segments of the recorded run")
        facts["challenge"] = challenge(recorded, run.mode.segments, execute, note)
        segments = facts["challenge"].segments
        facts["reexecuted_steps"] = sum(each.ends - each.begins for each in segments)
        different = next((each for each in segments if not each.equal), None)
        if different is not None:
            facts["first_difference"] = different.first_difference
            facts["differences"] = different.differences
    return judge(facts.get("challenge"), facts["fresh_seed"])


def _compare_program(
    run: Reexecution, claims: ProgramClaims, directory: Path, times: Times, facts: dict[str, Any]
) -> None:
    """Compare what a program of the user's own wrote and printed."""
    bundle, lock = run.contents.bundle, run.contents.lock
    image = run_bundle.image_claim(run.image)
    found = collect_program_claims(lock, image, run.engine.name, directory)
    recorded = recorded_outputs(bundle, claims)
    if claims.standard_output is not None:
        recorded[STANDARD_OUTPUT] = bundle.member(run_bundle.STANDARD_OUTPUT)
    outputs = compare_outputs(claims, found, recorded, directory, times)
    facts["outputs"] = outputs
    facts["first_difference"] = None if outputs is None else outputs.files[0]
    facts["differences"] = compare_claims(claims, found)
    facts |= analysis(bundle, lock, run.engine, directory, facts["differences"], outputs)


def recorded_span(bundle: OpenedBundle) -> Span:
    """Return the time of the recorded run, as its signer says it."""
    observed = bundle.read(run_bundle.OBSERVATIONS, Observations)
    return stated_span(observed.started, observed.finished, time.time())


def _compare_training(
    run: Reexecution, claims: TrainingClaims, directory: Path, facts: dict[str, Any]
) -> None:
    """Compare a trainer's run with the claims, or a prefix with those up to its end."""
    bundle, lock = run.contents.bundle, run.contents.lock
    differences: tuple[ComponentDifference, ...]
    if run.mode.steps is None:
        image = run_bundle.image_claim(run.image)
        found = collect_claims(lock, image, run.engine.name, directory)
        differences = compare_claims(claims, found)
    else:
        index = contract.CheckpointIndex(checkpoints=())
        if (directory / contract.CHECKPOINT_INDEX).exists():  # a short prefix has none
            index = read_document(directory / contract.CHECKPOINT_INDEX, contract.CheckpointIndex)
        differences = compare_checkpoints(claims.checkpoints, index, run.mode.steps)
    facts["differences"] = differences
    facts |= analysis(bundle, lock, run.engine, directory, differences)


def _judge_returns(
    run: Reexecution, claims: TrainingClaims, directory: Path, facts: dict[str, Any]
) -> tuple[Grade, str]:
    """Judge a whole training that gave other bits, by the returns of its final network."""
    lock, image = run.contents.lock, run_bundle.image_claim(run.image)
    replica = collect_training_claims(lock, image, run.engine.name, directory)
    _, difference = _judge(run.mode, facts)
    facts["statistics"] = compare_returns(
        lock.spec, claims.claim_id(), claims.evaluation, replica.evaluation
    )
    return grade_replica(
        difference,
        facts["expected_grade"],
        lock.spec.evaluation.tolerance,
        inconsistent(facts["first_difference"], facts["divergence"])
        or beyond_arithmetic(claims, replica),
        facts["statistics"],
    )


def _judge_program(claims: ProgramClaims, facts: dict[str, Any]) -> tuple[Grade, str]:
    """Judge a program's re-execution by its outputs.

    Raises:
        CapsuleError: CAP-V048, nothing is claimed and nothing came out, which decides nothing.
    """
    outputs: OutputComparison | None = facts["outputs"]
    differences = facts["differences"]
    # Differences of outputs count by their nature only if a comparison accounts for them.
    explained = () if outputs is None else COMPONENTS
    others = [each for each in differences if not each.component.startswith(explained)]
    if outputs is not None and (others or outputs.nature not in HARMLESS):
        first = outputs.files[0]
        where = "" if first.where is None else f", at {first.where}"
        return "not-reproduced", f"the outputs first differ in {first.path}{where}"
    if others:
        return "not-reproduced", f"the outputs are equal, but {others[0].component} differs"
    if outputs is not None:
        return "reproduced-content", _same_content(outputs)
    if claims.nothing:
        raise nothing_claimed()
    return "reproduced-bitwise", "every claim was obtained again, bit for bit"


def _same_content(outputs: OutputComparison) -> str:
    what = "dates" if outputs.nature == "date" else "how the same content is written down"
    files = "1 output" if outputs.count == 1 else f"{outputs.count:,} outputs"
    return (
        f"the content of every output was obtained again, but not every bit: {files} differ only "
        f"in {what}"
    )


def nothing_claimed() -> CapsuleError:
    """Return the error of a program's run that claims nothing."""
    return CapsuleError(
        "CAP-V048",
        "NOTHING IS CLAIMED: the program left no file and printed nothing, so there is nothing "
        "that could be reproduced",
        fix="Have the program write its results into its working folder, or print them.",
        exit_code=ExitCode.INCONCLUSIVE,
    )


def _judge(mode: Mode, facts: dict[str, Any]) -> tuple[Grade, str]:
    first, differences = facts["first_difference"], facts["differences"]
    if first is not None:
        where = f" ({first.name})" if first.name else ""
        return (
            "not-reproduced",
            f"the runs first differ at step {first.step}, in {first.component}{where}",
        )
    if differences:
        return "not-reproduced", f"the traces are equal, but {differences[0].component} differs"
    if mode.steps is not None:
        return (
            "reproduced-prefix",
            (
                f"the first {facts['reexecuted_steps']:,} steps are the same, bit for bit; "
                "the rest was not re-executed"
            ),
        )
    return "reproduced-bitwise", "every claim was obtained again, bit for bit"
