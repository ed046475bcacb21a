"""Learners: the gradient of a batch by several threads or processes, the same bits for any number.

The spec splits a batch into *shards* (``trainer.micro_batches``). The gradient of a shard is one
computation in one place, and those of all shards are added one after the other in the order of the
spec. So who computes which shard shows in no result. An all-reduce would not do: it adds what each
rank has, in an order that depends on how many there are.

*Ranks*. Rank 0 is the run; it alone has the optimizer, the schedule, the trace, and what is saved.
Every other rank is a process that keeps nothing: for each update it is sent theta and its shards,
and answers with their losses and gradients. So there is no state of it to save, to restore, or to
drift. With ``n`` ranks, shard ``s`` is computed by rank ``s mod n``.

*Pipes, not torch.distributed*. An exchange of 8 shards' gradients of 1.2 million parameters, on two
busy cores, median of six::

    ranks                                        2         4         8
    gloo, all_gather; every rank updates    303 ms    461 ms    428 ms
    gloo, theta broadcast; gather           129 ms    168 ms    174 ms
    pipes, theta sent; gradients back       137 ms    164 ms    458 ms

That every rank adds and updates by itself costs most: each receives every gradient. Against the
second, pipes lose only with more ranks than cores, and they need no rendezvous, no port and no
timeout: the end of a process is the end of its pipe. They work the same for ranks on GPUs, of which
any number may share one, as NCCL's may not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from multiprocessing.util import Finalize
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from capsule.experiment.spec import DeterminismSpec, Numerics
from capsule.training.acting.worker_process import Role, WorkerProcess, stop
from capsule.training.impala.actors.unrolls import Unroll
from capsule.training.networks.feedforward import Parameters, Shape

LEARNER = Role("learners", "gradient shard", "CAP-T361")

Shard = Sequence[Unroll]
_ShardResult = tuple[float, NDArray[np.float32]]


class Gradient(Protocol):
    """Differentiates the loss at some parameters."""

    def __call__(self, shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of a shard, a scalar, and its gradient, float32 ``[size]``."""


MakeGradient = Callable[[Parameters], Gradient]
"""Makes it for parameters, whose values it reads at every call; can be sent to a process."""


class Summed(NamedTuple):
    """What a batch teaches.

    Attributes:
        losses: Of each shard.
        gradient: Of their sum: float32 ``[size]``, in the memory order of the parameters.
    """

    losses: list[float]
    gradient: torch.Tensor


class Learners(Protocol):
    """Who computes the gradients of a run. How many they are changes no bit."""

    def learn(self, batch: Sequence[Unroll]) -> Summed:
        """Return losses and the gradient at the parameters as they are now.

        Raises:
            CapsuleError: CAP-T361 or CAP-T332, a process was lost.
        """

    def close(self) -> None:
        """End every thread and process."""


class Threads:
    """Learners in this process."""

    def __init__(self, gradient: Gradient, shards: Sequence[int], threads: int) -> None:
        """Start.

        Args:
            gradient: At the parameters.
            shards: Unrolls of each shard.
            threads: How many to use.
        """
        self._gradient = gradient
        self._slices = _slices(shards)
        self._pool = ThreadPoolExecutor(threads, "learner")

    def learn(self, batch: Sequence[Unroll]) -> Summed:
        """See :class:`Learners`."""
        shards = [batch[each] for each in self._slices]
        losses, gradients = zip(*self._pool.map(self._gradient, shards), strict=True)
        return Summed([float(loss) for loss in losses], _added(gradients))

    def close(self) -> None:
        """See :class:`Learners`."""
        self._pool.shutdown()


class Ranks:
    """Learners in this process, which is rank 0, and in others."""

    def __init__(
        self,
        parameters: Parameters,
        make: MakeGradient,
        shards: Sequence[int],
        *,
        ranks: int,
        shapes: Mapping[str, Shape],
        determinism: DeterminismSpec,
        numerics: Numerics,
    ) -> None:
        """Start the processes.

        Args:
            parameters: Theta. Where it is on a GPU, ranks are dealt out to those that there are.
            make: Makes the gradient, here and there.
            shards: Unrolls of each shard.
            ranks: How many, this one included; at most one for each shard.
            shapes: Of the parameters.
            determinism: The spec's ``determinism`` section.
            numerics: The CPU numerics profile of the run; ``native`` if it trains on a GPU.
        """
        self._parameters, self._gradient = parameters, make(parameters)
        self._slices = _slices(shards)
        count = min(ranks, len(shards))
        self._shares = [range(rank, len(shards), count) for rank in range(count)]
        device = parameters.flat.device.type
        self._others = [
            WorkerProcess(
                rank,
                partial(_Rank, make, shapes, _device(device, rank)),
                self._shares[rank],
                determinism,
                numerics,
                role=LEARNER,
            )
            for rank in range(1, count)
        ]
        # Also called at the interpreter's end, before multiprocessing waits for its processes.
        self._stop = Finalize(self, stop, (self._others,), exitpriority=0)

    def learn(self, batch: Sequence[Unroll]) -> Summed:
        """See :class:`Learners`."""
        shards = [batch[each] for each in self._slices]
        theta = self._parameters.flat.detach().cpu().numpy()
        mine, *theirs = self._shares
        for other, share in zip(self._others, theirs, strict=True):
            other.ask(_Rank.learn, theta, [shards[number] for number in share])
        results = {number: self._gradient(shards[number]) for number in mine}
        device = self._parameters.flat.device
        for other, share in zip(self._others, theirs, strict=True):
            for number, (loss, gradient) in zip(share, other.answer(), strict=True):
                results[number] = torch.tensor(loss), torch.from_numpy(gradient).to(device)
        ordered = [results[number] for number in range(len(shards))]
        losses, gradients = zip(*ordered, strict=True)
        return Summed([float(loss) for loss in losses], _added(gradients))

    def close(self) -> None:
        """See :class:`Learners`."""
        self._stop()


class _Rank:
    """One of the other processes."""

    def __init__(self, make: MakeGradient, shapes: Mapping[str, Shape], device: str) -> None:
        self._parameters = Parameters(shapes, torch.device(device))
        self._gradient = make(self._parameters)

    def learn(self, theta: NDArray[np.float32], shards: Sequence[Shard]) -> list[_ShardResult]:
        """Return loss and gradient of each shard at theta, in the order of the parameters."""
        self._parameters.flat.copy_(torch.from_numpy(theta))
        results = [self._gradient(shard) for shard in shards]
        return [(float(loss), gradient.cpu().numpy()) for loss, gradient in results]


def _added(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add one after the other."""
    total = gradients[0]
    for gradient in gradients[1:]:
        total = total + gradient
    return total


def _slices(shards: Sequence[int]) -> list[slice]:
    """Return where in a batch each shard is."""
    cuts = np.cumsum([0, *shards])
    return [slice(first, end) for first, end in pairwise(cuts)]


def _device(kind: str, rank: int) -> str:
    return f"cuda:{rank % torch.cuda.device_count()}" if kind == "cuda" else kind
