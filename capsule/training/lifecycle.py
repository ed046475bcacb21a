"""One attempt at a run: resume, train, checkpoint, evaluate, write the result.

A run can be interrupted or killed at any moment and started again: every file is either written
again with the same bytes, or appears by atomic rename.
"""

from __future__ import annotations

import errno
import secrets
from pathlib import Path
from threading import Event as Flag
from typing import TYPE_CHECKING

from capsule.experiment import contract
from capsule.experiment.contract import Job, Result, StreamProfiles
from capsule.experiment.errors import CapsuleError
from capsule.experiment.fields import Model
from capsule.experiment.files import remove_unfinished
from capsule.experiment.spec import SeedsSpec, TrainingSpec
from capsule.experiment.trainers import CommandTrainer
from capsule.training.accounts import accounted, record_mechanisms
from capsule.training.determinism import flags
from capsule.training.events import EventLog
from capsule.training.own_program.program import run_program
from capsule.training.state.run_directory import (
    Interrupted,
    not_written,
    read_job,
    record_failure,
    record_runtime,
    stop_signals,
    write_document,
    write_file,
)

if TYPE_CHECKING:
    from capsule.training.instruments.dense_record import DenseRecorder
    from capsule.training.state.trace import Trace
    from capsule.training.trainer import Trainer

_DRAWN_SEED = "seed.json"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def run(directory: Path) -> None:
    """Execute or continue the job of ``directory``; if there is a result, do nothing.

    Raises:
        Interrupted: The run was asked to stop; it can be started again.
        CapsuleError: The run failed; ``failure.json`` has the same error.
    """
    # The failure of an earlier attempt does not concern this one.
    (directory / contract.FAILURE).unlink(missing_ok=True)
    attempt: TrainingAttempt | None = None
    try:
        if (directory / contract.RESULT).exists():
            return
        job = read_job(directory)
        # For a user program, a child process reads back the flags (program.py), so that torch is
        # never imported in this one.
        if isinstance(job.spec.trainer, CommandTrainer):
            run_program(directory, job, job.spec.trainer)
            return
        flags.prepare(job.spec)
        runtime = flags.apply(job.spec)
        record_runtime(directory, runtime, portable=flags.is_portable(job.spec))
        with accounted(directory, runtime.flags), stop_signals() as stop:
            attempt = TrainingAttempt(directory, job, stop, workers=flags.usable_cores())
            attempt.run()
    except CapsuleError as error:
        _record_failure(directory, attempt, error)
        raise
    except OSError as error:
        # Buffered lines of the trace, the events and a schedule reach the disk at any moment.
        if error.errno not in _NO_ROOM:
            raise
        failure = not_written("a file of the run", error)
        _record_failure(directory, attempt, failure)
        raise failure from error


def _record_failure(
    directory: Path, attempt: TrainingAttempt | None, failure: CapsuleError
) -> None:
    record_failure(directory, failure, None if attempt is None else attempt.learner.step)


class TrainingAttempt:
    """One attempt at a run, from the last saved state on.

    Attributes:
        learner: The trainer.
    """

    def __init__(self, directory: Path, job: Job, stop: Flag, *, workers: int) -> None:
        """Make everything that the spec describes, and restore the saved state, if there is one.

        Args:
            directory: The run directory.
            job: The job.
            stop: When set, the current interval is finished, the state is saved, and
                :class:`Interrupted` is raised.
            workers: Number of processors to use.

        Raises:
            CapsuleError: CAP-T112, ``stop_after`` is not a step of the run; or as
                :func:`make_trainer`, :class:`Checkpointer` and :meth:`Checkpointer.restore`.
        """
        # These import torch, which must not happen before flags.prepare().
        from capsule.training.checkpointer import Checkpointer
        from capsule.training.evaluator import NETWORKS, Evaluator
        from capsule.training.registry import make_trainer
        from capsule.training.state.streams import make_streams
        from capsule.training.state.trace import Trace
        from capsule.training.trainer import TrainerContext

        self._directory, self._stop = directory, stop
        self._spec = spec = job.spec.training()
        self._end = _end_of(spec, job.stop_after)
        self._complete = self._end == spec.trainer.total_steps and not job.segment
        # A prefix repeats what the run did at its start. A segment may have another seed.
        self._checks_starts = not job.segment
        device = flags.device_of(spec)
        workers, evaluators = processors_of(job, device.type, workers)
        state = directory / contract.STATE
        state.mkdir(parents=True, exist_ok=True)
        # An attempt that was killed inside of write_atomic() has left a file with a temporary name.
        for folder in (directory, directory / contract.CHECKPOINTS, state, state / NETWORKS):
            remove_unfinished(folder)
        seeds = _drawn(directory, spec.seeds)
        self._streams = make_streams(seeds)
        self._dense: DenseRecorder | None = None
        if job.dense is not None:
            from capsule.training.instruments.dense_record import DenseRecorder

            self._dense = DenseRecorder(directory, spec, job.dense)
        path = directory / contract.TRACE
        self._trace: Trace = Trace(path) if self._dense is None else self._dense.trace
        self.learner: Trainer = make_trainer(
            TrainerContext(
                directory=state,
                spec=spec,
                seeds=seeds,
                streams=self._streams,
                trace=self._trace,
                device=device,
                workers=workers,
                learners=job.learners,
                replicas=job.replicas,
                dense=self._dense is not None,
            )
        )
        self._events = EventLog(directory / contract.EVENTS, self.learner, self._end)
        self._evaluator = Evaluator(
            directory, spec, self.learner, seeds, self._streams["evaluation"], stop, evaluators
        )
        self._checkpointer = Checkpointer(
            directory,
            spec,
            self.learner,
            self._streams,
            self._trace,
            keeps_states=spec.recording.segment_states and not job.segment,
        )
        # Restored last, because making the trainer has drawn from the streams and begun episodes.
        self._checkpointer.restore()

    def run(self) -> None:
        """Train, evaluate if the run is complete, and write the result.

        Raises:
            Interrupted: The run was asked to stop.
            CapsuleError: The run failed.
        """
        self._events.write("resume" if self.learner.step else "start")
        if self._checks_starts and not self.learner.step:
            self._evaluator.check_starts()
        self._train()
        if self._complete:
            self._trace.flush()
            for step in self._evaluator.evaluate():
                self._events.write("evaluation", message=f"network of step {step}")
        self._write_results()
        self.learner.close()

    def _train(self) -> None:
        learner, interval = self.learner, self._spec.recording.trace_interval
        # This keeps the network before training or, again, that of the step of the restored state.
        self._evaluator.keep_network()
        while learner.step < self._end:
            if self._dense is None:
                learner.train_step()
            else:
                self._dense.interval(learner)
            if learner.step == self._spec.trainer.total_steps and learner.step % interval:
                learner.record()  # the steps since the last record
            self._evaluator.keep_network()
            # The checkpoint comes after the record of this step, because it contains the head of
            # the trace.
            if self._checkpointer.checkpoint(final=learner.step == self._end):
                self._events.write("checkpoint")
            self._events.progress()
            # At the end, the evaluation checks the flag itself.
            if self._stop.is_set() and learner.step < self._end:
                self._checkpointer.save_state()
                raise Interrupted

    def _write_results(self) -> None:
        """Write the documents of a finished run, with the result as the last one."""
        from capsule.training.state.checkpoint import collective_digest

        learner, directory = self.learner, self._directory
        own = (self._streams[name].profile() for name in sorted(self._streams))
        profiles = StreamProfiles(streams=(*own, *learner.stream_profiles()))
        write_document(directory / contract.STREAMS, profiles)
        for name, data in learner.artifacts().items():
            write_file(directory / name, data)
        record_mechanisms(directory, learner.use())
        # Closed before the result refers to its head, so that the file is complete by then.
        self._trace.close()
        self._events.write("finish")
        result = Result(
            complete=self._complete,
            steps=learner.step,
            episodes=learner.episodes,
            trace_records=self._trace.records,
            trace_head=self._trace.head,
            parameters=collective_digest(learner.online.arrays()),
            seconds=self._checkpointer.seconds(),
        )
        # This finishes the run: run() does nothing in a directory with a result.
        write_document(directory / contract.RESULT, result)


class DrawnSeed(Model):
    """The root seed that was drawn for a run, so that a resumed run keeps it."""

    root: int


def _drawn(directory: Path, seeds: SeedsSpec) -> SeedsSpec:
    """Return the seeds with the root seed of the run, which is drawn by its first attempt."""
    if not seeds.random:
        return seeds
    path = directory / contract.STATE / _DRAWN_SEED
    # The seed is saved before any stream is made from it, so that a killed run keeps it.
    if not path.exists():
        # 53 bits: numbers in canonical JSON (RFC 8785) are doubles.
        write_document(path, DrawnSeed(root=secrets.randbits(53)))
    return seeds.model_copy(update={"root": DrawnSeed.model_validate_json(path.read_bytes()).root})


def processors_of(job: Job, device: str, free: int) -> tuple[int, int]:
    """Return the numbers of processors of training and of evaluation, which do not affect results.

    Args:
        job: The job. With a dense record, training and evaluation have a single thread.
        device: The type of the networks' device. Evaluations on a GPU take turns, because cuBLAS
            guarantees the same bits only for a single CUDA stream (cuBLAS Library, "Results
            Reproducibility").
        free: Number of processors that may be used.
    """
    training = 1 if job.dense is not None else free
    return training, training if device == "cpu" else 1


def _end_of(spec: TrainingSpec, stop_after: int | None) -> int:
    """Return the step at which this attempt ends.

    Raises:
        CapsuleError: CAP-T112, ``stop_after`` is not a positive multiple of the interval.
    """
    total, unit = spec.trainer.total_steps, spec.trainer.interval_steps
    if stop_after is None or stop_after >= total:
        return total
    if stop_after <= 0 or stop_after % unit:
        raise CapsuleError(
            "CAP-T112",
            f"stop_after {stop_after} is not a positive multiple of the {unit} steps between "
            "parameter updates",
            fix="Name such a step.",
        )
    return stop_after
