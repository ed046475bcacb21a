"""Checks of the spec's sections against one another.

Each check yields a message for everything that it finds, so that one reading of a spec reports all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, get_args

from capsule.experiment.evaluation import EvaluationSpec, StartSet
from capsule.experiment.fields import reject_all
from capsule.experiment.spec.accelerator import CpuAccelerator, CudaAccelerator
from capsule.experiment.spec.environment import (
    AtariEnvironment,
    EnvironmentSpec,
    GymnasiumEnvironment,
    references_of,
    task_name,
)
from capsule.experiment.spec.recording import RecordingSpec
from capsule.experiment.trainers import AlgorithmTrainer, ImpalaTrainer, LayersSpec, ModuleSpec

if TYPE_CHECKING:
    from capsule.experiment.spec.document import Spec, TrainingSpec

MAX_UNROLLS_OF_A_RECORD = 8_192  # below 1 MiB; the tensors of 64 members take as much again

_FITTING_NETWORKS = {  # by suite, and for Gymnasium by frames
    "atari": ("nature", "shallow", "residual"),
    "gymnasium, flat": ("mlp",),
    "gymnasium, image": ("nature", "shallow", "residual", "small-conv"),
    "minatar": ("small-conv",),
}


def check_program(spec: Spec) -> None:
    """Check that a spec that runs a command has no sections that only algorithms use.

    Raises:
        ValueError: Some are given, and would promise what the run does not do. The message has a
            line for each.
    """
    reject_all(_of_program(spec))


def _of_program(spec: Spec) -> Iterator[str]:
    for section, value, default in (
        ("environment", spec.environment, None),
        ("evaluation", spec.evaluation, EvaluationSpec()),
        ("recording", spec.recording, RecordingSpec()),
    ):
        if value != default:
            yield f"{section} does not apply to trainer.command: remove it"
    if _graphs(spec.accelerator):
        yield (
            "accelerator.cuda_graphs does not apply to trainer.command, which captures graphs "
            "itself: remove it"
        )
    if spec.seeds.streams:
        yield "seeds.streams does not apply to trainer.command: give it seeds as arguments"


def check_training(spec: TrainingSpec) -> None:
    """Check the sections of a spec that trains with an algorithm.

    Raises:
        ValueError: Sections do not fit one another. The message has a line for each misfit.
    """
    reject_all(_of_training(spec))


def _of_training(spec: TrainingSpec) -> Iterator[str]:
    if spec.code is not None and not _has_own_modules(spec):
        yield (
            "code is not used: it is the source tree of trainer.command, of trainer.network.module "
            "or of environment.modules of suite 'gymnasium'; remove it, or name a module in one of "
            "these"
        )
    environment, recording, trainer = spec.environment, spec.recording, spec.trainer
    unit = trainer.interval_steps
    # Records, checkpoints and evaluations are made between parameter updates only.
    for name, value in (
        ("recording.trace_interval", recording.trace_interval),
        ("recording.tensor_interval", recording.tensor_interval),
        ("recording.checkpoint_interval", recording.checkpoint_interval),
        ("evaluation.interval", spec.evaluation.interval),
    ):
        if value % unit:
            yield (
                f"{name} {value} is not a multiple of the {unit} steps between parameter updates"
            )
    if recording.tensor_interval % recording.trace_interval:
        yield (
            f"recording.tensor_interval {recording.tensor_interval} is not a multiple of "
            f"recording.trace_interval {recording.trace_interval}"
        )
    # A state is kept at the end of a trace record: segment_states.check_state() compares the head
    # of the trace there with that of the checkpoint.
    if recording.segment_states and recording.checkpoint_interval % recording.trace_interval:
        yield (
            f"recording.segment_states: recording.checkpoint_interval "
            f"{recording.checkpoint_interval} is not a multiple of recording.trace_interval "
            f"{recording.trace_interval}"
        )
    yield from _of_network(environment, trainer)
    yield from _of_module(spec.accelerator, trainer)
    yield from _of_graphs(spec.accelerator, trainer)
    if isinstance(trainer, ImpalaTrainer):
        yield from _of_record(recording, trainer)
    yield from _of_language(environment, trainer)
    yield from _of_evaluation(spec)
    yield from _of_tasks(spec)
    if isinstance(trainer, ImpalaTrainer) and trainer.population is not None:
        try:
            references_of(environment, trainer.population)
        except ValueError as error:
            yield str(error)


def _of_evaluation(spec: TrainingSpec) -> Iterator[str]:
    """Find an evaluation that the trainer or the suite does not support."""
    evaluation, environment, trainer = spec.evaluation, spec.environment, spec.trainer
    if evaluation.actions == "sampled" and not isinstance(trainer, ImpalaTrainer):
        yield (
            f"evaluation.actions 'sampled' does not apply to trainer.algorithm "
            f"{trainer.algorithm!r}, whose Q-values are not probabilities: use 'greedy'"
        )
    if evaluation.action_sweep and not isinstance(environment, AtariEnvironment):
        yield (
            f"evaluation.action_sweep does not apply to environment.suite {environment.suite!r}, "
            "which counts no lives: remove it"
        )
    if evaluation.start_set is not None:
        yield from _of_start_set(environment, evaluation.start_set)


def _of_start_set(environment: EnvironmentSpec, pinned: StartSet) -> Iterator[str]:
    """Find starts of another task."""
    full = isinstance(environment, AtariEnvironment) and environment.full_action_set
    for name, value, made in (
        ("the task", task_name(environment), pinned.task),
        ("full_action_set", full, pinned.full_action_set),
    ):
        if value != made:
            yield (
                f"evaluation.start_set was made in an environment where {name} is {made!r}, but in "
                f"this spec it is {value!r}: make a start set with a run of this environment"
            )


def _of_network(environment: EnvironmentSpec, trainer: AlgorithmTrainer) -> Iterator[str]:
    """Find a network that cannot read the environment's frames."""
    kind: str = environment.suite
    said = f"environment.suite {kind!r}"
    if isinstance(environment, GymnasiumEnvironment):
        kind, said = f"{kind}, {environment.frames}", f"environment.frames {environment.frames!r}"
    network = trainer.network
    if isinstance(network, ModuleSpec):
        return
    if isinstance(network, LayersSpec):
        flat = _FITTING_NETWORKS[kind] == ("mlp",)
        if flat == bool(network.convolutions):
            yield (
                f"trainer.network.convolutions does not fit {said}, whose frames are "
                + ("vectors: remove it" if flat else "images: declare one layer or more")
            )
        return
    # The first member of the union is the Literal with the names of networks.
    named, *_ = get_args(type(trainer).model_fields["network"].annotation)
    offered = get_args(get_args(named)[0])
    fitting = [name for name in _FITTING_NETWORKS[kind] if name in offered]
    if network not in fitting:
        yield f"trainer.network {network!r} does not fit {said}; use {fitting[0]!r}"


def _of_module(
    accelerator: CpuAccelerator | CudaAccelerator, trainer: AlgorithmTrainer
) -> Iterator[str]:
    """Find a user module under a profile that promises the same bits on other processors."""
    if isinstance(trainer.network, ModuleSpec) and accelerator.numerics != "native":
        yield (
            f"trainer.network.module {trainer.network.module!r} requires accelerator.numerics "
            f"'native': {accelerator.numerics!r} promises the same bits on other processors, but "
            "only for Capsule's own layers"
        )


def _has_own_modules(spec: TrainingSpec) -> bool:
    if isinstance(spec.trainer.network, ModuleSpec):
        return True
    task = spec.environment
    return isinstance(task, GymnasiumEnvironment) and bool(task.modules)


def _graphs(accelerator: CpuAccelerator | CudaAccelerator) -> bool:
    return isinstance(accelerator, CudaAccelerator) and accelerator.cuda_graphs


def _of_graphs(
    accelerator: CpuAccelerator | CudaAccelerator, trainer: AlgorithmTrainer
) -> Iterator[str]:
    """Find CUDA graphs of updates that are not known to keep to the rules of a capture."""
    if not _graphs(accelerator):
        return
    unsupported = None
    if trainer.algorithm == "impala":
        unsupported = "by trainer.algorithm 'impala'"
    elif isinstance(trainer.network, ModuleSpec):
        unsupported = (
            f"with trainer.network.module {trainer.network.module!r}, which may wait for the device"
        )
    if unsupported is not None:
        yield f"accelerator.cuda_graphs is not supported {unsupported}: remove it"


def _of_tasks(spec: TrainingSpec) -> Iterator[str]:
    """Find several games where the other sections do not support them."""
    evaluation, environment, trainer = spec.evaluation, spec.environment, spec.trainer
    if not isinstance(environment, AtariEnvironment) or not environment.further_games:
        return
    games = (environment.game, *environment.further_games)
    if trainer.algorithm != "impala":
        yield (
            f"environment.further_games does not apply to trainer.algorithm {trainer.algorithm!r}: "
            "remove it, or use 'impala'"
        )
        return  # the others have no actors
    if len({*games}) < len(games):
        yield f"environment.further_games: a game is named twice in {', '.join(games)}"
    if not environment.full_action_set:
        yield "environment.further_games requires environment.full_action_set: true"
    if not evaluation.noop_max:
        yield "environment.further_games requires evaluation.noop_max greater than 0, e.g. 30"
    # Actors and starts take turns over the games, as many for each.
    for name, number in (
        ("trainer.actors", trainer.actors),
        ("evaluation.starts", evaluation.starts),
    ):
        if number % len(games):
            yield f"{name} {number} is not a multiple of the {len(games)} games"


def _of_record(recording: RecordingSpec, trainer: ImpalaTrainer) -> Iterator[str]:
    """Find trace records that would name too many unrolls."""
    members = 1 if trainer.population is None else trainer.population.members
    unrolls = members * (recording.trace_interval // trainer.unroll_length)
    if unrolls > MAX_UNROLLS_OF_A_RECORD:
        yield (
            f"recording.trace_interval {recording.trace_interval} covers {unrolls} unrolls, but a "
            f"trace record can name {MAX_UNROLLS_OF_A_RECORD} at most"
        )


def _of_language(environment: EnvironmentSpec, trainer: AlgorithmTrainer) -> Iterator[str]:
    """Find instructions that the trainer does not read, and a reader without instructions."""
    told = environment.instruction if isinstance(environment, GymnasiumEnvironment) else None
    language = trainer.language if isinstance(trainer, ImpalaTrainer) else None
    if told is not None and not isinstance(trainer, ImpalaTrainer):
        yield (
            f"environment.instruction {told!r} is not read by trainer.algorithm "
            f"{trainer.algorithm!r}: remove it, or use 'impala'"
        )
    elif told is not None and language is None:
        yield (
            f"environment.instruction {told!r} is not read: list its words in "
            "trainer.language, or remove it"
        )
    elif told is None and language is not None:
        yield (
            "trainer.language requires environment.instruction, the entry of a Gymnasium "
            "observation that is an instruction: name this entry, or remove trainer.language"
        )
