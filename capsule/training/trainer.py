"""The interface between trainers and the life cycle of a run."""

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

STATE_STEPS = 50_000  # most steps between resume states, which bounds a replay memory's slack


@dataclass(frozen=True)
class TrainerContext:
    """The run of a trainer, and the resources that it may use.

    ``workers``, ``learners`` and ``replicas`` do not affect results.

    Attributes:
        directory: Folder for state that is too large for a checkpoint, such as a replay memory.
        spec: The experiment.
        seeds: The spec's ``seeds`` section, with the root seed of the run.
        streams: Every stream of the run.
        trace: The trace of the run.
        device: The device of the networks.
        workers: Number of processors to use. A learner on a GPU has one thread, while its actors,
            which act on the CPU, use all processors.
        learners: Number of processes that share the gradient of a batch; with 1, this process
            computes it in its threads.
        replicas: Number of inference replicas, if the spec lets a server choose the actors'
            actions.
        members: Number of trainers that take turns and share the processors.
        dense: Whether every operator that torch executes is recorded.
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
        """The number of other processes that run actors; 0 if this process runs them."""
        return max(1, self.workers // self.members) if self.workers > 1 else 0

    @property
    def graphed(self) -> bool:
        """Whether parameter updates are launched as CUDA graphs."""
        accelerator = self.spec.accelerator
        return isinstance(accelerator, CudaAccelerator) and accelerator.cuda_graphs


class Trainer(Protocol):
    """An algorithm with its complete state.

    Attributes:
        step: Agent steps taken, of all actors.
        episodes: Number of finished episodes.
        loss: Loss of the last minibatch, None before the first: a mean over transitions (DQN), a
            mean over sequences (R2D2), or a sum over the batch (IMPALA).
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
        """Mean episode return of the last 100 episodes, None before the first."""

    def train_step(self) -> None:
        """Take the steps of one interval and, once learning has started, make its updates.

        Raises:
            CapsuleError: CAP-T151, training has diverged; or an error of the environment, the
                schedule, or a process.
        """

    def exploration(self) -> float | None:
        """Return the mean epsilon of the actors; None if the policy itself is stochastic."""

    def record(self, *, complete: bool = False) -> None:
        """Write one trace record.

        Args:
            complete: Whether to include every tensor, as ``recording.tensor_interval`` otherwise
                decides.
        """

    def tensor_names(self) -> list[str]:
        """Return as many and as long names as :meth:`tensors` has at any step of the run."""

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """Return copies of all trained tensors, by name."""

    def state(self) -> dict[str, Any]:
        """Return a JSON-safe snapshot of everything but the tensors, streams and trace."""

    def restore(
        self, step: int, state: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]
    ) -> None:
        """Continue from a snapshot; streams and trace are restored already."""

    def policy(self, parameters: Parameters) -> EvaluatedPolicy:
        """Return the policy of ``parameters``, for evaluations."""

    def stream_profiles(self) -> list[StreamProfile]:
        """Return the profiles of the trainer's own streams, which are not in the context."""

    def use(self) -> TrainerUse:
        """Return the device, schedule and inference that were used, as the objects report them."""

    def artifacts(self) -> dict[str, bytes]:
        """Return the trainer's own files of the run directory, by name, at the end of the run."""

    def close(self) -> None:
        """End the trainer's threads and processes."""


def state_interval(spec: TrainingSpec) -> int:
    """Return the most steps from one resume state to the next."""
    unit, most = spec.trainer.interval_steps, STATE_STEPS
    if isinstance(spec.trainer, R2d2Trainer):
        # The many actors of R2D2 fill its replay memory fast, and every state digests all of it.
        # With a state for each eighth of the memory, an entry is digested eight times, not ninety.
        most = max(most, spec.trainer.replay_capacity // 8)
    # A multiple of the interval, because states are saved only between two intervals.
    return min(spec.recording.checkpoint_interval, max(unit, most // unit * unit))
