"""The recorded run, or a part of it, executed again.

Everything goes through :func:`capsule.execution.execute`, as ``capsule run`` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from capsule import execution
from capsule.bundle import run_bundle
from capsule.bundle.claims import (
    ProgramClaims,
    TrainingClaims,
    image_relaxations,
    read_document,
)
from capsule.bundle.run_bundle import RecordedRun
from capsule.engine.interface import Engine
from capsule.entropy.ledger import Ledger, compare_ledgers
from capsule.entropy.report import EntropyReport
from capsule.execution import ExecutionOptions, SeenSurroundings
from capsule.experiment import contract
from capsule.experiment.lock import Lock
from capsule.experiment.mechanisms import Mechanisms
from capsule.experiment.spec import LimitsSpec, calendar_clock
from capsule.host.errors import IMAGE_CODES, CapsuleError, ExitCode
from capsule.host.owner import temporary_folder
from capsule.host.reporter import Reporter
from capsule.image.data.places import FoundData
from capsule.verification.content.times import Span
from capsule.verification.execution.remedies import for_a_verifier
from capsule.verification.findings import ExecutionFinding
from capsule.verification.variation import CONTROL, Variation
from capsule.verification.verdict import RunSurroundings

# Codes of what a run leaves, among them all that it may name in failure.json. By then, the bundle's
# own files have been read without these errors.
_OF_A_RUN = ("CAP-R", "CAP-V011", "CAP-V071", "CAP-V072", "CAP-V073", *IMAGE_CODES)
_BLAMING = (ExitCode.TAMPERED, ExitCode.USAGE)  # the bundle, or the user


@dataclass(frozen=True)
class Reexecutor:
    """An engine that was prepared for a lock, and what an execution may use and reads."""

    engine: Engine
    limits: LimitsSpec
    data: Mapping[str, FoundData]
    reporter: Reporter

    def whole(
        self,
        run: RecordedRun,
        steps: int | None,
        directory: Path,
        variation: Variation | None = None,
    ) -> ExecutionFinding:
        """Execute a recorded run again, or a prefix of it.

        Args:
            run: The recorded run.
            steps: The length of the prefix; None: the whole run.
            directory: Becomes the run directory.
            variation: What is changed around it; None: nothing, and its surroundings are not read
                back.

        Raises:
            CapsuleError: What :func:`capsule.execution.execute` and :func:`capsule.execution.look`
                raise.
        """
        bundle, claims, change = run.bundle, run.claims, variation or CONTROL
        lock, surroundings = change.lock(run.lock), change.surroundings(run.lock)
        seen = None
        if variation is not None:
            # This folder is beside the run directory, in the closed folder of reexecution_folder().
            place = directory.with_name("look")
            seen = execution.look(lock, self.engine, place, self.limits, surroundings)
        follows = isinstance(claims, TrainingClaims) and claims.schedule is not None
        repeats = isinstance(claims, ProgramClaims) and claims.arrivals is not None
        # The time is taken from this machine's clock and not from the run: numbers in outputs are
        # dates if they lie in this span (content/times.py).
        started = time.time()
        result = execution.execute(
            lock,
            self.engine,
            directory,
            ExecutionOptions(
                stop_after=steps,
                replay=bundle.member(run_bundle.ENTROPY_PROFILE)
                if claims.entropy_profile
                else None,
                schedule=bundle.member(run_bundle.SCHEDULE) if follows else None,
                arrivals=bundle.member(run_bundle.ARRIVALS) if repeats else None,
                learners=change.learners,
                replicas=change.replicas,
                limits=self.limits,
                surroundings=surroundings,
                data=self.data,
            ),
            reporter=self.reporter,
        )
        ledger = read_document(directory / contract.LEDGER, Ledger)
        report = read_document(directory / contract.ENTROPY_REPORT, EntropyReport)
        mechanisms = read_document(directory / contract.MECHANISMS, Mechanisms)
        here = image_relaxations(lock, self.engine.name, report, mechanisms)
        return ExecutionFinding(
            span=Span(started, time.time()).with_clock(calendar_clock(lock.spec)),
            reexecuted_steps=result.steps if isinstance(result, contract.Result) else None,
            ledger=ledger,
            ledger_differences=compare_ledgers(bundle.read(run_bundle.LEDGER, Ledger), ledger),
            relaxations=tuple(sorted({*claims.relaxations, *here})),
            compilers=mechanisms.compilers,
            surroundings=None if seen is None else _read_back(directory, seen),
            varied=change.flags,
        )

    def segment(
        self, lock: Lock, directory: Path, *, stop_after: int, schedule: Path | None
    ) -> None:
        """Execute a lock like the bundle's up to a step, and evaluate nothing."""
        execution.execute(
            lock,
            self.engine,
            directory,
            ExecutionOptions(
                stop_after=stop_after,
                schedule=schedule,
                segment=True,
                limits=self.limits,
                data=self.data,
            ),
            reporter=self.reporter,
        )


def _read_back(directory: Path, seen: SeenSurroundings) -> RunSurroundings:
    """Complete what a program saw by what the run itself read back."""
    flags = read_document(directory / contract.RUNTIME, contract.Runtime).flags
    interpreters = read_document(directory / contract.MECHANISMS, Mechanisms).interpreters
    unset = flags.get("environment.OMP_NUM_THREADS", "unset")
    return RunSurroundings(
        **seen.model_dump(),
        threads=flags.get("torch.num_threads", unset),
        processes=None if interpreters is None else interpreters.started,
    )


@contextmanager
def reexecution_folder(note: Callable[[str], None]) -> Iterator[Path]:
    """Give a place for the run directory of a re-execution; it is removed at the end.

    What a re-execution leaves may be malformed in ways that would convict a bundle, or be reported
    as a wrong use of Capsule. This is another program's doing, on this machine: it decides nothing.

    Args:
        note: Called with a message if it cannot be removed.

    Raises:
        CapsuleError: CAP-V049 in the place of such an error; any other one with the remedy that a
            verifier has.
    """
    # A task may open its folder to all on this machine, and leave a setuid program in it for them;
    # the folder around it is closed.
    try:
        with temporary_folder("capsule-verify-", note=note) as closed:
            yield closed / "run"
    except CapsuleError as error:
        known = for_a_verifier(error)
        if error.exit_code in _BLAMING and error.code.startswith(_OF_A_RUN):
            raise CapsuleError(
                "CAP-V049", f"of the re-execution: {error}", fix=known.fix
            ) from error
        raise known from error.__cause__
