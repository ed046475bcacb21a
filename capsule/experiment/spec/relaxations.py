"""Relaxations: the determinism layers that a spec declares weaker than the default."""

from __future__ import annotations

from typing import Literal

from capsule.experiment.spec.determinism import DeterminismSpec
from capsule.experiment.spec.document import Spec
from capsule.experiment.spec.randomness import EntropySpec
from capsule.experiment.trainers import AlgorithmTrainer, CommandTrainer

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
    """Return whether a program reads the machine's clock, which Capsule's trainers do not use."""
    return isinstance(spec.trainer, CommandTrainer) and calendar_clock(spec) == "system"


def _left_random(entropy: EntropySpec) -> list[str]:
    """Name the settings by which the system's randomness reaches a run, or may reach it."""
    weaker = {
        "mode": entropy.mode == "system",
        "on_exhaustion": entropy.mode == "recorded" and entropy.on_exhaustion == "virtual",
        "supervised": not entropy.supervised,
        "address_randomization": entropy.address_randomization,
    }
    return [f"entropy.{name}={getattr(entropy, name)}" for name, weak in weaker.items() if weak]


def _unclaimed(trainer: AlgorithmTrainer | CommandTrainer) -> list[str]:
    """Name the outputs that a program writes and does not claim."""
    if not isinstance(trainer, CommandTrainer):
        return []
    outputs = [f"trainer.outputs={pattern}" for pattern in trainer.outputs if pattern != "*"]
    return outputs + ["trainer.standard_output=False"] * (not trainer.standard_output)
