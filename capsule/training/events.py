"""The progress of a run in ``events.jsonl``, which the host shows during the run."""

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
    """Appends events to a file, and progress about once a second."""

    def __init__(self, path: Path, learner: Trainer, total_steps: int) -> None:
        """Continue the file, without an incomplete line of a killed process.

        Args:
            path: The file.
            learner: The trainer.
            total_steps: The step at which this process ends, which may be the end of a prefix.
        """
        self._path, self._learner, self._total = path, learner, total_steps
        self._last = (time.monotonic(), 0)
        # Every reading of a virtual calendar clock advances it, and environments may read it, while
        # the number of progress events depends on the machine's speed. The clock is therefore read
        # only here.
        self._date_of_zero = time.time() - time.monotonic()
        drop_partial_line(path)

    def progress(self) -> None:
        """Write a progress event if the last one is at least a second old."""
        now, (before, step) = time.monotonic(), self._last
        if now - before >= _PROGRESS_SECONDS:
            self._last = (now, self._learner.step)
            # The first event has no speed, because a resumed run begins at a later step than 0,
            # which is not restored yet when this log is made.
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
