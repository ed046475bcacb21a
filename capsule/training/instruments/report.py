"""The report of the instruments of ``capsule diagnose``, with locations in the program.

The instruments run inside the training process; the host reads their report. This module does not
import torch.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Literal

from pydantic import Field

from capsule.experiment.fields import Model
from capsule.training.instruments.operator_rules import Status

STACK_FRAMES = 8
SEEDING = re.compile(  # matches a line of Python that seeds a generator
    r"seed\w*\(|\bseed\w*\s*=|\b(default_rng|RandomState|SeedSequence|Random|PCG64|Philox)\("
)
_INSTRUMENTS = f"{Path(__file__).parent}/"
_TRAINING = f"{Path(__file__).parents[1]}/"

Source = Literal["entropy", "clock", "address", "hash", "process", "directory"]


class Location(Model):
    """A line of a program."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class OperatorDifference(Model):
    """The first time that an operator gave other bits when it was executed again."""

    index: int = Field(description="Number of the operator call in its process, from 0.")
    elements: int = Field(description="Elements of all results together.")
    differing: int = Field(description="How many of them had other bits.")


class OperatorUse(Model):
    """All calls of one operator, on one device, from one line."""

    operator: str = Field(
        description="Name of the operator with its namespace and overload, e.g. 'aten::add.Tensor'."
    )
    device: str
    status: Status
    documented: str | None = Field(description="Entry of torch's documentation on determinism.")
    calls: int
    repeated: int = Field(description="Calls that were executed again.")
    differing: int = Field(description="Repetitions that gave other bits.")
    first_difference: OperatorDifference | None
    stack: tuple[Location, ...] = Field(
        description="Stack of the first call, innermost frame first."
    )

    @property
    def where(self) -> Location | None:
        """The innermost line of the user's code."""
        return own_line(self.stack)


class TorchWarning(Model):
    """A warning of ``use_deterministic_algorithms(warn_only=True)``."""

    message: str
    stack: tuple[Location, ...]

    @property
    def where(self) -> Location | None:
        """The innermost line of the user's code."""
        return own_line(self.stack)


class SourceUse(Model):
    """Calls of one function that is a source of nondeterminism, from one line of the program."""

    source: Source
    function: str = Field(description="What was called: time.time, os.urandom, …")
    calls: int
    where: Location


class Variable(Model):
    """The values that a local variable took on one line of the program, in order."""

    where: Location
    name: str
    values: int = Field(description="How many times it took another value.")
    digest: str = Field(description="Digest of all values, in order.")
    unordered: str = Field(description="Digest of all values, in any order.")
    elements: str = Field(
        description="Digest of all values, each without the order of its elements."
    )
    kind: str = Field(description="Type of the first value, and of its first element.")
    shown: tuple[str, ...] = Field(description="The first values, shortened.")


class InstrumentReport(Model):
    """All observations of the instruments of one process."""

    schema_id: Literal["capsule/instruments/v1"] = Field("capsule/instruments/v1", alias="schema")
    algorithms: Literal["error", "warn", "off"] | None = Field(
        description="torch.use_deterministic_algorithms as read back; null without torch."
    )
    threads: int | None = Field(description="Maths threads of torch; null without torch.")
    operator_calls: int
    operators: tuple[OperatorUse, ...]
    warnings: tuple[TorchWarning, ...]
    sources: tuple[SourceUse, ...]
    variables: tuple[Variable, ...]
    truncated: bool = Field(description="Whether an instrument stopped at its limit.")
    text: dict[str, str] = Field(
        description="Text of the lines named, and of those that seed a generator, by FILE:LINE."
    )


def user_stack() -> tuple[Location, ...]:
    """Return the frames of the caller, innermost first, without those of torch and instruments."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the documented way to look at the stack
    stack: list[Location] = []
    while frame is not None and len(stack) < STACK_FRAMES:
        code = frame.f_code
        if not _hidden(code.co_filename):
            stack.append(
                Location(file=code.co_filename, line=frame.f_lineno, function=code.co_name)
            )
        frame = frame.f_back
    return tuple(stack)


def own_line(stack: tuple[Location, ...]) -> Location | None:
    """Return the innermost line of the user's code, else of Capsule's trainers, else of any."""
    own = next((location for location in stack if is_own(location.file)), None)
    ours = next((location for location in stack if location.file.startswith(_TRAINING)), None)
    return own or ours or (stack[0] if stack else None)


@cache
def is_own(file: str) -> bool:
    """Return whether a file is the user's, not the standard library's, a package's or Capsule's."""
    return not (
        # Frozen modules, and code that was compiled from a string, have names in angle brackets.
        file.startswith(("<", _TRAINING, sysconfig.get_path("stdlib")))
        or "/site-packages/" in file
        or "/dist-packages/" in file
    )


@cache
def _hidden(file: str) -> bool:
    return file.startswith((_INSTRUMENTS, "<frozen")) or "-packages/torch/" in file
