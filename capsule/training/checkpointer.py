"""Checkpoints of a run, which are part of its claims, and states from which it is resumed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from capsule.experiment import contract
from capsule.experiment.canonical import MAX_DOCUMENT_BYTES
from capsule.experiment.contract import Checkpoint, CheckpointIndex
from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import StreamName, TrainingSpec
from capsule.experiment.states import RESUME, ResumeState
from capsule.training.state.checkpoint import (
    damaged,
    load_resume_state,
    save_resume_state,
    save_tensors,
    tensor_digests,
)
from capsule.training.state.run_directory import write_document
from capsule.training.state.segment_states import keep_state
from capsule.training.state.streams import Stream
from capsule.training.state.trace import Trace
from capsule.training.trainer import Trainer, state_interval


class Checkpointer:
    """Writes checkpoints and resume states, and restores a run from the last resume state."""

    def __init__(
        self,
        directory: Path,
        spec: TrainingSpec,
        learner: Trainer,
        streams: Mapping[StreamName, Stream],
        trace: Trace,
        *,
        keeps_states: bool,
    ) -> None:
        """Begin without a checkpoint; :meth:`restore` must follow.

        Args:
            directory: The run directory.
            spec: The experiment.
            learner: The trainer, newly made.
            streams: Every stream of the run.
            trace: The trace of the run.
            keeps_states: Whether the states at claimed checkpoints are kept for verifiers that
                re-execute the run in segments.

        Raises:
            CapsuleError: CAP-T134, a bundle cannot list the checkpoints of the whole run.
        """
        _require_room(spec, learner.tensor_names())
        self._directory, self._spec, self._keeps_states = directory, spec, keeps_states
        self._learner, self._streams, self._trace = learner, streams, trace
        self._checkpoints: list[Checkpoint] = []
        self._started = time.monotonic()
        self._seconds_before = 0.0

    def seconds(self) -> float:
        """Return the seconds that the run has trained, in all attempts together."""
        return self._seconds_before + time.monotonic() - self._started

    def restore(self) -> None:
        """Restore the last saved state, if there is one.

        Raises:
            CapsuleError: CAP-T121, the trace is shorter than the state; CAP-T132, the state is
                damaged; CAP-T133, it belongs to another spec; or as :meth:`Trainer.restore`.
        """
        saved = load_resume_state(self._directory / contract.STATE, self._spec.digest())
        if saved is None:
            self._trace.restore(None)
            return
        state, tensors = saved
        try:
            for name, stream in self._streams.items():
                stream.restore(state.streams[name])
            self._trace.restore(state.trace)
            self._learner.restore(state.step, state.trainer, tensors)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # Each object reads its own part of the state, which may be malformed, because states
            # can come from an untrusted bundle.
            reason = f"cannot be restored ({type(error).__name__}: {error})"
            raise damaged(RESUME, reason) from error
        self._checkpoints = list(state.checkpoints)
        self._seconds_before = state.seconds
        self._keep_state()  # has no effect if the attempt that saved it has kept it

    def checkpoint(self, *, final: bool) -> bool:
        """Claim a checkpoint, and save a state to resume from, if one is due.

        Args:
            final: Whether the run ends here.

        Returns:
            Whether a checkpoint was claimed.

        Raises:
            CapsuleError: CAP-T131 or CAP-T161, a file cannot be written.
        """
        step = self._learner.step
        claimed = self._claims(step)
        # States are also saved between claimed checkpoints that are far apart, because a replay
        # memory accepts only as many entries after a state as its slack.
        if claimed or final or step % state_interval(self._spec) == 0:
            tensors = self._learner.tensors()
            digests = tensor_digests(tensors)
            if claimed:
                # If the run is killed before the state is saved, it makes this claim again when it
                # is resumed, and replaces these files. The new files have the same bytes, unless
                # the schedule is recorded, because unrolls may then arrive in another order.
                self._claim(tensors, digests)
            self._save(tensors, digests)
            # Kept now, because the next state replaces this one and removes its tensors.
            self._keep_state()
        return claimed

    def save_state(self) -> None:
        """Save a state to resume from.

        Raises:
            CapsuleError: CAP-T131, a file cannot be written; the previous state is intact.
        """
        tensors = self._learner.tensors()
        self._save(tensors, tensor_digests(tensors))

    def _claims(self, step: int) -> bool:
        """Return whether the checkpoint at ``step`` is claimed."""
        total = self._spec.trainer.total_steps
        return step % self._spec.recording.checkpoint_interval == 0 or step == total

    def _claim(self, tensors: dict[str, NDArray[np.float32]], digests: dict[str, str]) -> None:
        step = self._learner.step
        checkpoint = Checkpoint(step=step, tensors=digests, trace_head=self._trace.head)
        self._checkpoints.append(checkpoint)
        path = self._directory / contract.CHECKPOINTS / contract.checkpoint_name(step)
        write_document(path.with_name(f"{path.name}.json"), checkpoint)
        # Only the digests of earlier checkpoints are claimed: a bundle contains the tensors of the
        # last one.
        if step == self._spec.trainer.total_steps:
            save_tensors(path.with_name(f"{path.name}.safetensors"), tensors)
        # The index is written after the files that it names, so that it never lists a missing one.
        index = CheckpointIndex(checkpoints=tuple(self._checkpoints))
        write_document(self._directory / contract.CHECKPOINT_INDEX, index)

    def _save(self, tensors: dict[str, NDArray[np.float32]], digests: dict[str, str]) -> None:
        # Taking these snapshots makes the trace and a recorded schedule durable, before the state
        # that refers to them replaces the previous one.
        state = ResumeState(
            spec=self._spec.digest(),
            step=self._learner.step,
            seconds=self.seconds(),
            tensors=digests,
            streams={name: stream.state() for name, stream in self._streams.items()},
            trainer=self._learner.state(),
            trace=self._trace.state(),
            checkpoints=tuple(self._checkpoints),
        )
        save_resume_state(self._directory / contract.STATE, state, tensors)

    def _keep_state(self) -> None:
        """Keep the state that was saved last, if a segment of the run begins with it."""
        step = self._learner.step
        if self._keeps_states and self._claims(step) and step < self._spec.trainer.total_steps:
            keep_state(self._directory, step)


def _require_room(spec: TrainingSpec, names: Sequence[str]) -> None:
    """Check that the index of all checkpoints will not be too large for its readers.

    The size of a document is its only limit that matters here, because most of an index consists of
    digests. If the index is small enough, so are the states to resume from.

    Args:
        spec: The experiment.
        names: Names of the tensors of a checkpoint.

    Raises:
        CapsuleError: CAP-T134, the index would be too large.
    """
    total, interval = spec.trainer.total_steps, spec.recording.checkpoint_interval
    number = -(-total // interval)  # rounded up, because the last step always has a checkpoint
    digest = "0" * 64
    largest = Checkpoint(step=total, tensors=dict.fromkeys(names, digest), trace_head=digest)
    room = MAX_DOCUMENT_BYTES - len(CheckpointIndex(checkpoints=()).document())
    most = max(1, room // (len(largest.document()) + 1))  # and a comma
    if number > most:
        unit = spec.trainer.interval_steps
        least = -(-total // (most * unit)) * unit
        raise CapsuleError(
            "CAP-T134",
            f"recording.checkpoint_interval {interval:,} gives {number:,} checkpoints of "
            f"{len(names):,} tensors each, more than the {most:,} that a bundle can list",
            fix=f"Make it at least {least:,}.",
        )
