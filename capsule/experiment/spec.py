"""The spec: what a researcher writes.

Every model is frozen, refuses unknown keys and converts nothing silently. Units are part of the
names. A *step* is one agent step: one action chosen by the policy (``frame_skip`` emulator frames
on Atari).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from capsule.experiment.canonical import sha256_hex
from capsule.experiment.evaluation import EvaluationSpec, StartSet
from capsule.experiment.fields import (
    DebianName,
    Model,
    ModuleName,
    Name,
    NonNegativeInt,
    Patterns,
    PositiveInt,
    Probability,
    Requirement,
    Seed,
    VersionConstraint,
)
from capsule.experiment.scores import ReferenceScores, reference_of
from capsule.experiment.trainers import (
    AlgorithmTrainer,
    CommandTrainer,
    ImpalaTrainer,
    PopulationSpec,
    TrainerSpec,
)

StreamName = Literal[
    "environment", "no-op", "exploration", "initialization", "minibatch", "evaluation"
]
Numerics = Literal["portable-v3", "portable-v3-strict", "portable-v2", "native"]


class SourcesSpec(Model):
    """Where packages come from. Never part of a lock: locks hold names and digests only."""

    index: str | None = Field(
        None,
        description=(
            "Main package index; default: the one that pip is configured to use, else PyPI."
        ),
    )
    extra_indexes: tuple[str, ...] = Field(
        (), description="Package indexes in addition to those that pip is configured to use."
    )
    find_links: tuple[str, ...] = Field(
        (),
        description=(
            "Folders or pages with wheels, in addition to those that pip is configured to use. "
            "Paths are relative to the spec file."
        ),
    )
    debian: tuple[str, ...] = Field(
        (), description="Debian mirrors to use instead of those in apt's configuration."
    )


class ImageSpec(Model):
    """What the image holds besides Capsule's own training code."""

    base: Literal["debian-12"] = Field("debian-12", description="Base recipe of the image.")
    python: Literal["3.11"] = Field("3.11", description="Python version; Debian 12 provides 3.11.")
    packages: tuple[Requirement, ...] = Field(
        (
            "torch==2.13.0",
            "numpy==2.4.6",
            "gymnasium==1.4.0",
            "ale-py==0.12.1",
            "safetensors==0.8.0",
        ),
        description="Python packages (PEP 508). The lock pins each to one wheel and its SHA-256.",
    )
    debian: tuple[DebianName, ...] = Field((), description="Additional Debian packages.")
    sources: SourcesSpec = Field(
        SourcesSpec(), description="Where packages are downloaded from; never part of a lock."
    )


class CpuAccelerator(Model):
    """Train on the CPU, under a numerics profile."""

    kind: Literal["cpu"] = "cpu"
    numerics: Numerics = Field(
        "portable-v3",
        description=(
            "'portable-v3' gives the same bits on every x86-64 CPU with AVX2 and FMA; "
            "'portable-v3-strict' does so without oneDNN, whose blocking depends on cache sizes;"
            " 'portable-v2' requires SSE4.2 only; 'native' uses the widest instructions of the "
            "machine."
        ),
    )


class CudaAccelerator(Model):
    """Train on one NVIDIA GPU. A machine that lacks it is an error, never a fall-back."""

    kind: Literal["cuda"]
    cuda: VersionConstraint = Field(
        description="CUDA runtime version that the wheels must contain, e.g. '13.0'."
    )
    cudnn: VersionConstraint = Field(
        description="cuDNN version that the wheels must contain, e.g. '>=9.10'."
    )
    driver: VersionConstraint = Field(
        description="Driver version that the machine must have, e.g. '>=580.65'."
    )
    gpu: str | None = Field(
        None, description="Exact name of the GPU, e.g. 'NVIDIA H200'; null: any GPU."
    )
    compute_capability: str | None = Field(
        None,
        pattern=r"^[0-9]+\.[0-9]$",
        description="Compute capability of the GPU, e.g. '9.0'; null: any.",
    )


class DeterminismSpec(Model):
    """The determinism layers. Anything weaker than the default is a declared relaxation."""

    hash_seed: Annotated[int, Field(ge=0, le=4294967295)] | None = Field(
        0,
        description=(
            "PYTHONHASHSEED, set before the interpreter starts; null: random in each process."
        ),
    )
    propagation: bool = Field(
        True, description="Set and check the flags in every Python process that imports torch."
    )
    threads: PositiveInt | None = Field(
        1,
        description=(
            "Number of maths threads of each library call; null: as many as there are cores."
        ),
    )
    algorithms: Literal["error", "warn", "off"] = Field(
        "error",
        description=(
            "torch.use_deterministic_algorithms: 'error' raises where an operator has no "
            "deterministic implementation, 'warn' warns, 'off' does not ask for one."
        ),
    )
    fill_uninitialized_memory: bool = Field(
        True, description="torch.utils.deterministic.fill_uninitialized_memory."
    )
    cudnn_benchmark: bool = Field(
        False,
        description="torch.backends.cudnn.benchmark: choose the fastest cuDNN algorithm by timing.",
    )
    tf32: bool = Field(
        False, description="Allow TensorFloat-32 in matrix products and convolutions."
    )
    cores: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        4,
        description=(
            "Number of processors that programs are told the machine has; null: its real number."
        ),
    )
    sorted_listings: bool = Field(
        True,
        description=(
            "List directories in the order of names; false: in the order of the file system."
        ),
    )
    cublas_workspace: Literal[":4096:8", ":16:8"] | None = Field(
        ":4096:8", description="CUBLAS_WORKSPACE_CONFIG; null: unset, so that cuBLAS chooses."
    )
    batch_invariance: bool = Field(
        True,
        description=(
            "Compute the answer to an actor so that it does not depend on the other requests in "
            "its batch: in batches of a fixed size, or with layers whose rows are tested to be "
            "independent; false: in batches as requests arrive."
        ),
    )
    request_seeds: bool = Field(
        True,
        description=(
            "Draw each action of an actor from a random stream of its own request; false: from "
            "one stream of the replica that answers."
        ),
    )
    deterministic_routing: bool = Field(
        True,
        description=(
            "Choose the replica that answers by the number of the actor; false: by the order of "
            "arrival."
        ),
    )


class EntropySpec(Model):
    """What becomes of the randomness that programs ask the operating system for."""

    mode: Literal["virtual", "recorded", "system"] = Field(
        "virtual",
        description=(
            "'virtual' derives the randomness from a key, the process, the thread and a counter;"
            " 'recorded' records the system's randomness, which verify replays; 'system' leaves "
            "it uncontrolled."
        ),
    )
    seed: Seed | None = Field(None, description="Key of virtual entropy; default: seeds.root.")
    on_exhaustion: Literal["fail", "virtual"] = Field(
        "fail",
        description=(
            "What a replay does when the program requests more randomness than was recorded: "
            "'fail' ends the run, 'virtual' derives the rest."
        ),
    )
    supervised: bool = Field(
        True, description="Also intercept raw system calls, which a preloaded library cannot see."
    )
    address_randomization: bool = Field(
        False,
        description="Load programs at random addresses, which id() and the order of sets reveal.",
    )
    clock: Literal["system", "fixed", "virtual"] | None = Field(
        None,
        description=(
            "The calendar clock. 'virtual' starts at a fixed date and advances with what the "
            "program does; 'fixed' stands still at that date; 'system' is the machine's clock. "
            "Default: 'virtual' for a program of your own, 'system' for Capsule's trainers."
        ),
    )


class SeedsSpec(Model):
    """One root seed; any stream can be overridden alone (the sensitivity study of Nagarajan)."""

    root: Seed = Field(0, description="Root seed of all streams.")
    random: bool = Field(
        False,
        description=(
            "Draw the root seed from the operating system at the start, as a program without a "
            "seed does; section 'entropy' determines what the system gives."
        ),
    )
    streams: dict[StreamName, Seed] = Field(
        default_factory=dict, description="Root seeds of single streams, which override 'root'."
    )

    @model_validator(mode="after")
    def _consistent(self) -> SeedsSpec:
        if self.random and "root" in self.model_fields_set and self.root:
            raise ValueError(f"root {self.root} is given although random is true")
        return self


RomName = Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]


class AtariEnvironment(Model):
    """An Atari 2600 game through the Arcade Learning Environment."""

    suite: Literal["atari"]
    game: RomName = Field(description="ROM name as in ale-py, e.g. 'breakout'.")
    further_games: tuple[RomName, ...] = Field(
        (),
        description=(
            "Further games for multi-task training with 'impala': actor N plays game N modulo "
            "the number of games."
        ),
    )
    sticky_action_probability: Probability = Field(
        0.0,
        description="Probability, at each emulator frame, that the previous action is repeated.",
    )
    noop_max: NonNegativeInt = Field(
        30, description="Maximum number of no-op actions at the start of an episode."
    )
    frame_skip: PositiveInt = Field(
        4, description="Number of frames for which an action is repeated."
    )
    frame_stack: PositiveInt = Field(
        4, description="Number of most recent frames in an observation."
    )
    terminal_on_life_loss: bool = Field(
        True,
        description="Whether a lost life ends the return (but not the game) during training.",
    )
    full_action_set: bool = Field(
        False, description="Use all 18 actions instead of the game's minimal set."
    )
    clip_rewards: bool = Field(True, description="Clip training rewards to -1, 0 or 1.")
    max_episode_frames: PositiveInt = Field(
        108_000, description="Emulator frames after which an episode is truncated."
    )


class GymnasiumEnvironment(Model):
    """A Gymnasium environment with discrete actions."""

    suite: Literal["gymnasium"]
    id: str = Field(description="Gymnasium id, e.g. 'CartPole-v1'.")
    max_episode_steps: PositiveInt | None = Field(
        None,
        description=(
            "Steps after which an episode is truncated; null: the limit that the id is "
            "registered with, if any."
        ),
    )
    modules: tuple[ModuleName, ...] = Field(
        (), description="Modules to import first because they register ids, e.g. [popgym]."
    )
    observation: str | None = Field(
        None, description="The entry of a Dict observation that the agent sees, e.g. 'image'."
    )
    frames: Literal["flat", "image"] = Field(
        "flat",
        description=(
            "'flat': one vector of all numbers, for the network 'mlp'; 'image': a Box of uint8 "
            "[rows, columns, channels], for convolutional networks."
        ),
    )
    frame_stack: PositiveInt = Field(
        1, description="Number of most recent frames in an observation."
    )
    instruction: str | None = Field(
        None,
        description=(
            "The entry of a Dict observation that holds an instruction in words, e.g. 'mission';"
            " trainer.language reads it."
        ),
    )
    masked_observations: tuple[NonNegativeInt, ...] = Field(
        (),
        description=(
            "Indices of a flat observation that the agent does not see. Example: [1, 3] hides "
            "CartPole's velocities."
        ),
    )

    @model_validator(mode="after")
    def _consistent(self) -> GymnasiumEnvironment:
        if self.frames == "image" and self.masked_observations:
            raise ValueError("masked_observations does not apply to frames: image; leave it out")
        return self


class MinAtarEnvironment(Model):
    """A MinAtar game: 10x10 boolean channels (Young and Tian 2019)."""

    suite: Literal["minatar"]
    game: Literal["asterix", "breakout", "freeway", "seaquest", "space_invaders"] = Field(
        description="Name of the game."
    )
    sticky_action_probability: Probability = Field(
        0.1, description="Probability that the previous action is repeated."
    )
    max_episode_steps: PositiveInt = Field(
        5_000, description="Steps after which an episode is truncated."
    )


EnvironmentSpec = Annotated[
    AtariEnvironment | GymnasiumEnvironment | MinAtarEnvironment, Field(discriminator="suite")
]


def tasks_of(environment: EnvironmentSpec) -> tuple[EnvironmentSpec, ...]:
    """Return the environment of each task, of which there is one unless it has further games."""
    if not isinstance(environment, AtariEnvironment):
        return (environment,)
    games = (environment.game, *environment.further_games)
    return tuple(
        environment.model_copy(update={"game": game, "further_games": ()}) for game in games
    )


def task_name(task: EnvironmentSpec) -> str:
    """Return the game or the Gymnasium id of a task."""
    return task.id if isinstance(task, GymnasiumEnvironment) else task.game


def references_of(
    environment: EnvironmentSpec, population: PopulationSpec
) -> dict[str, ReferenceScores]:
    """Return the scores that a population normalises returns by: by game or id, in order of tasks.

    Raises:
        ValueError: A task has none; or some are given that have no use.
    """
    names = [task_name(task) for task in tasks_of(environment)]
    # MinAtar's games have the names of Atari's and other scores.
    published = {} if environment.suite == "minatar" else {n: reference_of(n) for n in names}
    known = {name: scores for name, scores in published.items() if scores is not None}
    given = population.references
    for name in given:
        if name not in names:
            raise ValueError(
                f"trainer.population.references: {name!r} is none of the tasks {', '.join(names)}"
            )
        if name in known:
            raise ValueError(
                f"trainer.population.references: {name!r} has published scores; leave it out"
            )
    for name in names:
        if name not in known and name not in given:
            raise ValueError(
                f"trainer.population.references lacks {name!r}: no scores of random play and of a "
                f"person are known for it; add {{{name}: {{random: …, human: …}}}}"
            )
    added = {name: ReferenceScores(each.random, each.human) for name, each in given.items()}
    return {name: (known | added)[name] for name in names}


class CodeSpec(Model):
    """The source tree of a program. In a git work tree: what git tracks or would not ignore."""

    path: str = Field(".", description="Folder of the tree, relative to the spec file.")
    files: Patterns = Field(
        ("*",),
        description=(
            "Patterns that select files of the tree. '*' matches any characters, including '/'; "
            "a leading '!' excludes; the last match wins. Example: ['*', '!data/*']."
        ),
    )


class RecordingSpec(Model):
    """How densely a run is traced and checkpointed. Part of the claims."""

    trace_interval: PositiveInt = Field(4, description="Agent steps covered by one trace record.")
    tensor_interval: PositiveInt = Field(
        1_000,
        description="Agent steps between trace records that also hold a digest of every tensor.",
    )
    checkpoint_interval: PositiveInt = Field(
        250_000, description="Agent steps between checkpoints."
    )
    segment_states: bool = Field(
        False,
        description=(
            "At every checkpoint, keep the state from which training resumes, so that verifiers "
            "can execute single segments (capsule verify --challenge)."
        ),
    )


MAX_MEBIBYTES = 1 << 26  # 64 TiB
MAX_PROCESSES = 1 << 22  # of a Linux system: PID_MAX_LIMIT
MAX_MINUTES = 366 * 24 * 60


class LimitsSpec(Model):
    """What a run may use. Exceeding one stops the run with an error."""

    memory_mb: PositiveInt = Field(16_384, le=MAX_MEBIBYTES, description="Memory, in MB.")
    processes: PositiveInt = Field(
        256, le=MAX_PROCESSES, description="Number of processes and threads."
    )
    disk_mb: PositiveInt = Field(
        32_768, le=MAX_MEBIBYTES, description="Size of the run directory, in MB."
    )
    minutes: PositiveInt = Field(20_160, le=MAX_MINUTES, description="Wall-clock time, in minutes.")
    temporary_mb: PositiveInt = Field(
        512, le=MAX_MEBIBYTES, description="Size of /tmp inside the container, in MB."
    )


class Spec(Model):
    """A whole experiment."""

    schema_id: Literal["capsule/spec/v1"] = Field(
        "capsule/spec/v1", alias="schema", description="Version of the format."
    )
    name: Name = Field(
        description="Name of the experiment; run directories and bundles are named after it."
    )
    image: ImageSpec = Field(ImageSpec(), description="The container image.")
    accelerator: Annotated[CpuAccelerator | CudaAccelerator, Field(discriminator="kind")] = Field(
        CpuAccelerator(), description="The hardware that trains."
    )
    determinism: DeterminismSpec = Field(DeterminismSpec(), description="The determinism layers.")
    entropy: EntropySpec = Field(
        EntropySpec(), description="The operating system's randomness, and the clock."
    )
    seeds: SeedsSpec = Field(SeedsSpec(), description="The seeds of the random streams.")
    code: CodeSpec | None = Field(None, description="The source tree of trainer.command.")
    environment: EnvironmentSpec | None = Field(
        None, description="The task; required unless the trainer is a command."
    )
    trainer: TrainerSpec = Field(description="The algorithm, or a command.")
    evaluation: EvaluationSpec = Field(EvaluationSpec(), description="How networks are evaluated.")
    recording: RecordingSpec = Field(
        RecordingSpec(), description="How densely the run is recorded."
    )
    limits: LimitsSpec = Field(LimitsSpec(), description="Resources that the run may use.")

    @field_validator("accelerator", mode="before")
    @classmethod
    def _cpu_unless_named(cls, accelerator: Any) -> Any:
        if isinstance(accelerator, dict) and "kind" not in accelerator:
            return {"kind": "cpu", **accelerator}
        return accelerator

    @model_validator(mode="after")
    def _consistent(self) -> Spec:
        if isinstance(self.trainer, CommandTrainer):
            _check_program(self)
        else:
            _check_training(self, self.trainer)
        return self

    def digest(self) -> str:
        """Return the SHA-256 of its canonical JSON, hexadecimal."""
        return sha256_hex(self.document())

    def training(self) -> TrainingSpec:
        """Return the same spec, known to train with one of Capsule's own algorithms.

        Raises:
            TypeError: It runs a command.
        """
        if isinstance(self.trainer, CommandTrainer):
            raise TypeError("the spec runs a command")
        return TrainingSpec.model_construct(**dict(self))


class TrainingSpec(Spec):
    """A spec that trains with one of Capsule's own algorithms (:meth:`Spec.training`)."""

    environment: EnvironmentSpec
    trainer: AlgorithmTrainer


def _check_program(spec: Spec) -> None:
    """Refuse sections that a program of its own has no use for: they would promise something."""
    defaults = {"environment": None, "evaluation": EvaluationSpec(), "recording": RecordingSpec()}
    for section, default in defaults.items():
        if getattr(spec, section) != default:
            raise ValueError(f"{section} does not apply to trainer.command: leave it out")
    if spec.seeds.streams:
        raise ValueError(
            "seeds.streams does not apply to trainer.command: give it seeds as arguments"
        )


MAX_UNROLLS_OF_A_RECORD = 8_192  # below 1 MiB; the tensors of 64 members take as much again

_FITTING_NETWORKS = {  # by suite, and for Gymnasium by frames
    "atari": ("nature", "shallow", "residual"),
    "gymnasium, flat": ("mlp",),
    "gymnasium, image": ("nature", "shallow", "residual", "small-conv"),
    "minatar": ("small-conv",),
}


def _check_training(spec: Spec, trainer: AlgorithmTrainer) -> None:
    if spec.environment is None:
        raise ValueError("environment is missing: trainer.algorithm needs one")
    if spec.code is not None:
        raise ValueError("code does not apply to trainer.algorithm: only to trainer.command")
    unit = trainer.interval_steps
    for section, name in (
        ("recording", "trace_interval"),
        ("recording", "tensor_interval"),
        ("recording", "checkpoint_interval"),
        ("evaluation", "interval"),
    ):
        value = getattr(getattr(spec, section), name)
        if value % unit:
            raise ValueError(
                f"{section}.{name} {value} is not a multiple of the {unit} steps between parameter "
                "updates"
            )
    if spec.recording.tensor_interval % spec.recording.trace_interval:
        raise ValueError(
            f"recording.tensor_interval {spec.recording.tensor_interval} is not a multiple of "
            f"recording.trace_interval {spec.recording.trace_interval}"
        )
    recording = spec.recording
    if recording.segment_states and recording.checkpoint_interval % recording.trace_interval:
        raise ValueError(
            f"recording.segment_states: recording.checkpoint_interval "
            f"{recording.checkpoint_interval} is not a multiple of recording.trace_interval "
            f"{recording.trace_interval}"
        )
    _check_network(spec.environment, trainer)
    if isinstance(trainer, ImpalaTrainer):
        _check_record(spec.recording, trainer)
    _check_language(spec.environment, trainer)
    _check_evaluation(spec, spec.environment, trainer)
    _check_tasks(spec, spec.environment, trainer)
    if isinstance(trainer, ImpalaTrainer) and trainer.population is not None:
        references_of(spec.environment, trainer.population)


def _check_evaluation(spec: Spec, environment: EnvironmentSpec, trainer: AlgorithmTrainer) -> None:
    """Refuse an evaluation that the trainer or the suite cannot do."""
    if spec.evaluation.actions == "sampled" and not isinstance(trainer, ImpalaTrainer):
        raise ValueError(
            f"evaluation.actions 'sampled' does not apply to trainer.algorithm "
            f"{trainer.algorithm!r}, whose Q-values are not probabilities: use 'greedy'"
        )
    if spec.evaluation.action_sweep and not isinstance(environment, AtariEnvironment):
        raise ValueError(
            f"evaluation.action_sweep does not apply to environment.suite {environment.suite!r}, "
            "which counts no lives: leave it out"
        )
    if spec.evaluation.start_set is not None:
        _check_start_set(environment, spec.evaluation.start_set)


def _check_start_set(environment: EnvironmentSpec, pinned: StartSet) -> None:
    """Refuse starts of another task."""
    full = isinstance(environment, AtariEnvironment) and environment.full_action_set
    for name, value, made in (
        ("the task", task_name(environment), pinned.task),
        ("full_action_set", full, pinned.full_action_set),
    ):
        if value != made:
            raise ValueError(
                f"evaluation.start_set was made where {name} is {made!r}, here it is {value!r}: "
                "make a start set with a run of this environment"
            )


def _check_network(environment: EnvironmentSpec, trainer: AlgorithmTrainer) -> None:
    """Refuse a network that cannot read the environment's frames."""
    kind: str = environment.suite
    said = f"environment.suite {kind!r}"
    if isinstance(environment, GymnasiumEnvironment):
        kind, said = f"{kind}, {environment.frames}", f"environment.frames {environment.frames!r}"
    offered = get_args(type(trainer).model_fields["network"].annotation)
    fitting = [name for name in _FITTING_NETWORKS[kind] if name in offered]
    if trainer.network not in fitting:
        raise ValueError(
            f"trainer.network {trainer.network!r} does not fit {said}; use {fitting[0]!r}"
        )


def _check_tasks(spec: Spec, environment: EnvironmentSpec, trainer: AlgorithmTrainer) -> None:
    """Refuse several games where they do not fit."""
    if not isinstance(environment, AtariEnvironment) or not environment.further_games:
        return
    games = (environment.game, *environment.further_games)
    if trainer.algorithm != "impala":
        raise ValueError(
            f"environment.further_games do not apply to trainer.algorithm {trainer.algorithm!r}: "
            "leave them out, or use 'impala'"
        )
    if len({*games}) < len(games):
        raise ValueError(f"environment.further_games: a game is named twice in {', '.join(games)}")
    if not environment.full_action_set:
        raise ValueError("environment.further_games need full_action_set: true")
    if not spec.evaluation.noop_max:
        raise ValueError("environment.further_games need evaluation.noop_max, e.g. 30")
    for name, number in (
        ("trainer.actors", trainer.actors),
        ("evaluation.starts", spec.evaluation.starts),
    ):
        if number % len(games):
            raise ValueError(f"{name} {number} is not a multiple of the {len(games)} games")


def _check_record(recording: RecordingSpec, trainer: ImpalaTrainer) -> None:
    """Refuse trace records that would name too many unrolls."""
    members = 1 if trainer.population is None else trainer.population.members
    unrolls = members * (recording.trace_interval // trainer.unroll_length)
    if unrolls > MAX_UNROLLS_OF_A_RECORD:
        raise ValueError(
            f"recording.trace_interval {recording.trace_interval} covers {unrolls} unrolls, each "
            f"of which a record names: at most {MAX_UNROLLS_OF_A_RECORD}"
        )


def _check_language(environment: EnvironmentSpec, trainer: AlgorithmTrainer) -> None:
    """Refuse instructions that nobody reads, and a reader without any."""
    told = environment.instruction if isinstance(environment, GymnasiumEnvironment) else None
    language = trainer.language if isinstance(trainer, ImpalaTrainer) else None
    if told is not None and not isinstance(trainer, ImpalaTrainer):
        raise ValueError(
            f"environment.instruction {told!r} is not read by trainer.algorithm "
            f"{trainer.algorithm!r}: leave it out, or use 'impala'"
        )
    if told is not None and language is None:
        raise ValueError(
            f"environment.instruction {told!r} is not read: say in trainer.language which words "
            "it has, or leave it out"
        )
    if told is None and language is not None:
        raise ValueError(
            "trainer.language has nothing to read: name in environment.instruction the entry of a "
            "Gymnasium observation that is an instruction, or leave it out"
        )


# Fields of DeterminismSpec of which every value but null is as strict as the default.
_EQUALLY_STRICT = {"hash_seed", "threads", "cores", "cublas_workspace"}


def relaxations(spec: Spec) -> list[str]:
    """Name each determinism layer that ``spec`` weakens, as ``section.field=value``."""
    strict = DeterminismSpec()
    weaker = {
        name: value
        for name, value in spec.determinism
        if value is None or (name not in _EQUALLY_STRICT and value != getattr(strict, name))
    }
    layers = [f"determinism.{name}={value}" for name, value in sorted(weaker.items())]
    clock = ["entropy.clock=system"] if _clock_is_left(spec) else []
    return layers + clock + _left_random(spec.entropy) + _unclaimed(spec.trainer)


def calendar_clock(spec: Spec) -> Literal["system", "fixed", "virtual"]:
    """Return the calendar clock of a run: as the spec says, or the default for its trainer."""
    if spec.entropy.clock is not None:
        return spec.entropy.clock
    return "virtual" if isinstance(spec.trainer, CommandTrainer) else "system"


def _clock_is_left(spec: Spec) -> bool:
    """Tell whether a program reads the machine's clock. Capsule's trainers have no use for it."""
    return isinstance(spec.trainer, CommandTrainer) and calendar_clock(spec) == "system"


def _left_random(entropy: EntropySpec) -> list[str]:
    """Name what of the system's randomness reaches a run, or may."""
    weaker = {
        "mode": entropy.mode == "system",
        "on_exhaustion": entropy.mode == "recorded" and entropy.on_exhaustion == "virtual",
        "supervised": not entropy.supervised,
        "address_randomization": entropy.address_randomization,
    }
    return [f"entropy.{name}={getattr(entropy, name)}" for name, weak in weaker.items() if weak]


def _unclaimed(trainer: AlgorithmTrainer | CommandTrainer) -> list[str]:
    """Name what a program writes and does not claim."""
    if not isinstance(trainer, CommandTrainer):
        return []
    outputs = [f"trainer.outputs={pattern}" for pattern in trainer.outputs if pattern != "*"]
    return outputs + ["trainer.standard_output=False"] * (not trainer.standard_output)
