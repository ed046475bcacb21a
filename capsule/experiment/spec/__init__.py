"""The spec, which a researcher writes, with a module for each group of sections.

Every model is frozen, rejects unknown keys and converts nothing silently. Units are part of the
names. A *step* is one agent step: one action chosen by the policy (``frame_skip`` emulator frames
on Atari).
"""

from __future__ import annotations

from capsule.experiment.spec.accelerator import CpuAccelerator, CudaAccelerator, Numerics
from capsule.experiment.spec.consistency import MAX_UNROLLS_OF_A_RECORD
from capsule.experiment.spec.data import DataSpec
from capsule.experiment.spec.determinism import DeterminismSpec
from capsule.experiment.spec.document import Spec, TrainingSpec
from capsule.experiment.spec.environment import (
    AtariEnvironment,
    EnvironmentSpec,
    GymnasiumEnvironment,
    MinAtarEnvironment,
    references_of,
    task_name,
    tasks_of,
)
from capsule.experiment.spec.image import CodeSpec, ImageSpec, SourcesSpec
from capsule.experiment.spec.randomness import EntropySpec, SeedsSpec, StreamName
from capsule.experiment.spec.recording import (
    MAX_MEBIBYTES,
    MAX_MINUTES,
    MAX_PROCESSES,
    LimitsSpec,
    RecordingSpec,
)
from capsule.experiment.spec.relaxations import calendar_clock, relaxations

__all__ = [
    "MAX_MEBIBYTES",
    "MAX_MINUTES",
    "MAX_PROCESSES",
    "MAX_UNROLLS_OF_A_RECORD",
    "AtariEnvironment",
    "CodeSpec",
    "CpuAccelerator",
    "CudaAccelerator",
    "DataSpec",
    "DeterminismSpec",
    "EntropySpec",
    "EnvironmentSpec",
    "GymnasiumEnvironment",
    "ImageSpec",
    "LimitsSpec",
    "MinAtarEnvironment",
    "Numerics",
    "RecordingSpec",
    "SeedsSpec",
    "SourcesSpec",
    "Spec",
    "StreamName",
    "TrainingSpec",
    "calendar_clock",
    "references_of",
    "relaxations",
    "task_name",
    "tasks_of",
]
