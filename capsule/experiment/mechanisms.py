"""What a run used, as it says itself: read back or counted inside the run, never taken from a spec.

The training side writes one :class:`Mechanisms` document per run. The ledger of nondeterminism
(:mod:`capsule.entropy.ledger`) is judged by it; nothing in it is compared between runs.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from capsule.experiment.fields import Model, NonNegativeInt, PositiveInt, added
from capsule.experiment.inference import Inference

Reach = Literal["everywhere", "neighbours"]


class Surroundings(Model):
    """What the run saw of the machine, at its end. Paths and addresses are kept out of bundles."""

    fixed_paths: bool = Field(
        description="Whether the run directory was where every container has it, whatever the "
        "machine."
    )
    c_library: str = Field(description="Name and version of the C library, e.g. 'glibc 2.36'.")
    interfaces: dict[str, Reach] = Field(
        description="How far the routes of each network interface lead, without the loopback "
        "interface: everywhere (a default route), or to its own network."
    )
    file_systems: dict[str, str] = Field(
        description="Types of the file systems of 'run directory' and 'temporary files'; without "
        "what the run could not find out."
    )
    gpus: tuple[str, ...] = Field(description="Device files of GPUs, e.g. '/dev/nvidia0'.")
    data: Literal["read-only", "writable"] | None = added(
        absent=None,
        description="Whether every mount of data sets was read-only; null without data sets.",
    )


class TorchProcesses(Model):
    """Python processes that imported torch and read back the same flags."""

    processes: PositiveInt
    flags: dict[str, str]


class Interpreters(Model):
    """The Python processes of a run, as each told at its start.

    Processes that were forked are not counted: they go on with what their creator has. Capsule's
    own interpreter counts only where it is the trainer.
    """

    hash_seeds: dict[str, PositiveInt] = Field(
        description="Number of processes by their hash seed; 'random' where it was drawn."
    )
    restarted: NonNegativeInt = Field(
        description="Processes that restarted themselves with the run's environment, which their "
        "creator had not given them."
    )
    unwatched: NonNegativeInt = Field(
        description="Processes that do not set torch's flags when they import it."
    )
    torch: tuple[TorchProcesses, ...] = Field(description="Those that imported torch.")

    @property
    def started(self) -> int:
        """Processes that told their hash seed."""
        return sum(self.hash_seeds.values())


class TrainerUse(Model):
    """What one of Capsule's own trainers did."""

    device: str = Field(description="Where its networks were: 'cpu', 'cuda:0'.")
    actors: PositiveInt
    schedule: Literal["serial", "lockstep", "recorded", "replayed", "live"] = Field(
        description="What determined the order in which experience was learned from: one actor "
        "in turn with the learner; a rule; the order of arrival, written down; a log of an "
        "earlier run; "
        "the order of arrival, written down nowhere."
    )
    inference: Inference | None = Field(
        None,
        description="How actors' requests were answered; null for trainers whose actors make none.",
    )


class Mechanisms(Model):
    """Everything that a run says of itself."""

    schema_id: Literal["capsule/mechanisms/v1"] = Field("capsule/mechanisms/v1", alias="schema")
    surroundings: Surroundings
    interpreters: Interpreters | None = Field(
        description="Null if the program changed or removed the account of its processes."
    )
    trainer: TrainerUse | None = Field(description="Null for a program of the user's own.")
    process: PositiveInt | None = Field(
        description="Process id of a program of the user's own; null for a trainer."
    )
