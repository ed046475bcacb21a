"""Claims (facts that a re-execution must reproduce) and observations (facts that it need not)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from capsule.entropy.report import EntropyReport
from capsule.experiment import contract
from capsule.experiment.arrival_log import MAX_LOG_BYTES, ArrivalLog, parse_arrivals
from capsule.experiment.beneath import open_beneath
from capsule.experiment.canonical import MAX_DOCUMENT_BYTES, sha256_file, sha256_hex
from capsule.experiment.fields import MAX_FACTS, Facts, Model, Name, added
from capsule.experiment.files import open_regular
from capsule.experiment.lock import Lock, Sha256
from capsule.experiment.mechanisms import Mechanisms
from capsule.experiment.schedule_log import ScheduleLog, parse_schedule
from capsule.experiment.spec import relaxations
from capsule.experiment.trainers import CommandTrainer, ImpalaTrainer
from capsule.host.errors import CapsuleError
from capsule.host.streams import read_whole
from capsule.host.validation import first_reason
from capsule.machine.fingerprint import Fingerprint

Document = TypeVar("Document", bound=Model)


NO_NAMESPACES = "engine.namespaces=none"  # a fact of the machine: a repetition may differ in it


# Verifiers name files by it, so it must be nothing else (OCI image-spec, descriptor.md#digests).
ImageDigest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class ImageClaim(Model):
    """The image, by content (OCI image-spec: config digest and uncompressed layer digests)."""

    config: ImageDigest = Field(description="Digest of the image configuration.")
    layers: tuple[ImageDigest, ...] = Field(
        description="Digests of the uncompressed layers, from the bottom up."
    )


class TraceClaim(Model):
    """The whole trace, by the head of its hash chain."""

    records: int = Field(description="Number of records.")
    head: Sha256 = Field(description="Head of the chain after the last record.")


class CheckpointClaim(Model):
    """One checkpoint, by the digest of its tensor digests."""

    step: int = Field(description="Agent steps before the checkpoint.")
    digest: Sha256 = Field(description="SHA-256 of its entry in run/checkpoints.json.")


class Claims(Model):
    """The claims of every run. *Reproduced* means that the claims are equal, byte for byte."""

    lock: Sha256 = Field(description="SHA-256 of the lock.")
    image: ImageClaim | None = Field(
        description="The image; null if none was used (engine 'process')."
    )
    relaxations: tuple[str, ...] = Field(description="Names of all guarantees that were given up.")
    flags: Facts = Field(description="Determinism flags, as they were read back during the run.")
    libraries: Facts = Field(description="Version of each library that was loaded, by name.")
    entropy_profile: Sha256 | None = Field(
        None,
        description="SHA-256 of the recorded randomness; null if the spec does not record it.",
    )
    data: dict[Name, Sha256] | None = added(
        absent=None,
        description="SHA-256 of the listing of each data set, before the run and again after it; "
        "null without data sets.",
    )

    def claim_id(self) -> str:
        """Return the hexadecimal SHA-256 of :meth:`document`: short enough to print in a paper."""
        return sha256_hex(self.document())


class TrainingClaims(Claims):
    """The claims of a run of one of Capsule's own trainers."""

    schema_id: Literal["capsule/claims/v1"] = Field("capsule/claims/v1", alias="schema")
    streams: tuple[contract.StreamProfile, ...] = Field(
        description="The random streams of the trainer."
    )
    schedule: Sha256 | None = Field(
        None,
        description="Digest of the schedule log; null if the spec does not record the schedule.",
    )
    trace: TraceClaim
    checkpoints: tuple[CheckpointClaim, ...]
    evaluation: contract.Evaluation
    steps: int = Field(description="Number of agent steps.")
    episodes: int = Field(description="Number of episodes that ended.")
    parameters: Sha256 = Field(description="Digest of the final parameters.")


class ProgramClaims(Claims):
    """The claims of a run of your own program: its files and its output."""

    schema_id: Literal["capsule/program-claims/v1"] = Field(
        "capsule/program-claims/v1", alias="schema"
    )
    outputs: dict[str, contract.Output] = Field(
        description="New and changed files and links, by path in the working folder."
    )
    deleted: tuple[str, ...] = Field((), description="Paths of the source tree that were deleted.")
    empty_folders: tuple[str, ...] = Field((), description="Paths of empty folders.")
    standard_output: contract.Output | None = Field(
        description="Standard output of the program; null if the spec does not claim it."
    )
    arrivals: Sha256 | None = Field(
        None, description="SHA-256 of the arrival log; null if the program did not record one."
    )

    @property
    def nothing(self) -> bool:
        """Whether the program left no output that a re-execution could reproduce."""
        printed = self.standard_output is not None and self.standard_output.size > 0
        return not (self.outputs or self.deleted or self.empty_folders or printed)

    @property
    def described(self) -> str:
        """The claims in words."""
        if self.nothing:
            return "NOTHING: the program left no file and printed nothing"
        printed = None if self.standard_output is None else self.standard_output.size
        counts = (
            (len(self.outputs), "file", "files"),
            (len(self.deleted), "deleted file", "deleted files"),
            (len(self.empty_folders), "empty folder", "empty folders"),
            (printed, "byte of standard output", "bytes of standard output"),
        )
        return ", ".join(f"{n:,} {one if n == 1 else many}" for n, one, many in counts if n)


def steps_per_second(claims: TrainingClaims | ProgramClaims, seconds: float) -> float | None:
    """Return the speed of a run of ``seconds``; None for a program, which counts no steps."""
    # The measured time may be 0 if the clock was set back during the run.
    return claims.steps / seconds if isinstance(claims, TrainingClaims) and seconds else None


def recorded_inputs(claims: TrainingClaims | ProgramClaims) -> Iterator[str]:
    """Name what a re-execution takes from the bundle, in which its signer may write anything."""
    if claims.entropy_profile is not None:
        yield "the system's randomness"
    if isinstance(claims, ProgramClaims) and claims.arrivals is not None:
        yield "the order of arrivals"
    if isinstance(claims, TrainingClaims) and claims.schedule is not None:
        yield "the schedule of its actors"


def claims_model(lock: Lock) -> type[TrainingClaims | ProgramClaims]:
    """Return the model of the claims of a run of ``lock``."""
    return ProgramClaims if isinstance(lock.spec.trainer, CommandTrainer) else TrainingClaims


def result_model(lock: Lock) -> type[contract.Result | contract.ProgramResult]:
    """Return the model of the result that a run of ``lock`` writes."""
    program = isinstance(lock.spec.trainer, CommandTrainer)
    return contract.ProgramResult if program else contract.Result


class Observations(Model):
    """Facts about this one execution: signed, never compared."""

    schema_id: Literal["capsule/observations/v1"] = Field("capsule/observations/v1", alias="schema")
    capsule: str = Field(description="Version of Capsule on the host.")
    capsule_sha256: Sha256 = Field(
        description="Digest of the modules and of the seccomp profile of that version: of the "
        "canonical listing of their paths and SHA-256."
    )
    started: str = Field(description="Start of the run in UTC (ISO 8601).")
    finished: str = Field(description="End of the run in UTC (ISO 8601).")
    training_seconds: float = Field(description="Wall-clock time of the training in seconds.")
    steps_per_second: float | None = Field(
        description="Agent steps per second; null for your own program, and if the measured time "
        "is 0."
    )
    engine: Facts
    device: dict[str, Any] = Field(
        max_length=MAX_FACTS, description="The device, as the training process saw it."
    )
    fingerprint: Fingerprint
    data: dict[Name, str | None] | None = added(
        absent=None,
        description="Address from which each data set was downloaded; null for one that was not "
        "downloaded.",
    )


def read_document(path: Path, model: type[Document]) -> Document:
    """Read a canonical JSON document of a run directory.

    Raises:
        CapsuleError: CAP-B090 missing, not canonical, or not of the model's form.
    """
    # A document that is longer than the bound is cut off, and the rest of it is not canonical JSON.
    with _reading(path.name, model.__name__), open_regular(path, follow=False) as stream:
        return model.parse(read_whole(stream, MAX_DOCUMENT_BYTES))


def read_beneath(folder: Path, path: str, model: type[Document]) -> Document:
    """Read a canonical JSON document at a path without links below a run directory.

    Raises:
        CapsuleError: CAP-B090 missing, not canonical, or not of the model's form.
    """
    with _reading(path, model.__name__), open_beneath(folder, path) as stream:
        return model.parse(read_whole(stream, MAX_DOCUMENT_BYTES))


def open_run_file(folder: Path, path: str) -> BufferedReader:
    """Open a file of a run directory, which the training side wrote: no link, no device.

    Raises:
        CapsuleError: CAP-B090 missing, or not a regular file.
    """
    with _reading(path, "file"):
        return open_beneath(folder, path)


@contextmanager
def _reading(name: str, what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise CapsuleError(
            "CAP-B090",
            f"{name} of the run is not a valid {what}: {first_reason(error)}",
            fix="The training side did not keep the run contract; look at its output.log.",
        ) from error


def records_schedule(lock: Lock) -> bool:
    """Tell whether a run of ``lock`` leaves a schedule log."""
    trainer = lock.spec.trainer
    return isinstance(trainer, ImpalaTrainer) and trainer.schedule.mode == "recorded"


def has_population(lock: Lock) -> bool:
    """Tell whether a run of ``lock`` leaves the ancestry of a population."""
    trainer = lock.spec.trainer
    return isinstance(trainer, ImpalaTrainer) and trainer.population is not None


def read_schedule(path: Path) -> ScheduleLog:
    """Read a schedule log of a run directory or a bundle.

    Raises:
        CapsuleError: CAP-B090 missing; CAP-T341 not what it must be.
    """
    with _reading(path.name, "schedule log"), open_regular(path, follow=False) as stream:
        return parse_schedule(stream.read(MAX_DOCUMENT_BYTES))


def read_arrivals(path: Path) -> ArrivalLog:
    """Read an arrival log of a run directory or a bundle.

    Raises:
        CapsuleError: CAP-B090 missing; CAP-T385 not what it must be.
    """
    with _reading(path.name, "arrival log"), open_regular(path, follow=False) as stream:
        # One byte more than allowed, by which parse_arrivals tells that a log is too long.
        return parse_arrivals(stream.read(MAX_LOG_BYTES + 1))


def image_relaxations(
    lock: Lock, engine: str, report: EntropyReport, mechanisms: Mechanisms
) -> tuple[str, ...]:
    """Name every relaxation of a run: those of its spec, and what it lacked of a container.

    Args:
        lock: The locked experiment.
        engine: Where it ran.
        report: What the launcher read back.
        mechanisms: What the run itself read back.
    """
    # Claims take a container for granted, so only a run without one declares how it was executed.
    outside = []
    if engine == "process":
        outside.append("engine=process")
        # In a pod, the launcher can be the first process although the run has no namespaces of its
        # own. The run's paths are then those of the pod.
        if not (report.numbers_pinned and mechanisms.surroundings.fixed_paths):
            outside.append(NO_NAMESPACES)
    return tuple(sorted([*relaxations(lock.spec), *outside]))


def collect_claims(
    lock: Lock, image: ImageClaim | None, engine: str, run_directory: Path
) -> TrainingClaims | ProgramClaims:
    """Gather the claims of a finished run from its run directory.

    Raises:
        CapsuleError: CAP-B090, a document of the run directory is missing or malformed.
    """
    if isinstance(lock.spec.trainer, CommandTrainer):
        return collect_program_claims(lock, image, engine, run_directory)
    return collect_training_claims(lock, image, engine, run_directory)


def collect_training_claims(
    lock: Lock, image: ImageClaim | None, engine: str, run_directory: Path
) -> TrainingClaims:
    """Gather the claims of a finished training: :func:`collect_claims`."""
    result = read_document(run_directory / contract.RESULT, contract.Result)
    streams = read_document(run_directory / contract.STREAMS, contract.StreamProfiles)
    index = read_document(run_directory / contract.CHECKPOINT_INDEX, contract.CheckpointIndex)
    schedule = read_schedule(run_directory / contract.SCHEDULE) if records_schedule(lock) else None
    return TrainingClaims(
        **dict(_common_claims(lock, image, engine, run_directory)),
        streams=streams.streams,
        schedule=None if schedule is None else schedule.digest(),
        trace=TraceClaim(records=result.trace_records, head=result.trace_head),
        checkpoints=tuple(
            CheckpointClaim(step=item.step, digest=item.digest()) for item in index.checkpoints
        ),
        evaluation=read_document(run_directory / contract.EVALUATION, contract.Evaluation),
        steps=result.steps,
        episodes=result.episodes,
        parameters=result.parameters,
    )


def collect_program_claims(
    lock: Lock, image: ImageClaim | None, engine: str, run_directory: Path
) -> ProgramClaims:
    """Gather the claims of a program's finished run: :func:`collect_claims`."""
    outputs = read_document(run_directory / contract.OUTPUTS, contract.Outputs)
    # Only the program decides whether it records arrivals, so the spec does not say whether there
    # is a log.
    log = run_directory / contract.ARRIVALS
    arrivals = read_arrivals(log) if log.exists() else None
    return ProgramClaims(
        **dict(_common_claims(lock, image, engine, run_directory)),
        outputs=outputs.files,
        deleted=outputs.deleted,
        empty_folders=outputs.empty_folders,
        standard_output=outputs.standard_output,
        arrivals=None if arrivals is None else arrivals.digest(),
    )


def _common_claims(
    lock: Lock, image: ImageClaim | None, engine: str, run_directory: Path
) -> Claims:
    runtime = read_document(run_directory / contract.RUNTIME, contract.Runtime)
    report = read_document(run_directory / contract.ENTROPY_REPORT, EntropyReport)
    mechanisms = read_document(run_directory / contract.MECHANISMS, Mechanisms)
    profile = run_directory / contract.ENTROPY_PROFILE
    return Claims(
        lock=lock.digest(),
        image=image,
        relaxations=image_relaxations(lock, engine, report, mechanisms),
        flags=runtime.flags,
        libraries=runtime.libraries,
        entropy_profile=sha256_file(profile) if profile.exists() else None,
        data=_data_read(lock, run_directory),
    )


def _data_read(lock: Lock, run_directory: Path) -> dict[str, str] | None:
    if lock.data is None:
        return None
    read = read_document(run_directory / contract.DATA, contract.DataRead)
    return {name: found.sha256 for name, found in read.sets.items()}
