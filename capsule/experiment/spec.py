"""The spec: what a researcher writes.

Every model is frozen, refuses unknown keys and converts nothing silently. Units are part of the
names. A *step* is one agent step: one action chosen by the policy (``frame_skip`` emulator frames
on Atari).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

StreamName = Literal[
    "environment", "no-op", "exploration", "initialization", "minibatch", "evaluation"
]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=2**53 - 1)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$")]
Requirement = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9,._-]+\])?.*$")
]
DebianName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9+.-]+$")]
VersionConstraint = Annotated[str, Field(pattern=r"^(==|>=|<=|>|<|~=)?[0-9][0-9.*]*(,.*)?$")]


class Model(BaseModel):
    """Base of every document model: frozen, strict, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SourcesSpec(Model):
    """Where packages come from. Never part of a lock: locks hold names and digests only."""

    index: str | None = Field(
        None, description="Main package index; default: the machine's own, else PyPI."
    )
    extra_indexes: tuple[str, ...] = Field(
        (), description="Further package indexes, beside the machine's own."
    )
    find_links: tuple[str, ...] = Field(
        (), description="Folders or pages with wheels, beside the machine's own."
    )
    debian: tuple[str, ...] = Field(
        (), description="Debian mirrors to use instead of the machine's own apt configuration."
    )


class ImageSpec(Model):
    """What the image holds besides Capsule's own training code."""

    base: Literal["debian-12"] = Field("debian-12", description="Base recipe of the image.")
    python: Literal["3.11"] = Field("3.11", description="Python version; Debian 12 ships 3.11.")
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
    debian: tuple[DebianName, ...] = Field((), description="Extra Debian packages.")
    sources: SourcesSpec = SourcesSpec()


class CpuAccelerator(Model):
    """Train on the CPU, under a numerics profile."""

    kind: Literal["cpu"] = "cpu"
    numerics: Literal["avx2", "native"] = Field(
        "avx2",
        description="'avx2' holds every maths library to AVX2 code paths (needs AVX2 and FMA); "
        "'native' lets each use the widest instructions of the machine it runs on.",
    )


class CudaAccelerator(Model):
    """Train on one NVIDIA GPU. A machine that lacks it is an error, never a fall-back."""

    kind: Literal["cuda"]
    cuda: VersionConstraint = Field(description="CUDA runtime the wheels must bring, e.g. '13.0'.")
    cudnn: VersionConstraint = Field(description="cuDNN the wheels must bring, e.g. '>=9.10'.")
    driver: VersionConstraint = Field(description="Driver the machine must have, e.g. '>=580.65'.")
    gpu: str | None = Field(None, description="Exact GPU name, e.g. 'NVIDIA H200'; any if absent.")
    compute_capability: str | None = Field(
        None, pattern=r"^[0-9]+\.[0-9]$", description="e.g. '9.0'; any if absent."
    )


class DeterminismSpec(Model):
    """The determinism layers. Anything weaker than the default is a declared relaxation."""

    hash_seed: Annotated[int, Field(ge=0, le=4294967295)] = Field(
        0, description="PYTHONHASHSEED, set before the interpreter starts."
    )
    threads: PositiveInt = Field(1, description="Maths threads of each library call.")
    algorithms: Literal["error", "warn", "off"] = Field(
        "error", description="torch.use_deterministic_algorithms."
    )
    fill_uninitialized_memory: bool = True
    cudnn_benchmark: bool = False
    tf32: bool = False
    cublas_workspace: Literal[":4096:8", ":16:8"] = ":4096:8"


class EntropySpec(Model):
    """What becomes of the randomness that programs ask the operating system for."""

    mode: Literal["virtual", "recorded", "system"] = Field(
        "virtual",
        description="'virtual' derives it from a key, the process, the thread and a counter; "
        "'recorded' keeps fresh randomness, which verify replays; 'system' leaves it alone.",
    )
    seed: Seed | None = Field(None, description="Key of virtual entropy; default: seeds.root.")
    on_exhaustion: Literal["fail", "virtual"] = Field(
        "fail", description="What a replay gives that asks for more than was recorded."
    )
    supervised: bool = Field(
        True, description="Catch raw system calls, too, which a preloaded library cannot see."
    )
    address_randomization: bool = Field(
        False, description="Load programs at random addresses, which id() and set order show."
    )
    clock: Literal["system", "fixed", "virtual"] = Field(
        "system",
        description="'fixed' stops the calendar clock; 'virtual' advances it by each call. For "
        "programs that seed from the time.",
    )


class SeedsSpec(Model):
    """One root seed; any stream can be overridden alone (the sensitivity study of Nagarajan)."""

    root: Seed = 0
    streams: dict[StreamName, Seed] = Field(
        default_factory=dict, description="Root seed of single streams, overriding 'root'."
    )


class AtariEnvironment(Model):
    """An Atari 2600 game through the Arcade Learning Environment."""

    suite: Literal["atari"]
    game: Annotated[str, Field(pattern=r"^[a-z0-9_]+$")] = Field(
        description="ROM name as in ale-py, e.g. 'breakout'."
    )
    sticky_action_probability: Probability = Field(
        0.0, description="Chance per emulator frame that the previous action is repeated."
    )
    noop_max: NonNegativeInt = Field(30, description="Most no-op actions at an episode's start.")
    frame_skip: PositiveInt = Field(4, description="Frames an action is repeated for.")
    frame_stack: PositiveInt = Field(4, description="Most recent frames given to the agent.")
    terminal_on_life_loss: bool = Field(
        True, description="A lost life ends the return (not the game) during training."
    )
    full_action_set: bool = Field(False, description="All 18 actions instead of the game's own.")
    clip_rewards: bool = Field(True, description="Clip training rewards to -1, 0, 1.")
    max_episode_frames: PositiveInt = Field(108_000, description="Frames before truncation.")


class GymnasiumEnvironment(Model):
    """A Gymnasium environment with a flat observation and discrete actions."""

    suite: Literal["gymnasium"]
    id: str = Field(description="Gymnasium id, e.g. 'CartPole-v1'.")
    max_episode_steps: PositiveInt = 500


class MinAtarEnvironment(Model):
    """A MinAtar game: 10x10 boolean channels (Young and Tian 2019)."""

    suite: Literal["minatar"]
    game: Literal["asterix", "breakout", "freeway", "seaquest", "space_invaders"]
    sticky_action_probability: Probability = 0.1
    max_episode_steps: PositiveInt = 5_000


EnvironmentSpec = Annotated[
    AtariEnvironment | GymnasiumEnvironment | MinAtarEnvironment, Field(discriminator="suite")
]


class DqnTrainer(Model):
    """Deep Q-learning; the defaults are Mnih et al. 2015, Extended Data Table 1."""

    algorithm: Literal["dqn"]
    total_steps: PositiveInt = Field(20_000_000, description="Agent steps of training.")
    network: Literal["nature", "small-conv", "mlp"] = "nature"
    hidden_units: PositiveInt = Field(512, description="Width of the last hidden layer.")
    batch_size: PositiveInt = 32
    replay_capacity: PositiveInt = Field(1_000_000, description="Transitions kept.")
    replay_start: PositiveInt = Field(
        50_000, description="Steps of uniformly random play before learning starts."
    )
    discount: Probability = 0.99
    update_interval: PositiveInt = Field(4, description="Steps between parameter updates.")
    target_interval: PositiveInt = Field(
        10_000, description="Steps between copies into the target network."
    )
    learning_rate: Annotated[float, Field(gt=0)] = 0.00025
    gradient_momentum: Probability = Field(0.95, description="Decay of the mean gradient.")
    squared_gradient_momentum: Probability = 0.95
    min_squared_gradient: Annotated[float, Field(gt=0)] = 0.01
    exploration_initial: Probability = 1.0
    exploration_final: Probability = 0.1
    exploration_final_step: PositiveInt = Field(
        250_000, description="Step at which exploration_final is reached (1M Atari frames)."
    )
    gradient_shards: tuple[PositiveInt, ...] = Field(
        (20, 12),
        description="Batch split whose gradients are summed in this order. Part of the result; how "
        "many threads compute them is not.",
    )
    concurrent: bool = Field(
        True,
        description="Draw the minibatch before the steps it follows, so that acting and learning "
        "overlap under a fixed schedule.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> DqnTrainer:
        if sum(self.gradient_shards) != self.batch_size:
            raise ValueError(
                f"gradient_shards {list(self.gradient_shards)} add up to "
                f"{sum(self.gradient_shards)}, not to batch_size {self.batch_size}"
            )
        for name in ("total_steps", "replay_start", "target_interval"):
            if getattr(self, name) % self.update_interval:
                raise ValueError(
                    f"{name} {getattr(self, name)} is not a multiple of update_interval "
                    f"{self.update_interval}"
                )
        if self.replay_start > self.replay_capacity:
            raise ValueError(
                f"replay_start {self.replay_start} exceeds replay_capacity {self.replay_capacity}"
            )
        if self.replay_start < self.batch_size:
            raise ValueError(
                f"replay_start {self.replay_start} is smaller than batch_size {self.batch_size}"
            )
        if self.exploration_final > self.exploration_initial:
            raise ValueError(
                f"exploration_final {self.exploration_final} exceeds exploration_initial "
                f"{self.exploration_initial}"
            )
        return self


class EvaluationSpec(Model):
    """Greedy evaluation from predetermined starts (Nagarajan et al. 2019, supplement).

    ``candidates`` random action sequences are drawn, ranked by the largest Q-value that the run's
    final network gives their last state, and ``starts`` are drawn from the best ``shortlist``.
    """

    interval: PositiveInt = Field(250_000, description="Steps between evaluated networks.")
    starts: PositiveInt = Field(100, description="Start sequences, one episode each.")
    candidates: PositiveInt = 1000
    shortlist: PositiveInt = 250
    min_actions: NonNegativeInt = 55
    max_actions: NonNegativeInt = 95
    max_minutes: Annotated[float, Field(gt=0)] = Field(
        5.0, description="Cap of an episode, in minutes of play at 60 frames per second."
    )

    @model_validator(mode="after")
    def _consistent(self) -> EvaluationSpec:
        if self.min_actions > self.max_actions:
            raise ValueError(
                f"min_actions {self.min_actions} exceeds max_actions {self.max_actions}"
            )
        if not self.starts <= self.shortlist <= self.candidates:
            raise ValueError(
                f"starts {self.starts} <= shortlist {self.shortlist} <= candidates "
                f"{self.candidates} does not hold"
            )
        return self


class RecordingSpec(Model):
    """How densely a run is traced and checkpointed. Part of the claims."""

    trace_interval: PositiveInt = Field(4, description="Steps covered by one trace record.")
    tensor_interval: PositiveInt = Field(
        1_000, description="Steps between trace records that also digest every tensor."
    )
    checkpoint_interval: PositiveInt = Field(250_000, description="Steps between checkpoints.")


class LimitsSpec(Model):
    """What a run may use. Exceeding one stops the run with an error."""

    memory_mb: PositiveInt = 16_384
    processes: PositiveInt = 256
    disk_mb: PositiveInt = Field(32_768, description="Size of the run directory.")
    minutes: PositiveInt = Field(20_160, description="Wall-clock time.")
    temporary_mb: PositiveInt = Field(512, description="Size of /tmp inside the container.")


class Spec(Model):
    """A whole experiment."""

    schema_id: Literal["capsule/spec/v1"] = Field("capsule/spec/v1", alias="schema")
    name: Name
    image: ImageSpec = ImageSpec()
    accelerator: Annotated[CpuAccelerator | CudaAccelerator, Field(discriminator="kind")] = (
        CpuAccelerator()
    )
    determinism: DeterminismSpec = DeterminismSpec()
    entropy: EntropySpec = EntropySpec()
    seeds: SeedsSpec = SeedsSpec()
    environment: EnvironmentSpec
    trainer: DqnTrainer
    evaluation: EvaluationSpec = EvaluationSpec()
    recording: RecordingSpec = RecordingSpec()
    limits: LimitsSpec = LimitsSpec()

    @model_validator(mode="after")
    def _consistent(self) -> Spec:
        unit = self.trainer.update_interval
        for section, name in (
            ("recording", "trace_interval"),
            ("recording", "tensor_interval"),
            ("recording", "checkpoint_interval"),
            ("evaluation", "interval"),
        ):
            value = getattr(getattr(self, section), name)
            if value % unit:
                raise ValueError(
                    f"{section}.{name} {value} is not a multiple of trainer.update_interval {unit}"
                )
        if self.recording.tensor_interval % self.recording.trace_interval:
            raise ValueError(
                f"recording.tensor_interval {self.recording.tensor_interval} is not a multiple of "
                f"recording.trace_interval {self.recording.trace_interval}"
            )
        expected = {"atari": "nature", "gymnasium": "mlp", "minatar": "small-conv"}
        if self.trainer.network != expected[self.environment.suite]:
            raise ValueError(
                f"trainer.network {self.trainer.network!r} does not fit environment.suite "
                f"{self.environment.suite!r}; use {expected[self.environment.suite]!r}"
            )
        return self


def relaxations(spec: Spec) -> list[str]:
    """Name each determinism layer that ``spec`` weakens, as ``section.field=value``."""
    strict = DeterminismSpec()
    weaker = {
        name: getattr(spec.determinism, name)
        for name in ("algorithms", "fill_uninitialized_memory", "cudnn_benchmark", "tf32")
        if getattr(spec.determinism, name) != getattr(strict, name)
    }
    return [f"determinism.{name}={value}" for name, value in sorted(weaker.items())]


def environment_variables(spec: Spec) -> dict[str, str]:
    """Variables that must be set before the interpreter starts, and reach every child process.

    They are part of the image's configuration and of the plain-process engine alike, so that
    nothing that matters is set by a call in ``main``.
    """
    threads = str(spec.determinism.threads)
    variables = {
        "PYTHONHASHSEED": str(spec.determinism.hash_seed),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTHONUTF8": "1",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "OMP_DYNAMIC": "FALSE",
        "MKL_DYNAMIC": "FALSE",
        "TZ": "UTC",
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
    }
    if spec.accelerator.kind == "cuda":
        variables |= {
            "CUBLAS_WORKSPACE_CONFIG": spec.determinism.cublas_workspace,
            "NVIDIA_TF32_OVERRIDE": "1" if spec.determinism.tf32 else "0",
            "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        }
    elif spec.accelerator.numerics == "avx2":
        variables |= {
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "MKL_CBWR": "AVX2",
            "OPENBLAS_CORETYPE": "Haswell",
            "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL",
            "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX512DQ,-AVX512CD",
        }
    return variables
