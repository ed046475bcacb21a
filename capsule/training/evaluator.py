"""The evaluation of a run: networks are kept during the training, and evaluated at its end."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, repeat
from pathlib import Path
from threading import Event as Flag
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError
from safetensors.numpy import load_file

from capsule.experiment import contract
from capsule.experiment.contract import Evaluation, EvaluationPoint
from capsule.experiment.evaluation import Starts
from capsule.experiment.fields import Model
from capsule.experiment.spec import SeedsSpec, TrainingSpec, tasks_of
from capsule.training.determinism.gpu_memory import check_memory
from capsule.training.environments import Environment
from capsule.training.evaluation.action_choice import choice_of
from capsule.training.evaluation.protocol import (
    EvaluatedPolicy,
    MakeEnvironment,
    ObservationBatch,
    check_candidates,
    choose_starts,
    evaluate,
    evaluation_environments,
)
from capsule.training.networks.feedforward import Parameters
from capsule.training.state.checkpoint import damaged, save_tensors
from capsule.training.state.run_directory import Interrupted, write_document
from capsule.training.state.streams import Stream, make_streams
from capsule.training.trainer import Trainer

NETWORKS = "networks"  # the folder of kept networks, inside the folder of the state
_PROGRESS = f"{contract.STATE}/evaluation.json"


class EvaluationProgress(Model):
    """The finished part of an evaluation, from which it is resumed."""

    stream: dict[str, Any] = Field(description="Stream 'evaluation' after the starts were chosen.")
    evaluation: Evaluation


class Evaluator:
    """Keeps the networks that a spec evaluates, and evaluates them."""

    def __init__(
        self,
        directory: Path,
        spec: TrainingSpec,
        learner: Trainer,
        seeds: SeedsSpec,
        stream: Stream,
        stop: Flag,
        workers: int,
    ) -> None:
        """Prepare for a run.

        Args:
            directory: The run directory.
            spec: The experiment.
            learner: The trainer.
            seeds: The spec's ``seeds`` section, with the root seed of the run.
            stream: The stream ``evaluation``.
            stop: When set, :class:`Interrupted` is raised in the middle of an evaluation.
            workers: Number of threads.
        """
        self._directory, self._spec, self._learner = directory, spec, learner
        self._seeds, self._stream = seeds, stream
        self._stop, self._workers = stop, workers
        self._steps = evaluated_steps(spec)

    def check_starts(self) -> None:
        """Check, before training, that the evaluation at its end will find enough starts.

        Raises:
            Interrupted: The run was asked to stop.
            CapsuleError: CAP-T231, there will be too few; or an error of the environment.
        """
        task = self._spec.environment
        make_env = evaluation_environments(task, self._seeds, len(tasks_of(task)))

        def unless_stopped(index: int) -> Environment:
            if self._stop.is_set():
                raise Interrupted
            return make_env(index)

        # A copy of the stream, because its position is part of the claims.
        stream = make_streams(self._seeds)["evaluation"]
        check_candidates(unless_stopped, self._learner.actions, self._spec.evaluation, stream)

    def keep_network(self) -> None:
        """Save the network if the spec evaluates that of the current step.

        It is evaluated at the end of the run, because the final network ranks the starts.
        """
        if self._learner.step in self._steps:
            save_tensors(self._path(self._learner.step), self._learner.online.arrays())

    def evaluate(self) -> Iterator[int]:
        """Evaluate the kept networks in order, as many at a time as there are threads.

        Each thread has environments of its own, which are made once, because loading games takes
        longer than playing them.

        Yields:
            The step of the last network that was evaluated, each time that progress was saved.

        Raises:
            Interrupted: The run was asked to stop.
            CapsuleError: CAP-T132, the saved progress is damaged; CAP-T116, the GPU had too little
                memory; or an error of the protocol, the environment or the policy.
        """
        spec = self._spec
        makers = [
            evaluation_environments(spec.environment, self._seeds, spec.evaluation.starts)
            for _ in range(self._workers)
        ]
        progress = self._load_progress() or self._choose_starts(makers[0])
        # A resumed evaluation does not draw the starts again, but the stream's position is part of
        # the claims (streams.json).
        self._stream.restore(progress.stream)
        starts, points = progress.evaluation.starts, list(progress.evaluation.points)
        waiting = iter(self._steps[len(points) :])

        # Progress is saved for whole batches, so the saved points belong to the first steps, and a
        # resumed evaluation continues after them.
        with ThreadPoolExecutor(self._workers) as pool:
            while steps := list(islice(waiting, self._workers)):
                # The last batch may have fewer steps than there are makers.
                points += pool.map(self._evaluate_network, makers, repeat(starts), steps)
                check_memory(self._learner.online.flat.device)
                evaluation = Evaluation(starts=starts, points=tuple(points))
                progress = EvaluationProgress(stream=progress.stream, evaluation=evaluation)
                write_document(self._directory / _PROGRESS, progress)
                yield steps[-1]
        write_document(self._directory / contract.EVALUATION, progress.evaluation)

    def _load_progress(self) -> EvaluationProgress | None:
        path = self._directory / _PROGRESS
        if not path.exists():
            return None
        try:
            return EvaluationProgress.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise damaged(_PROGRESS, "is not a saved evaluation") from error

    def _choose_starts(self, make_env: MakeEnvironment) -> EvaluationProgress:
        starts = choose_starts(
            make_env,
            self._learner.actions,
            self._spec.evaluation,
            self._stream,
            self._interruptible(self._learner.online),
        )
        evaluation = Evaluation(starts=starts, points=())
        return EvaluationProgress(stream=self._stream.state(), evaluation=evaluation)

    def _evaluate_network(
        self, make_env: MakeEnvironment, starts: Starts, step: int
    ) -> EvaluationPoint:
        # Threads evaluate different networks at the same time, so each has parameters of its own.
        parameters = self._learner.online.zeros_like()
        parameters.load(load_file(self._path(step)))
        spec, policy = self._spec.evaluation, self._interruptible(parameters)
        choose = choice_of(spec, self._seeds, len(starts))
        return evaluate(make_env, starts, spec, policy, step, choose)

    def _interruptible(self, parameters: Parameters) -> EvaluatedPolicy:
        return _Interruptible(self._learner.policy(parameters), self._stop)

    def _path(self, step: int) -> Path:
        return self._directory / contract.STATE / NETWORKS / f"{step}.safetensors"


class _Interruptible:
    """A policy that raises :class:`Interrupted` when a flag is set."""

    def __init__(self, policy: EvaluatedPolicy, stop: Flag) -> None:
        self._policy, self._stop = policy, stop
        self.recurrent = policy.recurrent

    def __call__(self, seen: ObservationBatch) -> NDArray[np.float32]:
        if self._stop.is_set():
            raise Interrupted
        return self._policy(seen)

    def state_values(self, seen: ObservationBatch) -> NDArray[np.float32]:
        if self._stop.is_set():
            raise Interrupted
        return self._policy.state_values(seen)


def evaluated_steps(spec: TrainingSpec) -> list[int]:
    """Return the steps whose networks are evaluated: every interval, the end, and perhaps 0."""
    # range() excludes the total, so that it is evaluated once even if it is a multiple of the
    # interval.
    total, interval = spec.trainer.total_steps, spec.evaluation.interval
    return [*range(0 if spec.evaluation.initial else interval, total, interval), total]
