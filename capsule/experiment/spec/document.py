"""The spec as a document: all sections, checked against one another."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from capsule.experiment.evaluation import EvaluationSpec
from capsule.experiment.fields import DigestedModel, Name, added
from capsule.experiment.spec.accelerator import CpuAccelerator, CudaAccelerator, Numerics
from capsule.experiment.spec.consistency import check_program, check_training
from capsule.experiment.spec.data import DataSpec
from capsule.experiment.spec.determinism import DeterminismSpec
from capsule.experiment.spec.environment import EnvironmentSpec
from capsule.experiment.spec.image import CodeSpec, ImageSpec
from capsule.experiment.spec.randomness import EntropySpec, SeedsSpec
from capsule.experiment.spec.recording import LimitsSpec, RecordingSpec
from capsule.experiment.trainers import AlgorithmTrainer, CommandTrainer, TrainerSpec

MAX_DATA_SETS = 32


class Spec(DigestedModel):
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
    code: CodeSpec | None = Field(
        None,
        description="The source tree of trainer.command, trainer.network.module or "
        "environment.modules; null: none.",
    )
    data: Annotated[dict[Name, DataSpec], Field(min_length=1, max_length=MAX_DATA_SETS)] | None = (
        added(
            absent=None,
            description="Files and folders outside the image that the run reads, by their names "
            "in /data; null: none.",
        )
    )
    environment: EnvironmentSpec | None = Field(
        None,
        description="The task. It is required with trainer.algorithm, and must be null with "
        "trainer.command.",
    )
    trainer: TrainerSpec = Field(description="The algorithm, or a command.")
    evaluation: EvaluationSpec = Field(
        EvaluationSpec(), description="Protocol by which networks are evaluated."
    )
    recording: RecordingSpec = Field(
        RecordingSpec(), description="Intervals at which the run is recorded."
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
            check_program(self)
        elif self.environment is None:
            raise ValueError("environment is missing: trainer.algorithm requires it")
        else:
            check_training(self.training())
        return self

    @property
    def cpu_numerics(self) -> Numerics:
        """The numerics profile of the CPU."""
        return self.accelerator.numerics

    def training(self) -> TrainingSpec:
        """Return the same spec, known to train with one of Capsule's own algorithms.

        Raises:
            TypeError: It runs a command.
        """
        if isinstance(self.trainer, CommandTrainer):
            raise TypeError("the spec runs a command")
        # model_construct() shares the sections, which have been validated already.
        return TrainingSpec.model_construct(**dict(self))


class TrainingSpec(Spec):
    """A spec that trains with one of Capsule's own algorithms (:meth:`Spec.training`)."""

    environment: EnvironmentSpec
    trainer: AlgorithmTrainer
