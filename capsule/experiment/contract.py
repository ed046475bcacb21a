"""The run contract: the files of a run directory, where the host and the training side meet.

The host writes ``job.json`` and starts ``python -m capsule.training RUN_DIRECTORY``; the training
side writes everything else. Documents are canonical JSON (RFC 8785); floats that must compare
exactly are C99 hexadecimal strings (``float.hex``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from capsule.experiment.canonical import canonical_json, sha256_hex
from capsule.experiment.evaluation import digest_of_starts
from capsule.experiment.fields import MAX_FACTS, DigestedModel, Facts, Model, Name
from capsule.experiment.lock import Lock, LockedData, Sha256
from capsule.experiment.spec import Spec

JOB = "job.json"  # Job; written by the host
RUNTIME = "runtime.json"  # Runtime
MECHANISMS = "mechanisms.json"  # capsule.experiment.mechanisms.Mechanisms
INTERPRETERS = "interpreters.jsonl"  # records of Python processes (capsule.training.accounts)
EVENTS = "events.jsonl"  # one Event per line, append-only
TRACE = "trace.jsonl"  # one trace record per line
STREAMS = "streams.json"  # StreamProfiles
SCHEDULE = "schedule.log"  # capsule.experiment.schedule_log (trainer.schedule.mode: recorded)
SCHEDULE_REPLAY = "schedule.replay"  # a schedule log to follow; written by the host
POPULATION = "population.json"  # Ancestry (trainer.population)
CHECKPOINTS = "checkpoints"  # folder of checkpoint_name(step).{json,safetensors}
CHECKPOINT_INDEX = "checkpoints.json"  # CheckpointIndex
EVALUATION = "evaluation.json"  # Evaluation
DENSE = "dense.jsonl"  # capsule.experiment.dense (Job.dense)
EPISODE_ORDER = "episode-order.json"  # EpisodeOrder; written by the host
FILM = "film.json"  # Film; appears last
SCREENS = "screens.zlib"  # the screens of a Film, one after the other, in zlib format (RFC 1950)
RESULT = "result.json"  # Result; appears last, by atomic rename
FAILURE = "failure.json"  # Failure; written instead of RESULT
ENTROPY_REPORT = "entropy.json"  # capsule.entropy.report.EntropyReport; written by the host
ENTROPY_PROFILE = "entropy.profile"  # recorded randomness (entropy.mode: recorded)
LEDGER = "ledger.json"  # capsule.entropy.ledger.Ledger; written by the host
DATA = "data.json"  # DataRead (spec.data); written by the host
STATE = "state"  # folder of the files from which a run is resumed
SEGMENT_STATES = "states"  # capsule.experiment.states: checkpoint_name(step).{json,blocks}
LOG = "output.log"  # standard output and error of the training process
ENTROPY_STARTS = "entropy"  # folder of the journals of launcher and interposer (capsule.entropy)

# Files and folders of a run of a user program (trainer.command):
WORKSPACE = "workspace"  # folder: a copy of the source tree, in which the program runs
STANDARD_OUTPUT = "stdout.txt"  # its standard output
ENDED = "ended.json"  # Ended; written before the outputs are listed
OUTPUTS = "outputs.json"  # Outputs
ARRIVALS_FOLDER = "arrivals"  # folder: the arrivals that each process records
ARRIVALS = "arrivals.json"  # capsule.experiment.arrival_log (capsule.training.arrivals)
ARRIVALS_REPLAY = "arrivals.replay"  # an arrival log to follow; written by the host

# The files that the host reads from a run directory, or writes there, when the run has ended.
READ_FILES = frozenset(
    {
        *(JOB, RUNTIME, EVENTS, TRACE, STREAMS, SCHEDULE, POPULATION, CHECKPOINT_INDEX, EVALUATION),
        *(DENSE, RESULT, MECHANISMS, FAILURE, ENTROPY_REPORT, ENTROPY_PROFILE, LEDGER, DATA),
        *(FILM, SCREENS, LOG, STANDARD_OUTPUT, ENDED, OUTPUTS, ARRIVALS),
    }
)
# outcome.check_run_directory() accepts neither links nor special files under these names.
READ_FOLDERS = frozenset({CHECKPOINTS, ENTROPY_STARTS, SEGMENT_STATES})
MAX_OUTPUTS = 5_000  # a bundle has at most 10,000 files

RUN_FOLDER = "/out"  # the run directory in a container
PROJECT_FOLDER = "/project"  # the source tree in an image
DATA_FOLDER = "/data"  # the data sets in a container, by name
# Environment variables of a user program. The last one is for Capsule's own use.
OUTPUT_VARIABLE = "CAPSULE_OUTPUT"  # folder of its working folder that the helper writes into
STATE_VARIABLE = "CAPSULE_STATE"  # folder for the files from which the program resumes
RESUMED_VARIABLE = "CAPSULE_RESUMED"  # "1" if it is to resume from that folder, else "0"
SEED_VARIABLE = "CAPSULE_SEED"  # seeds.root
RUN_VARIABLE = "CAPSULE_RUN"  # the run directory
DATA_VARIABLE = "CAPSULE_DATA"  # the folder of the data sets
PROJECT_VARIABLE = "CAPSULE_PROJECT"  # folder of the source tree, if it is not PROJECT_FOLDER

# The first process of a run sends this signal to the launcher, whose process id is in the variable.
# The launcher then prepares the process id that the program will have. The values are those of
# capsule/native/source/shared/entropy.h.
LAUNCHER_VARIABLE = "CAPSULE_LAUNCHER_PID"
NUMBERS_SIGNAL = 40
FIRST_PROCESS = 500
PROGRAM_PROCESS = 1000

# Environment variables of the training side, which are set only if actors run on a Ray cluster.
CLUSTER_VARIABLE = "CAPSULE_CLUSTER"  # address of the head
CLUSTER_HOSTS_VARIABLE = "CAPSULE_CLUSTER_HOSTS"  # number of workers; unset: one per free processor

_STREAM_DOMAIN = "capsule/stream/v1"
Hex = Annotated[
    str,
    Field(
        # Python's float.fromhex() would read '500' as 1280.
        pattern=r"^(-?0x[01](\.[0-9a-f]+)?p[+-][0-9]+|-?inf|nan)$",
        description="A hexadecimal floating-point number of C99, as float.hex() of Python writes "
        "it.",
    ),
]


class DenseWindow(Model):
    """The parameter updates that are recorded densely, by the agent steps at which they end."""

    first: PositiveInt = Field(description="Agent step at which the first recorded update ends.")
    last: PositiveInt = Field(description="Agent step at which the last recorded update ends.")


class Job(Model):
    """The job of the training side. A run whose directory contains a state is resumed."""

    schema_id: Literal["capsule/job/v1"] = Field("capsule/job/v1", alias="schema")
    spec: Spec
    stop_after: int | None = Field(
        None,
        description="Number of agent steps after which the run stops (the re-execution of a "
        "prefix); null: the whole run.",
    )
    learners: PositiveInt = Field(
        1,
        description="Number of processes that share the gradient of a batch, if the trainer "
        "supports it; 1: threads of one process. The number does not affect the result.",
    )
    replicas: PositiveInt = Field(
        1,
        description="Number of processes that compute the actors' actions, if trainer.inference "
        "has the mode 'server'. The number does not affect the result.",
    )
    dense: DenseWindow | None = Field(
        None,
        description="Updates for which a dense record is written, in one thread; null: none. The "
        "record does not affect the result.",
    )
    segment: bool = Field(
        False,
        description="Whether only one segment is executed, for a verifier: from the state at one "
        "checkpoint to the next, without evaluations and without keeping states.",
    )
    tree: dict[str, str] = Field(
        default_factory=dict,
        description="The locked source tree: 'file MODE SHA256' or 'symlink TARGET', by path.",
    )

    @classmethod
    def of(cls, lock: Lock, **how: Any) -> Job:
        """Return the job of a locked experiment; ``how`` sets the other fields."""
        tree = {} if lock.project is None else lock.project.files
        return cls(spec=lock.spec, tree=tree, **how)


class DataRead(Model):
    """The data sets of a run, each hashed in full before it began and again after it had ended."""

    schema_id: Literal["capsule/data-read/v1"] = Field("capsule/data-read/v1", alias="schema")
    sets: dict[Name, LockedData] = Field(
        description="The data sets, by name, as they were both times."
    )


def gpu_identity(uuid: str) -> str:
    """Return the SHA-256 that identifies a GPU in published documents, hexadecimal.

    The hash with a fixed prefix does not reveal the identifier itself. It does not hide the card
    from a reader who has the identifier already, and a card has the same hash in every bundle.

    Args:
        uuid: NVML's identifier, such as ``GPU-2c1d…``.
    """
    return sha256_hex(b"capsule/gpu-uuid/v1\0" + uuid.encode())


class Runtime(Model):
    """Facts that were read back inside the training process after every flag had been set."""

    schema_id: Literal["capsule/runtime/v1"] = Field("capsule/runtime/v1", alias="schema")
    flags: Facts = Field(description="Determinism flags as they were read back. They are claimed.")
    libraries: Facts = Field(
        description="Version of each loaded library, by name; for 'cuda', the version for which "
        "torch was built. They are claimed."
    )
    device: dict[str, Any] = Field(
        max_length=MAX_FACTS,
        description="The GPU as torch sees it, or the CPU. It is observed, not claimed.",
    )
    earlier_devices: tuple[dict[str, Any], ...] = Field(
        (),
        description="Other devices on which the run was executed before it was resumed. They are "
        "observed, not claimed.",
    )


class Event(Model):
    """A line of events.jsonl, which is written for people to read and is never compared."""

    time: float = Field(description="Time in seconds since 1970-01-01 UTC.")
    kind: Literal["start", "resume", "progress", "checkpoint", "evaluation", "finish"]
    step: int = Field(description="Agent steps so far, or the step that a user program reports.")
    total_steps: int | None = Field(
        None,
        description="Step at which this execution ends; null if a user program does not report it.",
    )
    steps_per_second: float | None = Field(
        None, description="Agent steps per second since the last progress; null if unknown."
    )
    episodes: int | None = Field(
        None, description="Number of episodes that have ended; null for a user program."
    )
    episode_return: float | None = Field(
        None,
        description="Mean return of the last 100 episodes; null before the first one has ended, "
        "and for a user program.",
    )
    loss: float | None = Field(
        None,
        description="Loss of the last parameter update; null before the first one, and for a user "
        "program.",
    )
    exploration: float | None = Field(
        None, description="Probability of a random action; null if the trainer has none."
    )
    message: str | None = Field(None, description="Text to be shown; null: none.")


def stream_key(seed: int, name: str, index: int = 0) -> str:
    """Return the Philox key of a random stream, 32 hexadecimal digits.

    It is the first 16 bytes of SHA-256 over the canonical JSON (RFC 8785) array
    ``["capsule/stream/v1", seed, name, index]``.
    """
    # Philox4x64 has a key of two 64-bit words.
    return sha256_hex(canonical_json([_STREAM_DOMAIN, seed, name, index]))[:32]


class StreamProfile(Model):
    """The output of one random stream."""

    name: str
    seed: int = Field(description="Root seed from which the stream is derived.")
    key: str = Field(description="Philox key, hexadecimal: SHA-256(seed, name, index)[:16].")
    draws: int = Field(description="Number of 64-bit words that were drawn.")
    digest: Sha256 = Field(description="Head of a SHA-256 chain over every draw.")


class StreamProfiles(Model):
    """All streams of a run."""

    schema_id: Literal["capsule/streams/v1"] = Field("capsule/streams/v1", alias="schema")
    generator: Literal["philox4x64-10"] = "philox4x64-10"
    streams: tuple[StreamProfile, ...]


class Generation(Model):
    """A period of a population's member with constant hyper-parameters."""

    number: int = Field(description="Number of the generation within the population, from 0.")
    member: int = Field(description="Number of the member, from 0.")
    parent: int | None = Field(
        description="Generation with whose weights this one began; null for new weights."
    )
    step: int = Field(description="Agent steps of the member when the generation began.")
    parent_step: int | None = Field(
        description="Agent steps, at that moment, of the member to which the parent belongs; null "
        "without a parent."
    )
    hyperparameters: dict[str, Hex] = Field(
        description="Hyper-parameters, by their names in the spec."
    )
    score: Hex | None = Field(
        description="Fitness that the member had reached; null in its first generation."
    )
    rival: int | None = Field(
        description="Member with which it was compared; null in its first generation."
    )
    rival_score: Hex | None = Field(description="Fitness of that member; null if it had none yet.")
    copied: bool = Field(
        description="Whether weights and hyper-parameters were copied from the rival."
    )

    @property
    def name(self) -> str:
        """The name of the generation in a trace record."""
        return f"generation {self.number}, member {self.member}"

    @property
    def values(self) -> dict[str, float]:
        """Its hyper-parameters as numbers, by their names in the spec."""
        return {name: float.fromhex(value) for name, value in self.hyperparameters.items()}

    @property
    def fitness(self) -> float | None:
        """Fitness of the weights it began with; None if it was not known yet."""
        known = self.rival_score if self.copied else self.score
        return None if known is None else float.fromhex(known)

    def facts(self) -> dict[str, Any]:
        """Return the facts about the generation that a trace record contains."""
        return self.model_dump(mode="json")


class Ancestry(Model):
    """Every generation of a population, in the order in which they began.

    The trace claims them: its component "generations" contains all of them.
    """

    schema_id: Literal["capsule/population/v1"] = Field("capsule/population/v1", alias="schema")
    generations: tuple[Generation, ...]


def checkpoint_name(step: int) -> str:
    """Return the file name, without suffix, of the checkpoint at ``step``."""
    # The number of digits is fixed, so that names sort by step.
    return f"step-{step:012d}"


def tensor_digest(dtype: str, shape: Sequence[int], data: bytes | memoryview) -> str:
    """Return the SHA-256 identity of a tensor.

    Args:
        dtype: Name as in the safetensors format: ``F32``, ``I64``, ``U8``, …
        shape: Sizes of the dimensions.
        data: The elements, row-major, little-endian.
    """
    digest = hashlib.sha256(tensor_header(dtype, shape))
    digest.update(data)
    return digest.hexdigest()


def tensor_header(dtype: str, shape: Sequence[int]) -> bytes:
    """Return the bytes that are hashed before the elements of a tensor."""
    # Without the header, tensors of different shapes with the same bytes would be equal.
    return canonical_json({"dtype": dtype, "shape": list(shape)})


class Checkpoint(DigestedModel):
    """One checkpoint: its tensors by digest, and the trace head at that step."""

    step: int = Field(description="Agent steps before the checkpoint.")
    tensors: dict[str, Sha256] = Field(description="Digest of each tensor, by name.")
    trace_head: Sha256 = Field(description="Head of the trace after its last record by that step.")


class CheckpointIndex(Model):
    """Every checkpoint of a run, in order of steps."""

    schema_id: Literal["capsule/checkpoints/v1"] = Field("capsule/checkpoints/v1", alias="schema")
    checkpoints: tuple[Checkpoint, ...]


class EvaluationPoint(Model):
    """The returns of one network, one for each start sequence, in order."""

    step: int = Field(description="Agent steps after which the network was evaluated.")
    returns: tuple[Hex, ...]
    lengths: tuple[int, ...] = Field(
        description="Number of agent steps of each episode, without those of the start sequence."
    )


class Evaluation(Model):
    """Results of the evaluation protocol."""

    schema_id: Literal["capsule/evaluation/v1"] = Field("capsule/evaluation/v1", alias="schema")
    starts: tuple[tuple[int, ...], ...] = Field(description="Action indices of each start.")
    points: tuple[EvaluationPoint, ...]

    @property
    def start_set(self) -> str:
        """SHA-256 of the start sequences, see :func:`digest_of_starts`."""
        return digest_of_starts(self.starts)


class EpisodeOrder(Model):
    """The request to play the last evaluation again, and to film one of its episodes."""

    schema_id: Literal["capsule/episode-order/v1"] = Field(
        "capsule/episode-order/v1", alias="schema"
    )
    seed: int = Field(description="Root seed of the stream 'evaluation'.")
    step: int = Field(description="Agent steps after which the network was evaluated.")
    starts: tuple[tuple[int, ...], ...] = Field(description="Action indices of each start.")
    episode: NonNegativeInt = Field(
        description="Episode to film, by the index of its start sequence."
    )


class Film(Model):
    """The evaluation that was played, and the screens of one of its episodes."""

    schema_id: Literal["capsule/film/v1"] = Field("capsule/film/v1", alias="schema")
    point: EvaluationPoint
    screens: NonNegativeInt = Field(
        description="Number of screens: one at the end of the start sequence, and one for each "
        "step."
    )
    rows: NonNegativeInt = Field(description="Height of a screen in pixels.")
    columns: NonNegativeInt = Field(
        description="Width of a screen in pixels. A pixel has three bytes: red, green and blue."
    )
    rate: float = Field(description="Screens per second.")


class Result(Model):
    """The end of a run."""

    schema_id: Literal["capsule/result/v1"] = Field("capsule/result/v1", alias="schema")
    complete: bool = Field(
        description="Whether the run is complete; false for a prefix (stop_after of the job)."
    )
    steps: int = Field(description="Number of agent steps.")
    episodes: int = Field(description="Number of episodes that ended.")
    trace_records: int = Field(description="Number of records of the trace.")
    trace_head: Sha256 = Field(description="Head of the trace after its last record.")
    parameters: Sha256 = Field(description="Digest of the final parameters.")
    seconds: float = Field(
        description="Wall-clock time of all attempts in seconds. It is observed, not claimed."
    )


class Output(Model):
    """One file or symbolic link that a program wrote."""

    size: NonNegativeInt = Field(description="Size in bytes.")
    sha256: Sha256 = Field(description="SHA-256 of the content.")
    target: str | None = Field(
        None,
        description="Target of a symbolic link, in which case size and digest are those of this "
        "text; null for a file.",
    )
    executable: bool = Field(False, description="Whether the owner of the file may execute it.")

    @property
    def fact(self) -> str:
        """The entry that a lock would have for such a file of a source tree."""
        if self.target is not None:
            return f"symlink {self.target}"
        return f"file {'0755' if self.executable else '0644'} {self.sha256}"


class Outputs(Model):
    """All differences between a program's working folder after the run and its source tree."""

    schema_id: Literal["capsule/outputs/v1"] = Field("capsule/outputs/v1", alias="schema")
    files: dict[str, Output] = Field(
        description="New and changed files and links, by path in the working folder.",
        max_length=MAX_OUTPUTS,
    )
    deleted: tuple[str, ...] = Field((), description="Paths of the source tree that were deleted.")
    empty_folders: tuple[str, ...] = Field(
        (), description="Paths of empty folders.", max_length=MAX_OUTPUTS
    )
    standard_output: Output | None = Field(
        description="Standard output of the program; null if the spec does not claim it."
    )


class Ended(Model):
    """The successful end of a program, whose outputs may not have been listed yet."""

    schema_id: Literal["capsule/ended/v1"] = Field("capsule/ended/v1", alias="schema")
    seconds: float = Field(
        description="Wall-clock time of the last attempt in seconds. It is observed, not claimed."
    )


class ProgramResult(Model):
    """The end of a program's run."""

    schema_id: Literal["capsule/program-result/v1"] = Field(
        "capsule/program-result/v1", alias="schema"
    )
    outputs: Sha256 = Field(description="Digest of outputs.json.")
    seconds: float = Field(
        description="Wall-clock time of the last attempt in seconds. It is observed, not claimed."
    )


class Failure(Model):
    """The error with which the training side stopped."""

    schema_id: Literal["capsule/failure/v1"] = Field("capsule/failure/v1", alias="schema")
    code: str
    message: str
    fix: str
    step: int | None = None  # agent steps so far, if training had begun
