"""How far a verification goes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from capsule.experiment.lock import Lock
from capsule.experiment.trainers import CommandTrainer
from capsule.host.errors import CapsuleError


@dataclass(frozen=True)
class Mode:
    """How far to go.

    Attributes:
        name: What is done.
        steps: Agent steps of a prefix.
        segments: How many segments to choose; None: all.
    """

    name: Literal["integrity", "environment", "prefix", "full", "segments", "fresh-seed"]
    steps: int | None = None
    segments: int | None = None

    @property
    def challenges(self) -> bool:
        """Whether it asks for what the signer could not know."""
        return self.name in ("segments", "fresh-seed")

    @classmethod
    def parse(cls, text: str) -> Mode:
        """Parse a mode as ``--mode`` takes it; each is a name of the class, two with a number.

        Raises:
            CapsuleError: CAP-V001, anything else; CAP-V060, segments of no number.
        """
        if text.startswith("segments:"):
            return cls("segments", segments=_number(text.removeprefix("segments:")))
        if match := re.fullmatch(r"prefix:([1-9][0-9]{0,14})", text):
            return cls("prefix", int(match[1]))
        if text in ("integrity", "environment", "fresh-seed", "full"):
            return cls(text)  # type: ignore[arg-type]
        raise CapsuleError(
            "CAP-V001",
            f"--mode {text!r} is not known",
            fix="Use integrity, environment, prefix:N (N agent steps), segments:N, fresh-seed or "
            "full.",
        )

    def __str__(self) -> str:
        if self.name == "segments":
            return f"{self.name}:{self.segments or 'all'}"
        return self.name if self.steps is None else f"{self.name}:{self.steps}"


def check_prefix(mode: Mode, lock: Lock) -> None:
    """Refuse a prefix that does not end on a trace record, or of a program, which has none.

    Raises:
        CapsuleError: CAP-V003, CAP-V008.
    """
    if mode.steps is None:
        return
    if isinstance(lock.spec.trainer, CommandTrainer):
        raise CapsuleError(
            "CAP-V008",
            f"--mode {mode}: only Capsule's own trainers count steps; this bundle runs a program",
            fix="Use --mode full.",
        )
    interval = lock.spec.recording.trace_interval
    total = lock.spec.trainer.total_steps
    if mode.steps % interval or mode.steps > total:
        raise CapsuleError(
            "CAP-V003",
            f"--mode {mode}: the run has {total} steps with a trace record each {interval}",
            fix=f"Give a multiple of {interval} up to {total}.",
        )


def _number(text: str) -> int | None:
    """Parse how many segments to choose; None stands for all."""
    if text == "all":
        return None
    if re.fullmatch(r"[1-9][0-9]{0,5}", text):
        return int(text)
    raise CapsuleError(
        "CAP-V060",
        f"{text!r} is not a number of segments",
        fix="Give --challenge, or --mode segments:, a number from 1 on or 'all'.",
    )
