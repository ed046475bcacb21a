"""The progress of a run: ``events.jsonl``, which the host shows during the run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from capsule.experiment.contract import Event
from capsule.training.state.run_directory import append_event, drop_partial_line

if TYPE_CHECKING:
    from capsule.training.trainer import Trainer

_PROGRESS_SECONDS = 1.0


class EventLog:
    """Appends events to a file; progress about once a second."""

    def __init__(self, path: Path, learner: Trainer, total_steps: int) -> None:
        """Continue the file, without the line that a killed process left unfinished.

        Args:
            path: The file.
            learner: The trainer.
            total_steps: The step at which this process ends, which may be that of a prefix.
        """
        self._path, self._learner, self._total = path, learner, total_steps
        self._last = (time.monotonic(), 0)
        # How often progress is written depends on the machine's speed, and each reading advances a
        # virtual calendar clock, which environments may read. So that clock is read here only.
        self._date_of_zero = time.time() - time.monotonic()
        drop_partial_line(path)

    def progress(self) -> None:
        """Write a progress event if the last one is a second old."""
        now, (before, step) = time.monotonic(), self._last
        if now - before >= _PROGRESS_SECONDS:
            self._last = (now, self._learner.step)
            # Zero stands for the time before the first event. A resumed run began at a later step,
            # which was not restored yet when this log was made, so no speed is known then.
            speed = (self._learner.step - step) / (now - before) if step else None
            self.write("progress", speed=speed)

    def write(
        self,
        kind: Literal["start", "resume", "progress", "checkpoint", "evaluation", "finish"],
        *,
        speed: float | None = None,
        message: str | None = None,
    ) -> None:
        """Append one event."""
        learner = self._learner
        event = Event(
            time=self._date_of_zero + time.monotonic(),
            kind=kind,
            step=learner.step,
            total_steps=self._total,
            steps_per_second=speed,
            episodes=learner.episodes,
            episode_return=learner.mean_return,
            loss=learner.loss,
            exploration=learner.exploration(),
            message=message,
        )
        append_event(self._path, event)
