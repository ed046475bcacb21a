"""One attempt at a run: resume, train, checkpoint, evaluate, write the result.

A run directory can be interrupted or killed at any moment and started again: every file either is
rewritten with the same bytes or appears by atomic rename.
"""

from __future__ import annotations

import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from threading import Event as Flag
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError

from capsule.experiment import contract
from capsule.experiment.canonical import remove_unfinished, write_atomic
from capsule.experiment.contract import (
    Checkpoint,
    CheckpointIndex,
    Evaluation,
    EvaluationPoint,
    Event,
    Job,
    Result,
    StreamProfiles,
)
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.fields import Model
from capsule.experiment.spec import SeedsSpec, TrainingSpec
from capsule.experiment.trainers import CommandTrainer
from capsule.training.accounts import accounted, record_mechanisms
from capsule.training.determinism import flags
from capsule.training.own_program.program import run_program
from capsule.training.state.run_directory import (
    Interrupted,
    append_event,
    drop_partial_line,
    read_job,
    record_failure,
    record_runtime,
    stop_signals,
    write_document,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from capsule.experiment.evaluation import Starts
    from capsule.training.evaluation.protocol import MakeEnvironment, Policy, Seen
    from capsule.training.instruments.dense_record import DenseRecorder
    from capsule.training.networks.feedforward import Parameters
    from capsule.training.state.trace import Trace
    from capsule.training.trainer import Trainer

_EVALUATION_PROGRESS = "evaluation.json"
_NETWORKS = "networks"
_DRAWN_SEED = "seed.json"


class EvaluationProgress(Model):
    """What a resumed evaluation need not do again."""

    stream: dict[str, Any] = Field(description="Stream 'evaluation' after the starts were chosen.")
    evaluation: Evaluation


def run(directory: Path) -> None:
    """Do the job in ``directory``, or go on with it; nothing is left to do where a result is.

    Raises:
        Interrupted: The run was asked to stop; it can be started again.
        CapsuleError: The run failed, as ``failure.json`` tells, too.
    """
    (directory / contract.FAILURE).unlink(missing_ok=True)
    attempt: Attempt | None = None
    try:
        if (directory / contract.RESULT).exists():
            return
        job = read_job(directory)
        if isinstance(job.spec.trainer, CommandTrainer):
            run_program(directory, job, job.spec.trainer)
            return
        flags.prepare(job.spec)
        runtime = flags.apply(job.spec)
        record_runtime(directory, runtime, portable=flags.is_portable(job.spec))
        with accounted(directory, runtime.flags), stop_signals() as stop:
            attempt = Attempt(directory, job, stop, workers=flags.usable_cores())
            attempt.run()
    except CapsuleError as error:
        step = None if attempt is None else attempt.learner.step
        record_failure(directory, error, step)
        raise


class DrawnSeed(Model):
    """The root seed that the operating system gave, so that a resumed run keeps it."""

    root: int


def _drawn(directory: Path, seeds: SeedsSpec) -> SeedsSpec:
    """Return the seeds with a root in them, drawn now unless an earlier attempt drew it."""
    if not seeds.random:
        return seeds
    path = directory / contract.STATE / _DRAWN_SEED
    if not path.exists():
        write_document(path, DrawnSeed(root=secrets.randbits(53)))
    return seeds.model_copy(update={"root": DrawnSeed.model_validate_json(path.read_bytes()).root})


class Attempt:
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
        from capsule.training.registry import make_trainer
        from capsule.training.state.streams import make_streams
        from capsule.training.state.trace import Trace
        from capsule.training.trainer import TrainerContext

        self._directory = directory
        self._spec = spec = job.spec.training()
        self._end = _end_of(spec, job.stop_after)
        self._keeps_states = spec.recording.segment_states and not job.segment
        self._complete = self._end == spec.trainer.total_steps and not job.segment
        self._stop = stop
        device = flags.device_of(spec)
        alone = device.type != "cpu" or job.dense is not None  # one stream keeps cuBLAS in order
        self._workers = 1 if alone else workers
        self._started = time.monotonic()
        self._seconds_before = 0.0
        self._checkpoints: list[Checkpoint] = []
        state = directory / contract.STATE
        state.mkdir(parents=True, exist_ok=True)
        for folder in (directory, directory / contract.CHECKPOINTS, state, state / _NETWORKS):
            remove_unfinished(folder)
        self._seeds = _drawn(directory, spec.seeds)
        self._streams = make_streams(self._seeds)
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
                self._seeds,
                self._streams,
                self._trace,
                device,
                self._workers,
                job.learners,
                job.replicas,
            )
        )
        self._events = _Events(directory / contract.EVENTS, self.learner, spec)
        self._restore()

    def run(self) -> None:
        """Train, evaluate unless this is a prefix, and write the result.

        Raises:
            Interrupted: The run was asked to stop.
            CapsuleError: The run failed.
        """
        self._events.write("resume" if self.learner.step else "start")
        self._train()
        if self._complete:
            self._evaluate()
        self._write(contract.STREAMS, self._stream_profiles())
        for name, data in self.learner.artifacts().items():
            write_atomic(self._directory / name, data)
        self._finish()
        self.learner.close()

    def _train(self) -> None:
        learner = self.learner
        self._keep_network()
        while learner.step < self._end:
            if self._dense is None:
                learner.train_step()
            else:
                self._dense.interval(learner)
            if learner.step == self._spec.trainer.total_steps:
                self._record_rest()
            self._keep_network()
            self._checkpoint()
            self._events.progress()
            if self._stop.is_set() and learner.step < self._end:
                self._save_state()
                raise Interrupted

    def _record_rest(self) -> None:
        """Close the trace with a record of the steps since the last one."""
        if self.learner.step % self._spec.recording.trace_interval:
            self.learner.record()

    def _keep_network(self) -> None:
        """Keep the network for the evaluation, which needs the final one to choose its starts."""
        from capsule.training.state.checkpoint import save_tensors

        step = self.learner.step
        if step in _evaluated_steps(self._spec):
            save_tensors(self._network_path(step), self.learner.online.arrays())

    def _checkpoint(self) -> None:
        """Claim a checkpoint, and save a state to resume from, where one is due."""
        from capsule.training.state.checkpoint import save_tensors, tensor_digests
        from capsule.training.trainer import state_interval

        step, final = self.learner.step, self.learner.step == self._end
        claimed = self._claims(step)
        if not (claimed or final or step % state_interval(self._spec) == 0):
            return
        tensors = self.learner.tensors()
        digests = tensor_digests(tensors)
        if claimed:
            checkpoint = Checkpoint(step=step, tensors=digests, trace_head=self._trace.head)
            self._checkpoints.append(checkpoint)
            name = f"{contract.CHECKPOINTS}/{contract.checkpoint_name(step)}"
            self._write(f"{name}.json", checkpoint)
            if step == self._spec.trainer.total_steps:
                save_tensors(self._directory / f"{name}.safetensors", tensors)
            index = CheckpointIndex(checkpoints=tuple(self._checkpoints))
            self._write(contract.CHECKPOINT_INDEX, index)
            self._events.write("checkpoint")
        self._save_state(tensors, digests)
        self._keep_state()

    def _claims(self, step: int) -> bool:
        """Tell whether the checkpoint at ``step`` is claimed."""
        total = self._spec.trainer.total_steps
        return step % self._spec.recording.checkpoint_interval == 0 or step == total

    def _keep_state(self) -> None:
        """Keep the state that was saved last, where the next segment of the run begins with it."""
        from capsule.training.state.segment_states import keep_state

        step = self.learner.step
        if self._keeps_states and self._claims(step) and step < self._spec.trainer.total_steps:
            keep_state(self._directory, step)

    def _save_state(
        self,
        tensors: dict[str, NDArray[np.float32]] | None = None,
        digests: dict[str, str] | None = None,
    ) -> None:
        from capsule.experiment.states import ResumeState
        from capsule.training.state.checkpoint import save_resume_state, tensor_digests

        tensors = tensors or self.learner.tensors()
        state = ResumeState(
            spec=self._spec.digest(),
            step=self.learner.step,
            seconds=self._seconds(),
            tensors=digests or tensor_digests(tensors),
            streams={name: stream.state() for name, stream in self._streams.items()},
            trainer=self.learner.state(),
            trace=self._trace.state(),
            checkpoints=tuple(self._checkpoints),
        )
        save_resume_state(self._directory / contract.STATE, state, tensors)

    def _restore(self) -> None:
        """Go back to the last saved state, if there is one."""
        from capsule.training.state.checkpoint import load_resume_state

        saved = load_resume_state(self._directory / contract.STATE, self._spec.digest())
        if saved is None:
            self._trace.restore(None)
            return
        state, tensors = saved
        for name, stream in self._streams.items():
            stream.restore(state.streams[name])
        self._trace.restore(state.trace)
        self.learner.restore(state.step, state.trainer, tensors)
        self._checkpoints = list(state.checkpoints)
        self._seconds_before = state.seconds
        self._keep_state()  # unless the attempt that saved it did

    def _evaluate(self) -> None:
        """Evaluate the kept networks in order, as many at a time as there are threads.

        Each thread plays in environments of its own, which are made once: loading games takes
        longer than playing them.
        """
        from capsule.training.evaluation.protocol import evaluation_environments

        self._trace.flush()
        spec = self._spec
        makers = [
            evaluation_environments(spec.environment, self._seeds, spec.evaluation.starts)
            for _ in range(self._workers)
        ]
        progress = self._load_evaluation() or self._choose_starts(makers[0])
        self._streams["evaluation"].restore(progress.stream)
        starts, points = progress.evaluation.starts, list(progress.evaluation.points)
        waiting = iter(_evaluated_steps(spec)[len(points) :])

        def point(make_env: MakeEnvironment, step: int) -> EvaluationPoint:
            return self._evaluate_network(make_env, starts, step)

        with ThreadPoolExecutor(self._workers) as pool:
            while steps := list(islice(waiting, self._workers)):
                points += pool.map(point, makers, steps)  # fewer steps leave makers idle
                evaluation = Evaluation(starts=starts, points=tuple(points))
                progress = EvaluationProgress(stream=progress.stream, evaluation=evaluation)
                self._write(f"{contract.STATE}/{_EVALUATION_PROGRESS}", progress)
                self._events.write("evaluation", message=f"network of step {steps[-1]}")
        self._write(contract.EVALUATION, progress.evaluation)

    def _load_evaluation(self) -> EvaluationProgress | None:
        path = self._directory / contract.STATE / _EVALUATION_PROGRESS
        if not path.exists():
            return None
        try:
            return EvaluationProgress.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise CapsuleError(
                "CAP-T132",
                f"{contract.STATE}/{path.name} is not a saved evaluation",
                fix="Start a new run directory: this one was changed or is incomplete.",
                exit_code=ExitCode.TRAINING_FAILED,
            ) from error

    def _choose_starts(self, make_env: MakeEnvironment) -> EvaluationProgress:
        from capsule.training.evaluation.protocol import choose_starts

        stream = self._streams["evaluation"]
        starts = choose_starts(
            make_env,
            self.learner.actions,
            self._spec.evaluation,
            stream,
            self._interruptible(self.learner.online),
        )
        evaluation = Evaluation(starts=starts, points=())
        return EvaluationProgress(stream=stream.state(), evaluation=evaluation)

    def _evaluate_network(
        self, make_env: MakeEnvironment, starts: Starts, step: int
    ) -> EvaluationPoint:
        from safetensors.numpy import load_file

        from capsule.training.evaluation.action_choice import choice_of
        from capsule.training.evaluation.protocol import evaluate

        parameters = self.learner.online.zeros_like()
        parameters.load(load_file(self._network_path(step)))
        spec, policy = self._spec.evaluation, self._interruptible(parameters)
        choose = choice_of(spec, self._seeds, len(starts))
        return evaluate(make_env, starts, spec, policy, step, choose)

    def _interruptible(self, parameters: Parameters) -> Policy:
        return _Interruptible(self.learner.policy(parameters), self._stop)

    def _finish(self) -> None:
        """Write the result, last of all."""
        from capsule.training.state.checkpoint import collective_digest

        learner = self.learner
        record_mechanisms(self._directory, learner.use())
        self._trace.close()
        self._events.write("finish")
        result = Result(
            complete=self._complete,
            steps=learner.step,
            episodes=learner.episodes,
            trace_records=self._trace.records,
            trace_head=self._trace.head,
            parameters=collective_digest(learner.online.arrays()),
            seconds=self._seconds(),
        )
        self._write(contract.RESULT, result)

    def _stream_profiles(self) -> StreamProfiles:
        return StreamProfiles(
            streams=(
                *(self._streams[name].profile() for name in sorted(self._streams)),
                *self.learner.stream_profiles(),
            )
        )

    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._started

    def _network_path(self, step: int) -> Path:
        return self._directory / contract.STATE / _NETWORKS / f"{step}.safetensors"

    def _write(self, name: str, document: Model) -> None:
        write_document(self._directory / name, document)


class _Interruptible:
    """A policy that can be asked to stop."""

    def __init__(self, policy: Policy, stop: Flag) -> None:
        self._policy = policy
        self._stop = stop
        self.recurrent = policy.recurrent

    def __call__(self, seen: Seen) -> NDArray[np.float32]:
        if self._stop.is_set():
            raise Interrupted
        return self._policy(seen)


class _Events:
    """Appends to ``events.jsonl``, progress about once a second."""

    def __init__(self, path: Path, learner: Trainer, spec: TrainingSpec) -> None:
        self._path = path
        self._learner = learner
        self._total = spec.trainer.total_steps
        self._last = (time.monotonic(), 0)
        drop_partial_line(path)

    def progress(self) -> None:
        """Write a progress event if the last one is a second old."""
        now, (before, step) = time.monotonic(), self._last
        if now - before >= 1.0:
            self._last = (now, self._learner.step)
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
            time=time.time(),
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
            exit_code=ExitCode.USAGE,
        )
    return stop_after


def _evaluated_steps(spec: TrainingSpec) -> list[int]:
    """Return the steps whose networks are evaluated: 0 if asked for, every interval, the end."""
    total, interval = spec.trainer.total_steps, spec.evaluation.interval
    return [*range(0 if spec.evaluation.initial else interval, total, interval), total]
