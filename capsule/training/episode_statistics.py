"""What every trainer counts, shows while it runs, and saves."""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from capsule.experiment.errors import CapsuleError
from capsule.training.state.trace import Trace

RETURNS_KEPT = 100


class EpisodeStatistics:
    """The base of a trainer.

    Attributes:
        step: Agent steps so far, of all actors.
        episodes: Episodes finished.
        returns: Game returns of the last 100 episodes.
        loss: Of the last minibatch, None before the first.
    """

    def __init__(self) -> None:
        self.step = self.episodes = 0
        self.returns: deque[float] = deque(maxlen=RETURNS_KEPT)
        self.loss: float | None = None

    @property
    def mean_return(self) -> float | None:
        """Mean game return of the last 100 episodes, None before the first."""
        return sum(self.returns) / len(self.returns) if self.returns else None

    def _count(self, returns: Sequence[float]) -> None:
        """Take note of episodes that ended, by their game returns."""
        self.episodes += len(returns)
        self.returns.extend(returns)

    def _take_loss(self, parts: Sequence[float], trace: Trace, *, share: int = 1, fix: str) -> None:
        """Trace the losses of a minibatch's parts, and keep their sum, divided by ``share``.

        Raises:
            CapsuleError: CAP-T151, it is not a finite number.
        """
        trace.add("loss", struct.pack(f"<{len(parts)}d", *parts))
        self.loss = sum(parts) / share
        if not math.isfinite(self.loss):
            raise CapsuleError("CAP-T151", f"the loss is {self.loss} at step {self.step}", fix=fix)

    def _tallied(self) -> dict[str, Any]:
        """Return a JSON-safe snapshot, but for the step."""
        return {
            "episodes": self.episodes,
            "returns": list(self.returns),
            "loss": None if self.loss is None else self.loss.hex(),
        }

    def _resume_tally(self, step: int, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`_tallied` returned, and maybe others added to it."""
        self.step, self.episodes = step, state["episodes"]
        self.returns = deque(state["returns"], RETURNS_KEPT)
        self.loss = None if state["loss"] is None else float.fromhex(state["loss"])
