"""The recorded run, or a part of it, executed again.

Everything goes through :func:`capsule.execution.execute`, as ``capsule run`` does.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from capsule import execution
from capsule.bundle import run_bundle
from capsule.bundle.claims import (
    ImageClaim,
    ProgramClaims,
    TrainingClaims,
    image_relaxations,
    read_document,
)
from capsule.engine.interface import Engine
from capsule.entropy.ledger import Ledger, compare_ledgers
from capsule.entropy.report import EntropyReport
from capsule.experiment import contract
from capsule.experiment.lock import Lock
from capsule.experiment.spec import LimitsSpec
from capsule.image.assembly.assemble import Image
from capsule.verification.content.times import Span
from capsule.verification.findings import ExecutionFinding
from capsule.verification.integrity.contents import Contents
from capsule.verification.mode import Mode


@dataclass(frozen=True)
class ReexecutionPlan:
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

    @property
    def image_claim(self) -> ImageClaim | None:
        """The identity of the prepared image, as claims have it."""
        return run_bundle.image_claim(self.image)

    def execute_segment(
        self, lock: Lock, directory: Path, *, stop_after: int, schedule: Path | None
    ) -> object:
        """Execute a lock like the bundle's up to a step, and evaluate nothing."""
        return execution.execute(
            lock,
            self.engine,
            directory,
            stop_after=stop_after,
            schedule=schedule,
            segment=True,
            limits=self.limits,
            reporter=self.reporter,
        )


def reexecute(plan: ReexecutionPlan, directory: Path, recorded: Ledger) -> ExecutionFinding:
    """Execute the bundle's run again, or a prefix of it.

    Args:
        plan: What to execute, and where.
        directory: Becomes its run directory.
        recorded: Ledger of the recorded run.

    Raises:
        CapsuleError: What :func:`capsule.execution.execute` raises.
    """
    bundle, lock, claims = plan.contents.bundle, plan.contents.lock, plan.contents.claims
    follows = isinstance(claims, TrainingClaims) and claims.schedule is not None
    repeats = isinstance(claims, ProgramClaims) and claims.arrivals is not None
    started = time.time()
    result = execution.execute(
        lock,
        plan.engine,
        directory,
        stop_after=plan.mode.steps,
        replay=bundle.member(run_bundle.ENTROPY_PROFILE) if claims.entropy_profile else None,
        schedule=bundle.member(run_bundle.SCHEDULE) if follows else None,
        arrivals=bundle.member(run_bundle.ARRIVALS) if repeats else None,
        limits=plan.limits,
        reporter=plan.reporter,
    )
    ledger = read_document(directory / contract.LEDGER, Ledger)
    report = read_document(directory / contract.ENTROPY_REPORT, EntropyReport)
    here = image_relaxations(lock, plan.engine.name, report)
    return ExecutionFinding(
        span=Span(started, time.time()),
        steps=result.steps if isinstance(result, contract.Result) else None,
        ledger=ledger,
        ledger_differences=compare_ledgers(recorded, ledger),
        relaxations=tuple(sorted({*claims.relaxations, *here})),
    )
