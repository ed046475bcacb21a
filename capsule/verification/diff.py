"""``capsule diff``: two runs compared, and bisected if that is asked for."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from capsule import execution
from capsule.bundle.keys import PublicKey
from capsule.engine.interface import Engine
from capsule.engine.select import EngineChoice, open_engine
from capsule.experiment import contract
from capsule.experiment.dense import is_dense
from capsule.experiment.lock import Lock
from capsule.experiment.spec import CudaAccelerator, SourcesSpec
from capsule.experiment.trace import BEGINNING, Mark
from capsule.host.errors import CapsuleError, ExitCode
from capsule.host.outputs import open_file
from capsule.host.owner import temporary_folder
from capsule.host.reporter import Reporter
from capsule.image.cache import Cache
from capsule.image.data.places import find_data
from capsule.machine.compare import gpu_difference
from capsule.machine.fingerprint import take_fingerprint
from capsule.machine.requirements import gpu_warning
from capsule.verification.analysis.bisection import (
    Source,
    bisect,
    dense_record,
    window_of,
    window_of_dense,
)
from capsule.verification.analysis.causes import Facts, explain
from capsule.verification.analysis.divergence import compare_sides
from capsule.verification.analysis.runs import ComparedRun, open_side
from capsule.verification.execution.admission import check_gpu_host, check_unconfined
from capsule.verification.execution.challenge import begin_before
from capsule.verification.execution.remedies import for_a_verifier
from capsule.verification.integrity.data import supplied_data
from capsule.verification.integrity.layers import Name, supplied_layers
from capsule.verification.verdict import Divergence

# nullcontext keeps no state, so one instance can be entered any number of times.
NO_LAYERS: AbstractContextManager[tuple[dict[Name, Path], Path | None]] = nullcontext(({}, None))
# With these statuses a side may be executable on another machine, which then writes its dense
# record.
_NOT_HERE = (ExitCode.INCONCLUSIVE, ExitCode.BUILD_FAILED, ExitCode.NO_ENGINE)


@dataclass(frozen=True)
class DiffRequest:
    """A request to ``capsule diff``.

    Attributes:
        a: Bundle, run directory, or dense record.
        b: Likewise.
        bisect: Execute both again up to their first difference; of a dense record, only the other.
        dense: Execute a only, and write its dense record here.
        keys: Keys to trust.
        allow_untrusted: Execute bundles that none of them signed.
        engine: Where to execute.
    """

    a: Path
    b: Path
    bisect: bool
    dense: Path | None
    keys: Sequence[PublicKey]
    allow_untrusted: bool
    engine: EngineChoice


def diff(request: DiffRequest, cache: Cache, reporter: Reporter) -> Divergence:
    """Compare two runs.

    Raises:
        CapsuleError: CAP-V069, the options contradict the sides or each other; CAP-V070, a side
            cannot be executed here; CAP-V071 to CAP-V077; or a bundle is not intact (CAP-B…).
    """
    _check_options(request)
    execute = partial(_execute, request, cache, reporter)
    with ExitStack() as stack:
        scratch = stack.enter_context(temporary_folder("capsule-diff-"))
        a, b = (
            path if is_dense(path) else stack.enter_context(open_side(path, request.keys))
            for path in (request.a, request.b)
        )
        if isinstance(a, Path) or isinstance(b, Path):
            return _with_dense(a, b, execute, scratch)
        comparison = compare_sides(a, b)
        report = comparison.report()
        if request.dense is not None:
            window = window_of(report, a)
            record = dense_record(a, window, execute, scratch / "a")
            with record.open("rb") as source, open_file(request.dense) as target:
                shutil.copyfileobj(source, target)
        elif request.bisect and not comparison.equal:
            window = window_of(report, a)
            return comparison.report(bisect(a, b, window, execute, scratch))
        return report


def _check_options(request: DiffRequest) -> None:
    """Reject a request whose options would be ignored, or that would execute without being asked.

    Raises:
        CapsuleError: CAP-V069.
    """
    records = [path for path in (request.a, request.b) if is_dense(path)]
    if request.dense is not None and (request.bisect or records):
        beside = f"the dense record {records[0]}" if records else "--bisect"
        raise CapsuleError(
            "CAP-V069",
            f"--dense {request.dense} contradicts {beside}",
            fix="Give --dense with two runs, and without --bisect.",
        )
    if len(records) == 1 and not request.bisect:
        raise CapsuleError(
            "CAP-V069",
            f"{records[0]} is a dense record, and the other run must be executed to be compared "
            "with it",
            fix="Pass --bisect.",
        )


def _with_dense(a: Source, b: Source, execute: partial[Mark], scratch: Path) -> Divergence:
    """Compare a dense record with another, or with that of a run, which is executed for it."""
    dense = next(side for side in (a, b) if isinstance(side, Path))
    # bisect() raises CAP-V077 if nothing differs, so the two are never equal below.
    found = bisect(a, b, window_of_dense(dense), execute, scratch)
    names = [each.name for each in (a, b)]
    causes = explain(Facts(alignment=None, results=(), changes=(), bisection=found))
    return Divergence(a=names[0], b=names[1], equal=False, causes=causes, bisection=found)


def _execute(
    request: DiffRequest,
    cache: Cache,
    reporter: Reporter,
    side: ComparedRun,
    window: contract.DenseWindow,
    directory: Path,
) -> Mark:
    """Execute a side by its lock, with its own settings, to the end of a window.

    Returns:
        Where in its trace that began.
    """
    lock = _trusted_lock(side, request)
    try:
        recorded = side.recorded
        image = recorded is None or recorded.claims.image is not None
        check_unconfined(request.engine, image=image)
        engine = open_engine(request.engine, strange=True, progress=reporter.note)
        if recorded is not None:
            check_gpu_host(lock, engine)
        _note_gpu(side, lock, engine, reporter)
        # The base layer and the training code are those of the bundle without further conditions,
        # because they may be the difference that is looked for. So a bisection explains a
        # difference and verifies neither side.
        with supplied_layers(recorded) if recorded else NO_LAYERS as (supplied, project):
            execution.prepare(
                lock,
                engine,
                cache,
                sources=SourcesSpec(),
                supplied=supplied,
                project=project,
                reporter=reporter,
            )
            if recorded is None:
                data = find_data(lock, cache, reporter.note)
            else:
                data = supplied_data(recorded, cache, {}, reporter.note)
        mark = _go_back(side, lock, window, directory)
        reporter.note(f"executing {side.name} from step {mark.step:,} to {window.last:,}")
        execution.execute(
            lock,
            engine,
            directory,
            execution.ExecutionOptions(
                stop_after=window.last,
                replay=side.entropy,
                schedule=None if side.training is None else side.training.schedule,
                dense=window,
                segment=True,
                data=data,
            ),
            reporter=reporter,
        )
    except CapsuleError as error:
        if error.exit_code not in _NOT_HERE:
            raise for_a_verifier(error) from error.__cause__
        raise CapsuleError(
            "CAP-V070",
            f"{side.name} cannot be executed here: {error}",
            fix=f"{error.fix} Or run 'capsule diff A B --dense FILE' where it can, with this side "
            "as A, and name FILE here in its place.",
        ) from error
    return mark


def _note_gpu(side: ComparedRun, lock: Lock, engine: Engine, reporter: Reporter) -> None:
    """Say what is known of this machine's GPU because of which a side may not repeat its trace."""
    if not isinstance(lock.spec.accelerator, CudaAccelerator):
        return
    here = take_fingerprint(engine.describe())
    notes = [gpu_warning(lock.spec, here)]
    if side.fingerprint is not None:
        notes.append(gpu_difference(side.fingerprint, here, lock.spec))
    for note in filter(None, notes):
        reporter.note(f"{side.name}: {note}")


def _go_back(side: ComparedRun, lock: Lock, window: contract.DenseWindow, directory: Path) -> Mark:
    """Begin at the last checkpoint before a window, if the bundle kept that state."""
    # How much of recorded randomness was used before a state is not known.
    states = lock.spec.recording.segment_states and lock.spec.entropy.mode != "recorded"
    if side.recorded is None or side.training is None or not states:
        return BEGINNING
    return begin_before(side.recorded, window.first, directory)


def _trusted_lock(side: ComparedRun, request: DiffRequest) -> Lock:
    """Return what to execute: an untrusted program only if the user allowed it."""
    if side.lock is None:
        raise CapsuleError(
            "CAP-V079",
            f"{side.name} cannot be executed: it is a bare run directory, without its lock",
            fix="Name the folder that 'capsule run' made, or its bundle.",
        )
    bundle = None if side.recorded is None else side.recorded.bundle
    if bundle is not None and not (bundle.authentic or request.allow_untrusted):
        raise CapsuleError(
            "CAP-V078",
            f"{side.name} would be executed, but no key was given to check its signer, "
            f"{bundle.fingerprint}",
            fix="Pass --key with a key you trust, or --allow-untrusted.",
        )
    return side.lock
