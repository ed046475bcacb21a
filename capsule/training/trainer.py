"""The interface of a trainer to the life cycle of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from capsule.experiment.spec import CudaAccelerator, SeedsSpec, StreamName, TrainingSpec
from capsule.experiment.trainers import R2d2Trainer

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from capsule.experiment.contract import StreamProfile
    from capsule.experiment.mechanisms import TrainerUse
    from capsule.training.evaluation.protocol import EvaluatedPolicy
    from capsule.training.networks.feedforward import Parameters
    from capsule.training.state.streams import Stream
    from capsule.training.state.trace import Trace

STATE_STEPS = 50_000  # most steps between resume states: bounds a replay memory's slack


@dataclass(frozen=True)
class TrainerContext:
    """The surroundings of a trainer: its run, and what it may use.

    Attributes:
        directory: Where it may keep what is too large for a checkpoint.
        spec: The experiment.
        seeds: The spec's, with a root in them.
        streams: Every stream of the run.
        trace: Where every interval is recorded.
        device: Where the networks live.
        workers: Processors to use; changes no result. A learner on a GPU has one thread, and its
            actors, which act on the CPU, have all of them.
        learners: Processes to share the gradient of a batch; changes no result. 1: this one alone,
            with its threads.
        replicas: Processes that answer the actors, of trainers whose spec has them answered by
            others; changes no result.
        members: Trainers that share the workers, and take turns.
        dense: Whether every operator is written down, as torch executes it.
    """

    directory: Path
    spec: TrainingSpec
    seeds: SeedsSpec
    streams: Mapping[StreamName, Stream]
    trace: Trace
    device: torch.device
    workers: int
    learners: int = 1
    replicas: int = 1
    members: int = 1
    dense: bool = False

    @property
    def actor_processes(self) -> int:
        """Processes that play actors, beside this one; 0: this one plays them."""
        return max(1, self.workers // self.members) if self.workers > 1 else 0

    @property
    def graphed(self) -> bool:
        """Whether updates are launched as CUDA graphs."""
        accelerator = self.spec.accelerator
        return isinstance(accelerator, CudaAccelerator) and accelerator.cuda_graphs


class Trainer(Protocol):
    """An algorithm and everything its next step depends on.

    Attributes:
        step: Agent steps taken.
        episodes: Episodes finished.
        loss: Loss of the last minibatch, None before the first: DQN's mean over transitions,
            R2D2's mean over sequences, IMPALA's sum over the batch.
        actions: Number of actions.
        online: Parameters theta.
    """

    step: int
    episodes: int
    loss: float | None
    actions: int
    online: Parameters

    @property
    def mean_return(self) -> float | None:
        """Mean episode return of the last episodes, None before the first."""

    def train_step(self) -> None:
        """Take the steps that belong to one update, and once learning has started, update."""

    def exploration(self) -> float | None:
        """Return the (mean) probability of a random action, None where policies are random."""

    def record(self, *, complete: bool = False) -> None:
        """Write one trace record, with every tensor in it if it is to be complete."""

    def tensor_names(self) -> list[str]:
        """Return the most names that :meth:`tensors` can have during the run."""

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """Return copies of all trained tensors."""

    def state(self) -> dict[str, Any]:
        """Return a JSON-safe snapshot of everything but the tensors, streams and trace."""

    def restore(
        self, step: int, state: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]
    ) -> None:
        """Continue from a snapshot; streams and trace are restored already."""

    def policy(self, parameters: Parameters) -> EvaluatedPolicy:
        """Return the policy of ``parameters``, for evaluations."""

    def stream_profiles(self) -> list[StreamProfile]:
        """Return the profiles of streams that are the trainer's own."""

    def use(self) -> TrainerUse:
        """Say what was used, as found in the objects that did the work."""

    def artifacts(self) -> dict[str, bytes]:
        """Return files of the run directory that are the trainer's own, by name, at its end."""

    def close(self) -> None:
        """End its threads and processes."""


def state_interval(spec: TrainingSpec) -> int:
    """Return the most steps from one resume state to the next."""
    unit, most = spec.trainer.interval_steps, STATE_STEPS
    if isinstance(spec.trainer, R2d2Trainer):
        # Its many actors fill the replay memory fast, and a state digests all of it. With a state
        # for each eighth of the memory, an entry is digested eight times and not ninety.
        most = max(most, spec.trainer.replay_capacity // 8)
    # A multiple of the unit, because a state is saved between two intervals and never within one.
    return min(spec.recording.checkpoint_interval, max(unit, most // unit * unit))
