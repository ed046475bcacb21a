"""Settings that a run would ignore, or with which it is sure to fail.

They are rejected where a spec is read for a new lock, and not by the models: those also read the
locks and bundles of earlier versions, which may have such settings. The training code contains the
models, so a check there would change every lock.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from capsule.experiment.spec import (
    DeterminismSpec,
    GymnasiumEnvironment,
    Spec,
)
from capsule.experiment.trainers import (
    CommandTrainer,
    DqnTrainer,
    ImpalaTrainer,
    LayersSpec,
)
from capsule.host.validation import Wrong

_OF_REQUESTS = ("batch_invariance", "request_seeds", "deterministic_routing")
_SIDES = {"atari": 84, "minatar": 10}  # rows and columns of the frames, where the suite has them
# As capsule.training.networks.language splits an instruction.
_WORD = re.compile(r"[^\s,.;:!?]+")


def wrong_settings(spec: Spec) -> Iterator[Wrong]:
    """Yield the settings of a spec that have no effect, or that end the run."""
    trainer = spec.trainer
    yield from _randomness(spec)
    if isinstance(trainer, CommandTrainer | DqnTrainer):
        yield from _without_requests(spec.determinism, trainer)
    if isinstance(trainer, ImpalaTrainer):
        yield from _of_impala(trainer)
    if not isinstance(trainer, CommandTrainer) and isinstance(trainer.network, LayersSpec):
        yield from _kernels(spec, trainer.network)
    task = spec.environment
    seen = task.observation if isinstance(task, GymnasiumEnvironment) else None
    if seen is not None and seen == getattr(task, "instruction", None):
        yield _wrong(
            "environment.observation",
            f" {seen!r} is the instruction, too",
            "Name the entry that is the image.",
        )


def _randomness(spec: Spec) -> Iterator[Wrong]:
    entropy, seeds = spec.entropy, spec.seeds
    if seeds.random and isinstance(spec.trainer, CommandTrainer):
        yield _wrong(
            "seeds.random",
            " does not apply to trainer.command, which draws its seeds itself or takes '{seed}'",
        )
    if entropy.seed is not None and entropy.mode == "system":
        yield _wrong("entropy.seed", " does not apply to entropy.mode 'system'")
    if entropy.on_exhaustion != "fail" and entropy.mode != "recorded":
        yield _wrong("entropy.on_exhaustion", " applies to entropy.mode 'recorded' only")
    if "no-op" in seeds.streams and not getattr(spec.environment, "noop_max", 0):
        yield _wrong(
            "seeds.streams.no-op", ": the environment has no no-ops at the start of an episode"
        )


def _without_requests(
    determinism: DeterminismSpec, trainer: CommandTrainer | DqnTrainer
) -> Iterator[Wrong]:
    whose = "trainer.command" if isinstance(trainer, CommandTrainer) else "trainer.algorithm 'dqn'"
    for name in _OF_REQUESTS:
        if not getattr(determinism, name):
            reason = f" false does not apply to {whose}, which has no actors that send requests"
            yield _wrong(f"determinism.{name}", reason)


def _of_impala(trainer: ImpalaTrainer) -> Iterator[Wrong]:
    fields = type(trainer).model_fields
    if trainer.network == "residual" and trainer.hidden_units != fields["hidden_units"].default:
        yield _wrong(
            "trainer.hidden_units",
            f" {trainer.hidden_units} does not apply to trainer.network 'residual', which has 256",
        )
    epsilon = trainer.correction_epsilon
    if trainer.correction != "epsilon" and epsilon != fields["correction_epsilon"].default:
        yield _wrong(
            "trainer.correction_epsilon",
            f" {epsilon} does not apply to trainer.correction {trainer.correction!r}",
        )
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


def _kernels(spec: Spec, network: LayersSpec) -> Iterator[Wrong]:
    suite = "" if spec.environment is None else spec.environment.suite
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
