"""One attempt at a run: resume, train, checkpoint, evaluate, write the result.

A run directory can be interrupted or killed at any moment and started again: every file either is
rewritten with the same bytes or appears by atomic rename.
"""

from __future__ import annotations

import errno
import secrets
from pathlib import Path
from threading import Event as Flag
from typing import TYPE_CHECKING

from capsule.experiment import contract
from capsule.experiment.canonical import remove_unfinished
from capsule.experiment.contract import Job, Result, StreamProfiles
from capsule.experiment.errors import CapsuleError
from capsule.experiment.fields import Model
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
    """Do the job in ``directory``, or continue it; a directory that holds a result is left alone.

    Raises:
        Interrupted: The run was asked to stop; it can be started again.
        CapsuleError: The run failed, as ``failure.json`` tells, too.
    """
    # The failure of an earlier attempt says nothing about this one.
    (directory / contract.FAILURE).unlink(missing_ok=True)
    attempt: TrainingAttempt | None = None
    try:
        if (directory / contract.RESULT).exists():
            return
        job = read_job(directory)
        # A program's flags are read back in a child (program.py), so torch is never imported here.
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
        # The trace, the events and a schedule are appended to, and reach the disk at any moment.
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
    """A process's part of a run.

    Attributes:
        learner: The algorithm, restored from the last saved state.
    """

    def __init__(self, directory: Path, job: Job, stop: Flag, *, workers: int) -> None:
        """Build everything the spec names and restore the state that ``directory`` holds.

        Args:
            directory: The run directory.
            job: What to do.
            stop: When set, the current interval is finished, the state saved, and
                :class:`Interrupted` raised.
            workers: Threads to use.
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
        device = flags.device_of(spec)
        workers, evaluators = processors_of(job, device.type, workers)
        state = directory / contract.STATE
        state.mkdir(parents=True, exist_ok=True)
        # An attempt that was killed inside write_atomic() left a file under a temporary name.
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
                state,
                spec,
                seeds,
                self._streams,
                self._trace,
                device,
                workers,
                job.learners,
                job.replicas,
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
        # Last, because what was made above has drawn from the streams and begun episodes.
        self._checkpointer.restore()

    def run(self) -> None:
        """Train, evaluate unless this is a prefix, and write the result.

        Raises:
            Interrupted: The run was asked to stop.
            CapsuleError: The run failed.
        """
        self._events.write("resume" if self.learner.step else "start")
        self._train()
        if self._complete:
            self._trace.flush()
            for step in self._evaluator.evaluate():
                self._events.write("evaluation", message=f"network of step {step}")
        self._write_results()
        self.learner.close()

    def _train(self) -> None:
        learner, interval = self.learner, self._spec.recording.trace_interval
        # The network before training, or once more the one of the step at which the run resumes.
        self._evaluator.keep_network()
        while learner.step < self._end:
            if self._dense is None:
                learner.train_step()
            else:
                self._dense.interval(learner)
            if learner.step == self._spec.trainer.total_steps and learner.step % interval:
                learner.record()  # the steps since the last record
            self._evaluator.keep_network()
            # After the record of this step, because a claimed checkpoint contains the head of the
            # trace.
            if self._checkpointer.checkpoint(final=learner.step == self._end):
                self._events.write("checkpoint")
            self._events.progress()
            # At the end only the evaluation is left to interrupt, and it looks at the flag itself.
            if self._stop.is_set() and learner.step < self._end:
                self._checkpointer.save_state()
                raise Interrupted

    def _write_results(self) -> None:
        """Write what the run gave out, and the result last of all."""
        from capsule.training.state.checkpoint import collective_digest

        learner, directory = self.learner, self._directory
        own = (self._streams[name].profile() for name in sorted(self._streams))
        profiles = StreamProfiles(streams=(*own, *learner.stream_profiles()))
        write_document(directory / contract.STREAMS, profiles)
        for name, data in learner.artifacts().items():
            write_file(directory / name, data)
        record_mechanisms(directory, learner.use())
        # Closed before the result names its head, so that the file has every record by then.
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
        # From here on the run is finished, and run() leaves its directory alone.
        write_document(directory / contract.RESULT, result)


class DrawnSeed(Model):
    """The root seed that the operating system gave, so that a resumed run keeps it."""

    root: int


def _drawn(directory: Path, seeds: SeedsSpec) -> SeedsSpec:
    """Return the seeds with a root in them, drawn now unless an earlier attempt drew it."""
    if not seeds.random:
        return seeds
    path = directory / contract.STATE / _DRAWN_SEED
    # The seed is in its file before any stream is made from it, so that a killed run keeps it.
    if not path.exists():
        # 53 bits: numbers in canonical JSON (RFC 8785) are doubles.
        write_document(path, DrawnSeed(root=secrets.randbits(53)))
    return seeds.model_copy(update={"root": DrawnSeed.model_validate_json(path.read_bytes()).root})


def processors_of(job: Job, device: str, free: int) -> tuple[int, int]:
    """Return how many processors training and evaluation use; changes no bit.

    Args:
        job: What to do. A dense record is written by a single thread.
        device: The type of the networks' device. Evaluations on a GPU take turns, as cuBLAS repeats
            its bits for one stream only (cuBLAS Library, "Results Reproducibility").
        free: Processors that may be used.
    """
    training = 1 if job.dense is not None else free
    return training, training if device == "cpu" else 1


def _end_of(spec: TrainingSpec, stop_after: int | None) -> int:
    """Return the step to stop at."""
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
