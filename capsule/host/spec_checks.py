"""Settings that a run would ignore, or with which it is sure to fail.

They are rejected where a spec is read for a new lock, and not by the models: those also read the
locks and bundles of earlier versions, which may have such settings. The training code contains the
models, so a check there would change every lock.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from capsule.experiment.evaluation import EvaluationSpec
from capsule.experiment.fields import is_given
from capsule.experiment.spec import (
    AtariEnvironment,
    DeterminismSpec,
    EnvironmentSpec,
    GymnasiumEnvironment,
    Spec,
    StreamName,
    TrainingSpec,
)
from capsule.experiment.trainers import (
    CommandTrainer,
    DqnTrainer,
    ImpalaTrainer,
    LayersSpec,
    ModuleSpec,
    R2d2Trainer,
)
from capsule.host.folders import user_path
from capsule.host.validation import FIX_OF_PACKAGES, Wrong
from capsule.host.yaml_document import FieldPath, dotted

_SCHEMES = ("https", "http", "file")  # of package indexes and mirrors
_OF_REQUESTS = ("batch_invariance", "request_seeds", "deterministic_routing")
_FRAMES_PER_MINUTE = 60 * 60
# As in capsule.training.dqn.replay: of two entries, neither need be a transition.
_MIN_TRANSITIONS = 3
# What one document of a bundle can hold: readers accept 64 MiB, 2,000,000 values and 10,000 files
# (docs/hostile-bundles.md). Each checkpoint has two files if its state is kept; an episode has two
# values. A checkpoint also has a digest for every tensor, whose number is known only when training
# starts (CAP-T134).
_MAX_CHECKPOINTS, _MAX_EPISODES = 4_000, 500_000
_SIDES = {"atari": 84, "minatar": 10}  # rows and columns of the frames, where the suite has them
# As capsule.training.networks.language splits an instruction.
_WORD = re.compile(r"[^\s,.;:!?]+")
# A path, an address or the name of a file. Some are valid names of packages, too: a resolver would
# take 'requirements.txt' for the package requirements-txt, which anyone may publish.
_PLACE = re.compile(r"[^;@]*/.*|\S*\.(txt|in|toml|yml|whl|zip|gz)", re.IGNORECASE | re.DOTALL)


def wrong_settings(spec: Spec) -> Iterator[Wrong]:
    """Yield the settings of a spec that have no effect, that name no place, or that end the run."""
    trainer = spec.trainer
    yield from _of_places(spec)
    yield from _of_packages(spec)
    yield from _randomness(spec)
    if not isinstance(trainer, ImpalaTrainer):
        yield from _without_requests(spec.determinism, trainer)
    if not isinstance(trainer, CommandTrainer):
        yield from _of_training(spec.training())


def _of_places(spec: Spec) -> Iterator[Wrong]:
    """Yield paths and addresses that cannot lead anywhere on this machine."""
    for path, text in _places(spec):
        try:
            scheme = "" if path[-1] == "path" else urlsplit(text).scheme
            if _is_address(path):
                if scheme not in _SCHEMES:
                    raise ValueError(f"an address begins with {', '.join(_SCHEMES)}")
            elif not scheme:
                user_path(text)
        except ValueError as error:
            yield Wrong(path, f": {text!r} is not usable: {error}", f"Change {dotted(path)}.")


def _places(spec: Spec) -> Iterator[tuple[FieldPath, str]]:
    """Yield the paths and addresses of a spec, with their fields."""
    if spec.code is not None:
        yield ("code", "path"), spec.code.path
    for name, data in (spec.data or {}).items():
        for field, text in (("path", data.path), ("url", data.url)):
            if text is not None:
                yield ("data", name, field), text
    if spec.image.sources.index is not None:
        yield ("image", "sources", "index"), spec.image.sources.index
    for field in ("extra_indexes", "find_links", "debian"):
        for position, text in enumerate(getattr(spec.image.sources, field)):
            yield ("image", "sources", field, position), text


def _is_address(path: FieldPath) -> bool:
    """Tell whether a field takes addresses only: pip, uv or Capsule would ignore a path there."""
    return path[0] == "image" and path[2] in ("index", "extra_indexes", "debian")


def _of_training(spec: TrainingSpec) -> Iterator[Wrong]:
    trainer, task = spec.trainer, spec.environment
    if isinstance(trainer, ImpalaTrainer):
        yield from _of_impala(trainer)
        yield from _of_rewards(trainer, task)
    if isinstance(trainer, R2d2Trainer):
        yield from _of_lives(trainer, task)
        yield from _of_sequences(trainer)
    if isinstance(trainer, DqnTrainer):
        yield from _of_transitions(trainer)
    if isinstance(task, AtariEnvironment):
        yield from _of_noops(task)
    yield from _of_network(spec)
    yield from _of_threads(spec)
    yield from _of_streams(spec)
    yield from _of_evaluation(spec)
    yield from _of_intervals(spec)
    if spec.recording.segment_states and spec.entropy.mode == "recorded":
        yield _wrong(
            "recording.segment_states",
            " does not apply to entropy.mode 'recorded', as it is not known how much of the "
            "recorded randomness was used before a segment",
        )
    seen = task.observation if isinstance(task, GymnasiumEnvironment) else None
    if seen is not None and seen == getattr(task, "instruction", None):
        yield _wrong(
            "environment.observation",
            f" {seen!r} is the instruction, too",
            "Name the entry that is the image.",
        )


def _of_packages(spec: Spec) -> Iterator[Wrong]:
    for number, text in enumerate(spec.image.packages):
        if _PLACE.fullmatch(text):
            yield _wrong(
                f"image.packages.{number}",
                f": {text!r} is a file or an address, not a package",
                FIX_OF_PACKAGES,
            )


def _randomness(spec: Spec) -> Iterator[Wrong]:
    entropy, seeds = spec.entropy, spec.seeds
    if seeds.random and isinstance(spec.trainer, CommandTrainer):
        yield _wrong(
            "seeds.random",
            " does not apply to trainer.command, which draws its seeds itself or takes '{seed}'",
        )
    if getattr(spec.trainer, "resumable", False) and entropy.mode == "recorded":
        yield _wrong(
            "trainer.resumable",
            " does not apply to entropy.mode 'recorded': such a run cannot be resumed",
        )
    if entropy.seed is not None and entropy.mode == "system":
        yield _wrong("entropy.seed", " does not apply to entropy.mode 'system'")
    if entropy.seed is not None and (entropy.mode, entropy.on_exhaustion) == ("recorded", "fail"):
        yield _wrong(
            "entropy.seed",
            " does not apply to entropy.mode 'recorded', unless entropy.on_exhaustion is 'virtual'",
        )
    if entropy.on_exhaustion != "fail" and entropy.mode != "recorded":
        yield _wrong("entropy.on_exhaustion", " applies to entropy.mode 'recorded' only")
    if "no-op" in seeds.streams and not getattr(spec.environment, "noop_max", 0):
        yield _wrong(
            "seeds.streams.no-op", ": the environment has no no-ops at the start of an episode"
        )


def _without_requests(
    determinism: DeterminismSpec, trainer: CommandTrainer | DqnTrainer | R2d2Trainer
) -> Iterator[Wrong]:
    whose = (
        "trainer.command"
        if isinstance(trainer, CommandTrainer)
        else f"trainer.algorithm {trainer.algorithm!r}"
    )
    for name in _OF_REQUESTS:
        # The actors of R2D2 that share a process are answered in one batch.
        if isinstance(trainer, R2d2Trainer) and name == "batch_invariance":
            continue
        if not getattr(determinism, name):
            reason = f" false does not apply to {whose}, which has no actors that send requests"
            yield _wrong(f"determinism.{name}", reason)


def _of_impala(trainer: ImpalaTrainer) -> Iterator[Wrong]:
    if trainer.network == "residual" and is_given(trainer, "hidden_units"):
        yield _wrong(
            "trainer.hidden_units",
            f" {trainer.hidden_units} does not apply to trainer.network 'residual', which has 256",
        )
    if trainer.correction != "epsilon" and is_given(trainer, "correction_epsilon"):
        yield _wrong(
            "trainer.correction_epsilon",
            f" {trainer.correction_epsilon} does not apply to trainer.correction "
            f"{trainer.correction!r}",
        )
    yield from _of_ratios(trainer)
    if trainer.replay is not None and trainer.replay.capacity < trainer.replay.unrolls:
        yield _wrong(
            "trainer.replay.capacity",
            f" {trainer.replay.capacity} is smaller than the {trainer.replay.unrolls} unrolls "
            "that a batch replays",
            "Raise it.",
        )
    words = () if trainer.language is None else trainer.language.vocabulary
    for number, word in enumerate(() if words == "babyai" else words):
        if _WORD.fullmatch(word) is None or word != word.lower():
            yield _wrong(
                f"trainer.language.vocabulary.{number}",
                f": {word!r} is not one word in lower case",
                "Split it at spaces, drop punctuation, and write it in lower case.",
            )


def _of_ratios(trainer: ImpalaTrainer) -> Iterator[Wrong]:
    """Yield the thresholds of importance weights that the correction does not have."""
    whose = f"trainer.correction {trainer.correction!r}"
    rho_bar, c_bar = trainer.rho_bar, trainer.c_bar
    if trainer.correction in ("none", "epsilon") and is_given(trainer, "rho_bar"):
        yield _wrong("trainer.rho_bar", f" {rho_bar} does not apply to {whose}")
    # A smaller one may be needed, as it must not exceed rho_bar.
    if trainer.correction != "v-trace" and is_given(trainer, "c_bar") and rho_bar >= 1.0:
        yield _wrong("trainer.c_bar", f" {c_bar} does not apply to {whose}")


def _of_rewards(trainer: ImpalaTrainer, task: EnvironmentSpec) -> Iterator[Wrong]:
    clipped = isinstance(task, AtariEnvironment) and task.clip_rewards
    if clipped and trainer.reward_clipping == "none":
        yield _wrong(
            "trainer.reward_clipping",
            " 'none' has no effect, because environment.clip_rewards clips the rewards",
            "Set environment.clip_rewards to false, too, or remove trainer.reward_clipping.",
        )


def _of_lives(trainer: R2d2Trainer, task: EnvironmentSpec) -> Iterator[Wrong]:
    ends = isinstance(task, AtariEnvironment) and task.terminal_on_life_loss
    if trainer.life_loss == "reset" and not ends:
        yield _wrong(
            "trainer.life_loss",
            " 'reset' applies to environment.suite 'atari' with terminal_on_life_loss: true only",
        )


def _of_sequences(trainer: R2d2Trainer) -> Iterator[Wrong]:
    """Yield a replay memory that can be without a sequence when a minibatch is drawn.

    The last sequence of an episode may begin burn_in + sequence_length steps before its end, and
    the first one of the next episode is finished sequence_length + n_step steps after it.
    """
    needed = trainer.burn_in + 2 * trainer.sequence_length + trainer.n_step
    share = trainer.replay_capacity // trainer.actors
    if share < needed:
        yield _wrong(
            "trainer.replay_capacity",
            f" {trainer.replay_capacity} gives each of {trainer.actors} actors {share} steps, "
            f"which may contain no sequence; it needs {needed}: burn_in + 2 * sequence_length + "
            "n_step",
            f"Make it at least {needed * trainer.actors}.",
        )


def _of_transitions(trainer: DqnTrainer) -> Iterator[Wrong]:
    """Yield a replay memory that can be without a transition when a minibatch is drawn."""
    for field in ("replay_start", "replay_capacity"):
        steps = getattr(trainer, field)
        if steps < _MIN_TRANSITIONS:
            yield _wrong(
                f"trainer.{field}",
                f" {steps} is too small: so few steps may contain no transition",
                f"Make it at least {_MIN_TRANSITIONS}.",
            )


def _of_noops(task: AtariEnvironment) -> Iterator[Wrong]:
    if task.noop_max >= task.max_episode_frames:
        yield _wrong(
            "environment.noop_max",
            f" {task.noop_max} is not less than environment.max_episode_frames "
            f"{task.max_episode_frames}: an episode could end with the no-ops at its start",
            f"Make it at most {task.max_episode_frames - 1}, or raise "
            "environment.max_episode_frames.",
        )


def _of_streams(spec: TrainingSpec) -> Iterator[Wrong]:
    """Yield the seeds of streams from which nothing is drawn."""
    trainer, task = spec.trainer, spec.environment
    if isinstance(task, AtariEnvironment) and not task.sticky_action_probability:
        yield from _of_stream(spec, "environment", "the game has no sticky actions")
    if isinstance(trainer, ImpalaTrainer) and trainer.replay is None:
        yield from _of_stream(spec, "minibatch", "trainer.replay is null")


def _of_stream(spec: TrainingSpec, name: StreamName, reason: str) -> Iterator[Wrong]:
    if name in spec.seeds.streams:
        yield _wrong(f"seeds.streams.{name}", f": nothing is drawn from it, as {reason}")


def _of_evaluation(spec: TrainingSpec) -> Iterator[Wrong]:
    minutes, task = spec.evaluation.max_minutes, spec.environment
    frames = int(minutes * _FRAMES_PER_MINUTE)  # as an evaluation counts them
    if frames < getattr(task, "frame_skip", 1):
        yield _wrong(
            "evaluation.max_minutes",
            f" {minutes} is less than one step, so that every return would be 0",
            "Raise or remove evaluation.max_minutes; a minute has 3600 emulator frames.",
        )
    most = getattr(task, "max_episode_frames", math.inf)
    # The default may be longer: a spec that has shorter episodes need not repeat their length here.
    if frames > most and is_given(spec.evaluation, "max_minutes"):
        yield _wrong(
            "evaluation.max_minutes",
            f" {minutes} has no effect, because environment.max_episode_frames {most} "
            f"({most / _FRAMES_PER_MINUTE:.3g} minutes) ends every episode earlier",
            "Remove evaluation.max_minutes, or raise environment.max_episode_frames.",
        )
    yield from _of_starts(spec.evaluation, task)


def _of_starts(evaluation: EvaluationSpec, task: EnvironmentSpec) -> Iterator[Wrong]:
    """Yield starts that can last as long as an episode, so that the agent would not play."""
    limit = "max_episode_frames" if isinstance(task, AtariEnvironment) else "max_episode_steps"
    most = getattr(task, limit)
    if most is None or evaluation.start_set is not None:
        return
    if evaluation.noop_max >= most:
        yield _wrong(
            "evaluation.noop_max",
            f" {evaluation.noop_max} is not less than environment.{limit} {most}, so that a start "
            "could end its episode, whose score would be 0",
            f"Make evaluation.noop_max at most {most - 1}, or raise environment.{limit}.",
        )
    elif not evaluation.noop_max and evaluation.min_actions >= most:
        yield _wrong(
            "evaluation.min_actions",
            f" {evaluation.min_actions} is not less than environment.{limit} {most}, so that every "
            "random start would end its episode",
            f"Make evaluation.min_actions and max_actions at most {most - 1}, or raise "
            f"environment.{limit}.",
        )


def _of_intervals(spec: TrainingSpec) -> Iterator[Wrong]:
    """Yield the intervals after which no reader would accept the bundle."""
    intervals = (
        ("recording.checkpoint_interval", spec.recording.checkpoint_interval),
        ("evaluation.interval", spec.evaluation.interval),
    )
    bounds = (
        ("checkpoints", 1, _MAX_CHECKPOINTS),
        ("evaluation episodes", spec.evaluation.starts, _MAX_EPISODES),
    )
    for (field, interval), (what, each, most) in zip(intervals, bounds, strict=True):
        number = spec.trainer.total_steps // interval * each
        if number > most:
            yield _wrong(
                field,
                f" {interval:,} gives {number:,} {what}, more than the {most:,} that a bundle may "
                "have",
                f"Make it at least {-(-number // most)} times as long.",
            )


def _of_network(spec: TrainingSpec) -> Iterator[Wrong]:
    network = spec.trainer.network
    if isinstance(network, ModuleSpec) and not network.dense:
        yield from _activation(network, "dense layers")
    if isinstance(network, LayersSpec):
        if not (network.convolutions or network.dense):
            yield from _activation(network, "layers")
        yield from _kernels(spec, network)


def _of_threads(spec: TrainingSpec) -> Iterator[Wrong]:
    """Yield a number of maths threads with which the number of processes changes the result."""
    trainer, accelerator, threads = spec.trainer, spec.accelerator, spec.determinism.threads
    # null is a relaxation, which is reported as one, and DQN trains in one process.
    if threads in (1, None) or isinstance(trainer, DqnTrainer):
        return
    # As capsule.training.layers.backends chooses. A GPU's actors have their networks on the CPU.
    if isinstance(trainer.network, ModuleSpec):
        where = "trainer.network.module"
    elif accelerator.kind == "cuda":
        where = "accelerator.kind 'cuda'"
    elif accelerator.numerics == "portable-v2":
        where = "accelerator.numerics 'portable-v2'"
    else:
        return
    yield _wrong(
        "determinism.threads",
        f" {threads} cannot be used with {where}: torch's libraries add up in an order that "
        "depends on it, and processes that play actors or compute gradients have one thread",
        "Remove determinism.threads, or use layers of trainer.network under "
        "accelerator.numerics 'portable-v3'.",
    )


def _activation(network: LayersSpec | ModuleSpec, layers: str) -> Iterator[Wrong]:
    if is_given(network, "activation"):
        yield _wrong(
            "trainer.network.activation",
            f" {network.activation!r} does not apply, as trainer.network lists no {layers}",
        )


def _kernels(spec: TrainingSpec, network: LayersSpec) -> Iterator[Wrong]:
    suite = spec.environment.suite
    if suite not in _SIDES:
        return
    side = _SIDES[suite]
    for number, layer in enumerate(network.convolutions):
        if layer.kernel > side:
            yield _wrong(
                f"trainer.network.convolutions.{number}",
                f": this layer gets {side}x{side}, and its kernel has "
                f"{layer.kernel}x{layer.kernel}",
                "Use smaller kernels or strides, or fewer layers.",
            )
            return
        side = 1 + (side - layer.kernel) // layer.stride


def _wrong(field: str, reason: str, fix: str | None = None) -> Wrong:
    path = tuple(int(part) if part.isdigit() else part for part in field.split("."))
    return Wrong(path, reason, f"Remove {field}." if fix is None else fix)
