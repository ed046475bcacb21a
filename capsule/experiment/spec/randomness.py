"""The spec's sections ``seeds`` and ``entropy``: the sources of randomness, and the clock."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from capsule.experiment.fields import Model, Seed

StreamName = Literal[
    "environment", "no-op", "exploration", "initialization", "minibatch", "evaluation"
]


class EntropySpec(Model):
    """The treatment of the randomness that programs request from the operating system."""

    mode: Literal["virtual", "recorded", "system"] = Field(
        "virtual",
        description="'virtual' derives the randomness from a key, the process, the thread and a "
        "counter; 'recorded' records the system's randomness, which verify replays; 'system' "
        "leaves it uncontrolled.",
    )
    seed: Seed | None = Field(
        None, description="Key from which virtual entropy is derived; null: seeds.root."
    )
    on_exhaustion: Literal["fail", "virtual"] = Field(
        "fail",
        description="What a replay does when the program requests more randomness than was "
        "recorded: 'fail' ends the run, 'virtual' derives the rest as in the mode 'virtual'.",
    )
    supervised: bool = Field(
        True,
        description="Whether raw system calls, which a preloaded library cannot see, are "
        "intercepted as well.",
    )
    address_randomization: bool = Field(
        False,
        description="Whether programs are loaded at random addresses, on which id() and the order "
        "of sets can depend.",
    )
    clock: Literal["system", "fixed", "virtual"] | None = Field(
        None,
        description="The calendar clock. 'virtual' starts at 2026-01-01 UTC and advances with "
        "every reading, sleep and time-out of the program; 'fixed' always shows that date; "
        "'system' is the machine's clock; null: 'virtual' with trainer.command, 'system' with "
        "trainer.algorithm.",
    )


class SeedsSpec(Model):
    """The root seed, and seeds of single streams that override it, e.g. in a sensitivity study."""

    root: Seed = Field(0, description="Root seed of all streams.")
    random: bool = Field(
        False,
        description="Whether the root seed is drawn from the operating system's randomness at the "
        "start, as in a program without a seed. The section 'entropy' determines the values that "
        "are drawn.",
    )
    streams: dict[StreamName, Seed] = Field(
        default_factory=dict, description="Root seeds of single streams, which override 'root'."
    )

    def root_of(self, stream: StreamName) -> int:
        """Return the root seed of a stream."""
        return self.streams.get(stream, self.root)

    @model_validator(mode="after")
    def _consistent(self) -> SeedsSpec:
        # A root of 0 does not contradict it, because stored specs spell out every default.
        if self.random and "root" in self.model_fields_set and self.root:
            raise ValueError(f"root {self.root} is given although random is true")
        return self
