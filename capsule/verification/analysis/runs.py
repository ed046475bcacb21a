"""The two sides of a comparison: a finished run, read from its bundle or its run directory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from capsule.bundle import run_bundle
from capsule.bundle.bundle import open_bundle
from capsule.bundle.claims import open_run_file, read_document
from capsule.bundle.events import event_lines
from capsule.bundle.keys import PublicKey
from capsule.bundle.run_bundle import RecordedRun
from capsule.entropy.evidence import is_own
from capsule.entropy.report import EntropyReport
from capsule.experiment import contract
from capsule.experiment.lock import Lock
from capsule.experiment.mechanisms import Mechanisms
from capsule.experiment.spec import Spec
from capsule.experiment.trace import trace_heads
from capsule.host.errors import CapsuleError, ExitCode
from capsule.host.run_directory import FINGERPRINT, LOCK, WORK
from capsule.image.lockfile import read_lock
from capsule.machine.fingerprint import Fingerprint
from capsule.verification.analysis.outputs import ProgramOutputs, bundled_outputs, outputs_in
from capsule.verification.integrity.consistency import check_consistency


@dataclass(frozen=True)
class Training:
    """The files and documents of a finished run of one of Capsule's trainers.

    Attributes:
        trace: The trace.
        streams: What each random stream gave out.
        checkpoints: Every checkpoint, by digests.
        tensors: The tensors of checkpoints by their steps, as far as they were kept.
        evaluation: None of a prefix.
        schedule: The schedule log, where one was recorded.
        head: Head of the trace as the run itself states it.
    """

    trace: Path
    streams: contract.StreamProfiles
    checkpoints: tuple[contract.Checkpoint, ...]
    tensors: Mapping[int, Path]
    evaluation: contract.Evaluation | None
    schedule: Path | None
    head: str

    def results(self) -> dict[str, Any]:
        """Return the results to compare, except for the trace."""
        checkpoints = [{"step": each.step, "digest": each.digest()} for each in self.checkpoints]
        evaluation = None if self.evaluation is None else self.evaluation.model_dump(mode="json")
        streams = {each.name: each.model_dump(mode="json") for each in self.streams.streams}
        return {"streams": streams, "checkpoints": checkpoints, "evaluation": evaluation}


@dataclass(frozen=True)
class ComparedRun:
    """A finished run.

    Attributes:
        name: What reports call it.
        spec: The experiment.
        runtime: Flags and libraries, as read back.
        lock: What its pins resolved to, where that is known.
        fingerprint: The machine it ran on, where that is known.
        training: None for a user program.
        outputs: None for a trainer of Capsule's own.
        entropy: The randomness that was recorded, if it was.
        arrivals: The arrival log of a program, if it recorded one.
        compilers: Packages whose functions depend on its processor, if it imported any.
        drawn: Bytes of randomness that each process of a program asked for, by its path.
        resumed: Whether an attempt resumed the run.
        contradictions: Statements of the run that contradict each other.
        recorded: Where it is from, if that is a bundle.
    """

    name: str
    spec: Spec
    runtime: contract.Runtime
    lock: Lock | None = None
    fingerprint: Fingerprint | None = None
    training: Training | None = None
    outputs: ProgramOutputs | None = None
    entropy: Path | None = None
    arrivals: Path | None = None
    compilers: str | None = None
    drawn: Mapping[str, int] = field(default_factory=dict)
    resumed: bool = False
    contradictions: tuple[str, ...] = ()
    recorded: RecordedRun | None = None

    def results(self) -> dict[str, Any]:
        """Return the results to compare, except for the trace."""
        if self.training is not None:
            return self.training.results()
        return {} if self.outputs is None else self.outputs.listing.model_dump(mode="json")


@contextmanager
def open_side(path: Path, keys: Sequence[PublicKey]) -> Iterator[ComparedRun]:
    """Open a bundle, a folder that ``capsule run`` made, or a run directory.

    Contradictions inside of it are noted.

    Raises:
        CapsuleError: CAP-V071, it is not one of them; or the bundle is not intact (CAP-B…).
    """
    if path.is_dir():
        side = directory_side(path, path.name)
        yield replace(side, contradictions=_broken_chain(side.training))
        return
    if not path.is_file():
        raise _no_run(f"{path} is neither a file nor a folder")
    with open_bundle(path, keys) as bundle:
        run = RecordedRun.read(bundle)
        found = _inconsistency(run)
        side = bundle_side(run, path.name)
        yield replace(side, contradictions=(*found, *_broken_chain(side.training)))


def bundle_side(run: RecordedRun, name: str) -> ComparedRun:
    """Read the run of an intact bundle; reports call it ``name``."""
    bundle = run.bundle
    program = run_bundle.RUN + contract.OUTPUTS in bundle.files
    return ComparedRun(
        name=name,
        spec=run.lock.spec,
        runtime=bundle.read(run_bundle.RUN + contract.RUNTIME, contract.Runtime),
        lock=run.lock,
        fingerprint=run.observations().fingerprint,
        training=None if program else _bundled_training(run),
        outputs=bundled_outputs(run) if program else None,
        entropy=bundle.files.get(run_bundle.ENTROPY_PROFILE),
        arrivals=bundle.files.get(run_bundle.ARRIVALS),
        compilers=run.compilers(),
        drawn=_drawn(bundle.read(run_bundle.ENTROPY_REPORT, EntropyReport)) if program else {},
        resumed=_resumed(bundle.open(run_bundle.RUN + contract.EVENTS)),
        recorded=run,
    )


def directory_side(
    path: Path, name: str, lock: Lock | None = None, fingerprint: Fingerprint | None = None
) -> ComparedRun:
    """Read a run directory.

    Args:
        path: The run directory, or the folder of ``capsule run`` that holds it, its lock and the
            fingerprint of its machine.
        name: What reports call it.
        lock: Its lock, if the caller has it.
        fingerprint: The machine it ran on, if the caller knows.

    Raises:
        CapsuleError: CAP-V071, no run was finished there; CAP-B090, a document is malformed.
    """
    if (path / LOCK).exists():
        lock, machine = read_lock(path / LOCK), _present(path / FINGERPRINT)
        fingerprint = None if machine is None else read_document(machine, Fingerprint)
        path = path / WORK
    if not (path / contract.RESULT).exists():
        raise _no_run(f"{path} has no {contract.RESULT}")
    program = (path / contract.OUTPUTS).exists()
    drawn = _present(path / contract.ENTROPY_REPORT) if program else None
    return ComparedRun(
        name=name,
        spec=read_document(path / contract.JOB, contract.Job).spec,
        runtime=read_document(path / contract.RUNTIME, contract.Runtime),
        lock=lock,
        fingerprint=fingerprint,
        training=None if program else _training_in(path),
        outputs=outputs_in(path) if program else None,
        entropy=_present(path / contract.ENTROPY_PROFILE),
        arrivals=_present(path / contract.ARRIVALS),
        compilers=read_document(path / contract.MECHANISMS, Mechanisms).compilers,
        drawn={} if drawn is None else _drawn(read_document(drawn, EntropyReport)),
        resumed=(path / contract.EVENTS).exists()
        and _resumed(open_run_file(path, contract.EVENTS)),
    )


def _drawn(report: EntropyReport) -> dict[str, int]:
    """Return the bytes of randomness that each process of a program asked for, by its path."""
    drawn: Counter[str] = Counter()
    for use in report.uses:
        drawn[use.process] += use.bytes
    for program in report.programs:
        drawn[program.process] += program.requests.bytes
    return {name: count for name, count in drawn.items() if not is_own(name)}


def _bundled_training(run: RecordedRun) -> Training:
    bundle, checkpoints = run.bundle, run.checkpoints()
    members = {each.step: run_bundle.checkpoint_member(each.step) for each in checkpoints}
    result = bundle.read(run_bundle.RUN + contract.RESULT, contract.Result)
    return Training(
        trace=run.trace,
        streams=bundle.read(run_bundle.STREAMS, contract.StreamProfiles),
        checkpoints=checkpoints,
        tensors={at: bundle.member(name) for at, name in members.items() if name in bundle.files},
        evaluation=bundle.read(run_bundle.RUN + contract.EVALUATION, contract.Evaluation),
        schedule=bundle.files.get(run_bundle.SCHEDULE),
        head=result.trace_head,
    )


def _training_in(path: Path) -> Training:
    checkpoints = read_checkpoint_index(path).checkpoints
    evaluation = path / contract.EVALUATION
    folder = path / contract.CHECKPOINTS
    files = {
        each.step: folder / f"{contract.checkpoint_name(each.step)}.safetensors"
        for each in checkpoints
    }
    return Training(
        trace=path / contract.TRACE,
        streams=read_document(path / contract.STREAMS, contract.StreamProfiles),
        checkpoints=checkpoints,
        tensors={step: file for step, file in files.items() if file.exists()},
        evaluation=read_document(evaluation, contract.Evaluation) if evaluation.exists() else None,
        schedule=_present(path / contract.SCHEDULE),
        head=read_document(path / contract.RESULT, contract.Result).trace_head,
    )


def read_checkpoint_index(path: Path) -> contract.CheckpointIndex:
    """Read the checkpoint index of a run directory; it is empty if a short prefix wrote none."""
    if not (path / contract.CHECKPOINT_INDEX).exists():
        return contract.CheckpointIndex(checkpoints=())
    return read_document(path / contract.CHECKPOINT_INDEX, contract.CheckpointIndex)


def _resumed(events: BinaryIO) -> bool:
    """Tell whether a run reported that it was resumed."""
    with events:
        # In canonical JSON, no string contains this text: its quotation marks would be escaped.
        return any(b'"kind":"resume"' in line for line in event_lines(events))


def _present(path: Path) -> Path | None:
    return path if path.exists() else None


def _inconsistency(run: RecordedRun) -> tuple[str, ...]:
    """Return the first contradiction inside of a bundle, if there is one."""
    try:
        check_consistency(run)
    except CapsuleError as error:
        # An error of this machine, or a document of a later version, says nothing about the run.
        if error.exit_code != ExitCode.TAMPERED:
            raise
        return (error.message,)
    return ()


def _broken_chain(training: Training | None) -> tuple[str, ...]:
    """Return where checkpoints and the result name other heads than the trace's records give."""
    if training is None:
        return ()
    heads = trace_heads(training.trace, [each.step for each in training.checkpoints])
    found: list[str] = []
    for each, head in zip(training.checkpoints, heads.checkpoints, strict=True):
        found += _head(f"checkpoint {each.step}", each.trace_head, head)
    return (*found, *_head("the result", training.head, heads.last))


def _head(who: str, stated: str, head: str) -> list[str]:
    if stated == head:
        return []
    named = f"{who} names the trace head {stated[:12]}…"
    return [f"{named}, but the records up to it give {head[:12]}…"]


def _no_run(message: str) -> CapsuleError:
    return CapsuleError(
        "CAP-V071",
        message,
        fix="Name a bundle, the folder that 'capsule run' made, or the run directory in it.",
    )
