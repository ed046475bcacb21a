"""The mechanisms that a run used, as the run reports them.

They are read back or counted inside the run, and never taken from a spec.

The training side writes one :class:`Mechanisms` document per run. The ledger of nondeterminism
(:mod:`capsule.entropy.ledger`) is derived from it; nothing in it is compared between runs.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from capsule.experiment.fields import Model, NonNegativeInt, PositiveInt, added
from capsule.experiment.inference import Inference

Reach = Literal["everywhere", "neighbours"]


class Surroundings(Model):
    """The machine as the run saw it at its end, without paths and addresses."""

    fixed_paths: bool = Field(
        description="Whether the run directory had the path that it has in every container, on "
        "any machine."
    )
    c_library: str = Field(description="Name and version of the C library, e.g. 'glibc 2.36'.")
    interfaces: dict[str, Reach] = Field(
        description="Reach of the routes of each network interface other than the loopback "
        "interface: 'everywhere' (a default route), or 'neighbours' (its own network)."
    )
    file_systems: dict[str, str] = Field(
        description="Types of the file systems of 'run directory' and 'temporary files', as far as "
        "the run could determine them."
    )
    gpus: tuple[str, ...] = Field(description="Device files of GPUs, e.g. '/dev/nvidia0'.")
    data: Literal["read-only", "writable"] | None = added(
        absent=None,
        description="Whether every mount of data sets was read-only; null without data sets.",
    )


class TorchProcesses(Model):
    """Python processes that imported torch and read back the same flags."""

    processes: PositiveInt = Field(description="Number of these processes.")
    flags: dict[str, str] = Field(description="The flags that each of them read back, by name.")


class Interpreters(Model):
    """The Python processes of a run, as each of them reported at its start.

    Forked processes are not counted, because they share the state of their parent. Capsule's own
    interpreter is counted only if it is the trainer.
    """

    hash_seeds: dict[str, PositiveInt] = Field(
        description="Number of processes by their hash seed, which is 'random' if Python drew it."
    )
    restarted: NonNegativeInt = Field(
        description="Number of processes that restarted themselves with the environment of the "
        "run, because their parent had started them without it."
    )
    unwatched: NonNegativeInt = Field(
        description="Number of processes that do not set the flags of torch when they import it."
    )
    torch: tuple[TorchProcesses, ...] = Field(
        description="The processes that imported torch, grouped by their flags."
    )
    compilers: str | None = added(
        absent=None,
        description="Imported packages that compile or choose functions for the processor on which "
        "they run, in alphabetical order, e.g. 'jaxlib, numba'; null if no process imported one.",
    )

    @property
    def started(self) -> int:
        """The number of processes that reported their hash seed."""
        return sum(self.hash_seeds.values())


class TrainerUse(Model):
    """The device, schedule and inference that one of Capsule's own trainers used."""

    device: str = Field(description="Device of the networks, e.g. 'cpu' or 'cuda:0'.")
    actors: PositiveInt
    schedule: Literal["serial", "lockstep", "recorded", "replayed", "live"] = Field(
        description="What determined the order in which experience was trained on. 'serial': the "
        "algorithm, with one actor; 'lockstep': a rule; 'recorded': the order of arrival, which "
        "was recorded; 'replayed': the log of an earlier run; 'live': the order of arrival, which "
        "was not recorded."
    )
    inference: Inference | None = Field(
        None,
        description="How the requests of actors were answered; null for trainers whose actors send "
        "no requests.",
    )


class Mechanisms(Model):
    """The mechanisms that a run used, as the run reports them."""

    schema_id: Literal["capsule/mechanisms/v1"] = Field("capsule/mechanisms/v1", alias="schema")
    surroundings: Surroundings
    interpreters: Interpreters | None = Field(
        description="The Python processes of the run; null if the program changed or removed their "
        "records."
    )
    trainer: TrainerUse | None = Field(
        description="What the trainer used; null for your own program."
    )
    process: PositiveInt | None = Field(
        description="Process id of your own program; null if a trainer of Capsule ran instead."
    )

    @property
    def compilers(self) -> str | None:
        """The imported packages that compile or choose functions for the processor, or None."""
        return None if self.interpreters is None else self.interpreters.compilers
