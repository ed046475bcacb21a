"""The spec's section ``trainer``: an algorithm and its hyper-parameters, or a command."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from capsule.experiment.trainers.command import CommandTrainer
from capsule.experiment.trainers.dqn import DqnTrainer
from capsule.experiment.trainers.impala import (
    MAX_RECORDED_ACTORS,
    MAX_RECORDED_LAG,
    MAX_RECORDED_UNROLLS,
    ActorInference,
    ImpalaTrainer,
    Initialization,
    LanguageSpec,
    LockstepSchedule,
    RecordedSchedule,
    ServerInference,
    Truncation,
    UnrollReplaySpec,
)
from capsule.experiment.trainers.layers import (
    Activation,
    ConvolutionSpec,
    LayersSpec,
    ModuleSpec,
    OwnNetwork,
)
from capsule.experiment.trainers.population import DRAWN_BY_MEMBERS, PopulationSpec, ScoreReference
from capsule.experiment.trainers.r2d2 import R2d2Trainer

__all__ = [
    "DRAWN_BY_MEMBERS",
    "MAX_RECORDED_ACTORS",
    "MAX_RECORDED_LAG",
    "MAX_RECORDED_UNROLLS",
    "Activation",
    "ActorInference",
    "AlgorithmTrainer",
    "CommandTrainer",
    "ConvolutionSpec",
    "DqnTrainer",
    "ImpalaTrainer",
    "Initialization",
    "LanguageSpec",
    "LayersSpec",
    "LockstepSchedule",
    "ModuleSpec",
    "OwnNetwork",
    "PopulationSpec",
    "R2d2Trainer",
    "RecordedSchedule",
    "ScoreReference",
    "ServerInference",
    "TrainerSpec",
    "Truncation",
    "UnrollReplaySpec",
]

AlgorithmTrainer = Annotated[
    DqnTrainer | R2d2Trainer | ImpalaTrainer, Field(discriminator="algorithm")
]


def _trainer_kind(trainer: Any) -> str:
    """Return the tag of a trainer, which names either an algorithm or a command."""
    # Values of other types have no fields; their validation fails afterwards.
    named = trainer if isinstance(trainer, dict) else getattr(trainer, "__dict__", {})
    return "of a command" if "command" in named else "of an algorithm"


TrainerSpec = Annotated[
    Annotated[AlgorithmTrainer, Tag("of an algorithm")]
    | Annotated[CommandTrainer, Tag("of a command")],
    Discriminator(_trainer_kind),
]
