"""The common parts of trainers: theta, counts of episodes, trace records, and defaults."""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import chain
from operator import add
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from capsule.experiment.contract import StreamProfile
from capsule.experiment.errors import CapsuleError
from capsule.experiment.trainers import Initialization
from capsule.training.determinism.gpu_memory import check_memory
from capsule.training.networks.feedforward import Parameters, Shape, initialize
from capsule.training.networks.own_module import OwnModule
from capsule.training.state.trace import arrays_digest
from capsule.training.train_state import TrainState
from capsule.training.trainer import TrainerContext

RETURNS_KEPT = 100


class BaseTrainer:
    """The base of trainers with one set of parameters; see :class:`Trainer`.

    Attributes:
        step: Agent steps so far, of all actors.
        episodes: Number of finished episodes.
        returns: Episode returns of the last 100 episodes.
        loss: Loss of the last minibatch, None before the first.
        online: Parameters theta.
    """

    _train_state: TrainState

    def __init__(
        self,
        context: TrainerContext,
        shapes: Mapping[str, Shape],
        modules: Sequence[OwnModule],
        initialization: Initialization = "uniform",
    ) -> None:
        """Draw theta from the stream ``initialization``.

        Args:
            context: The run.
            shapes: Name to shape of the network's parameters.
            modules: The user modules of the network, which initialize their own parameters.
            initialization: Distribution of the other parameters.
        """
        self._context, self._spec = context, context.spec
        self._streams, self._trace, self._device = context.streams, context.trace, context.device
        self.step = self.episodes = 0
        self.returns: deque[float] = deque(maxlen=RETURNS_KEPT)
        self.loss: float | None = None
        self.online = Parameters(shapes, context.device)
        initialize(self.online, context.streams["initialization"], initialization)
        for module in modules:
            module.initialize(self.online.views, context.streams["initialization"])
        self._gradient = self.online.flat[:0]  # the last one, empty before the first
        self._minibatch: Sequence[tuple[NDArray[Any], ...]] = ()  # the last one, by shards

    @property
    def mean_return(self) -> float | None:
        """Mean episode return of the last 100 episodes, None before the first."""
        return math.fsum(self.returns) / len(self.returns) if self.returns else None

    def _count_episodes(self, returns: Sequence[float]) -> None:
        """Count episodes that ended, given their episode returns."""
        self.episodes += len(returns)
        self.returns.extend(returns)

    def _take_loss(self, parts: Sequence[torch.Tensor], *, share: int = 1, fix: str) -> None:
        """Trace the losses of a minibatch's shards, and set ``loss`` to their sum over ``share``.

        Args:
            parts: Loss of each shard, float32 scalars.
            share: Divisor of the sum.
            fix: Remedy in the message of the error.

        Raises:
            CapsuleError: CAP-T151, the loss is not finite.
        """
        # On a GPU this waits for the gradient, so it must not be part of a captured region
        # (cuda_graph.py).
        losses = [float(part) for part in parts]
        self._trace.add("loss", struct.pack(f"<{len(losses)}d", *losses))
        # The bits of sum() differ from Python 3.12 on, and fsum() rejects infinities.
        self.loss = reduce(add, losses) / share
        if not math.isfinite(self.loss):
            raise CapsuleError("CAP-T151", f"the loss is {self.loss} at step {self.step}", fix=fix)

    def _gradient_tensors(self) -> Sequence[torch.Tensor] | None:
        """Return the last gradient as one flat tensor for each of theta; None before the first."""
        return self.online.split(self._gradient) if len(self._gradient) else None

    def digests(self) -> dict[str, dict[str, str]]:
        """Return the tensors of a trace record: component to tensor name to digest."""
        return self._train_state.digests(self._gradient_tensors())

    def take_unrolls(self) -> dict[str, str] | None:
        """Return name to digest of the unrolls trained on since the last call.

        None for trainers without unrolls.
        """
        return None

    def record(self, *, complete: bool = False) -> None:
        """Write one trace record; see :meth:`Trainer.record`.

        Raises:
            CapsuleError: CAP-T116, the GPU had too little memory.
        """
        check_memory(self.online.flat.device)
        complete = complete or self._trace.wants_tensors(self.step, self._spec.recording)
        minibatch = chain.from_iterable(self._minibatch)
        self._trace.record(
            self.step,
            self._streams,
            loss=self.loss,
            minibatch=arrays_digest(minibatch) if complete and self._minibatch else None,
            unrolls=self.take_unrolls(),
            tensors=self.digests() if complete else None,
        )

    def tensor_names(self) -> list[str]:
        """See :meth:`Trainer.tensor_names`."""
        return self._train_state.names()

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """Return copies of all trained tensors, as ``group/name``."""
        return self._train_state.tensors()

    def state(self) -> dict[str, Any]:
        """Return a JSON-safe snapshot of everything but the tensors, streams and trace.

        Raises:
            CapsuleError: CAP-T116, the GPU had too little memory. A process that resumes from the
                snapshot could not detect this.
        """
        check_memory(self.online.flat.device)
        return {
            "episodes": self.episodes,
            "returns": list(self.returns),
            "loss": None if self.loss is None else self.loss.hex(),
        }

    def restore(
        self, step: int, state: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]
    ) -> None:
        """Continue from a snapshot; streams and trace are restored already.

        Args:
            step: Agent steps taken.
            state: The result of :meth:`state`.
            tensors: The result of :meth:`tensors`.

        Raises:
            CapsuleError: An environment, the replay memory or the recorded schedule cannot return
                to the snapshot.
        """
        self.step, self.episodes = step, state["episodes"]
        self.returns = deque(state["returns"], RETURNS_KEPT)
        self.loss = None if state["loss"] is None else float.fromhex(state["loss"])
        self._train_state.load(tensors)

    def stream_profiles(self) -> list[StreamProfile]:
        """Return the profiles of the trainer's own streams; by default there are none."""
        return []

    def artifacts(self) -> dict[str, bytes]:
        """Return the trainer's own files of the run directory; by default there are none."""
        return {}
