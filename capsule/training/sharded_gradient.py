"""The gradient of a batch, computed in shards: the same bits for any number of threads or ranks.

*Shards*. The spec splits a batch into parts of fixed sizes (``trainer.micro_batches``):
:func:`split`. The gradient of a shard is one computation in one thread, and the gradients of all
shards are added one after the other in the order of the spec: :func:`added`. The thread or process
that computes a shard therefore does not affect the result. (An all-reduce would: it adds the parts
of the ranks in an order that depends on their number.)

*Threads* (:class:`Threads`) each take the next shard as soon as they are free. *Ranks* are
processes; with ``n`` of them, rank ``s mod n`` computes shard ``s``. Rank 0 is the run's own
process, which alone has the optimizer, the trace, and the saved state. The other ranks keep no
state: for each update they receive theta and their shards, and return losses and gradients.
:class:`Learners` has both threads and ranks.

*Failures*. An exception in a thread is raised by the call that distributed the shards, after all
threads have stopped. An exception in another rank, and its death, are raised as a ``CapsuleError``
that names its process and its shards.

*Pipes, not torch.distributed*. Time for an exchange of the gradients of 8 shards with 1.2 million
parameters, on two busy cores, median of six::

    ranks                                        2         4         8
    gloo, all_gather; every rank updates    303 ms    461 ms    428 ms
    gloo, theta broadcast; gather           129 ms    168 ms    174 ms
    pipes, theta sent; gradients back       137 ms    164 ms    458 ms

The first row takes longest because every rank receives every gradient, adds them and makes the
update itself. Compared with the second row, pipes are slower only with more ranks than cores. They
need no rendezvous, port or timeout, because a pipe ends with its process. Pipes also allow several
ranks to share a GPU, which NCCL does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial, reduce
from itertools import pairwise
from multiprocessing.util import Finalize
from operator import add
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from capsule.experiment.spec import DeterminismSpec, Numerics
from capsule.training.acting.worker_process import Role, WorkerProcess, stop
from capsule.training.determinism.gpu_memory import check_memory
from capsule.training.determinism.gpu_test import gpu_test
from capsule.training.networks.feedforward import Parameters, Shape, flatten

LEARNER = Role("learners", "gradient shard", "CAP-T361")

Shard = TypeVar("Shard")
Result = TypeVar("Result")


class ShardGradient(NamedTuple):
    """The contribution of one shard to an update.

    Attributes:
        loss: float32 scalar.
        gradient: float32 ``[size]``, in the memory order of the parameters.
    """

    loss: torch.Tensor
    gradient: torch.Tensor


Differentiate = Callable[[Any], ShardGradient]
"""A function of a shard that differentiates its loss at the current values of some parameters."""

MakeDifferentiate = Callable[[Parameters], Differentiate]
"""A function of parameters that returns such a function of them; it can be pickled."""


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Split a list, an array or a tensor into shards of ``sizes[s]`` rows each, in order."""
    cuts = np.cumsum([0, *sizes]).tolist()
    return [batch[first:end] for first, end in pairwise(cuts)]


def added(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors of one shape, added one after the other in order."""
    return reduce(add, tensors)


def flat_gradient(loss: torch.Tensor, leaves: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the gradient of a loss, float32 ``[size]``, in the memory order of the parameters.

    Args:
        loss: float32 scalar.
        leaves: All of :meth:`Parameters.leaves`.
    """
    return torch.cat([flatten(each) for each in torch.autograd.grad(loss, list(leaves.values()))])


class Threads:
    """The calling thread and others, which share work.

    The calling thread does all work of the first call, because MKL chooses the kernels of its
    vector functions when they are first called, which is not thread-safe in the version that torch
    contains (pytorch issue 188792).

    Attributes:
        count: Number of threads, the calling one included.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count - 1, "learner") if count > 1 else None
        self._warm = False

    def map(
        self,
        function: Callable[[Shard], Result],
        items: Sequence[Shard],
        *,
        beside: Callable[[], None] | None = None,
    ) -> list[Result]:
        """Return the results of a function for each item, in the order of the items.

        Args:
            function: A function whose calls do not depend on one another.
            items: The items; the next free thread takes the next one.
            beside: Called in the calling thread before it takes its first item.

        Raises:
            Exception: An exception of a call, after all threads have stopped.
        """
        pool = self._pool if self._warm else None
        self._warm = True
        if pool is None:
            if beside is not None:
                beside()
            return [function(item) for item in items]
        calls = [pool.submit(function, item) for item in items]
        try:
            if beside is not None:
                beside()
            # A call that can be cancelled has not begun, so this thread takes its item.
            own = {n: function(items[n]) for n, call in enumerate(calls) if call.cancel()}
        finally:
            for call in calls:
                call.cancel()
            wait(calls)
        return [own[n] if n in own else call.result() for n, call in enumerate(calls)]

    def close(self) -> None:
        """End the other threads."""
        if self._pool is not None:
            self._pool.shutdown()


class Learners:
    """The threads and processes that compute a run's gradients; their number changes no bit."""

    def __init__(
        self,
        parameters: Parameters,
        make: MakeDifferentiate,
        shards: int,
        *,
        threads: int,
        ranks: int,
        determinism: DeterminismSpec,
        numerics: Numerics,
    ) -> None:
        """Start the threads and processes.

        Args:
            parameters: Theta. If it is on a GPU, the ranks are distributed over all GPUs.
            make: Makes the function that differentiates, in this process and in the others.
            shards: Number of shards of a batch.
            threads: Number of threads of this process, which is rank 0.
            ranks: Number of processes, this one included; at most one for each shard is used.
            determinism: The spec's ``determinism`` section.
            numerics: The CPU numerics profile of the run.
        """
        self._parameters, self._differentiate = parameters, make(parameters)
        self._threads = Threads(threads)
        count = min(ranks, shards)
        self._shares = [range(rank, shards, count) for rank in range(count)]
        device = parameters.flat.device.type
        self._others = [
            WorkerProcess(
                rank,
                partial(_Rank, make, parameters.shapes, _device(device, rank), determinism),
                self._shares[rank],
                determinism,
                numerics,
                role=LEARNER,
            )
            for rank in range(1, count)
        ]
        # This is also called when the interpreter ends, before multiprocessing waits for its
        # processes.
        self._stop = Finalize(self, stop, (self._others,), exitpriority=0)

    def differentiate(self, shards: Sequence[Any]) -> list[ShardGradient]:
        """Return losses and gradients of shards, in order, at the current parameters.

        Raises:
            CapsuleError: CAP-T361, a process died; CAP-T332, it failed; or the error that it
                raised.
        """
        mine, *theirs = self._shares
        flat = self._parameters.flat
        theta = flat.detach().cpu().numpy() if theirs else None
        for other, share in zip(self._others, theirs, strict=True):
            # All ranks are called before this process computes its own shards, so that they compute
            # at the same time.
            other.ask(_Rank.differentiate, theta, [shards[number] for number in share])
        own = self._threads.map(self._differentiate, [shards[number] for number in mine])
        # Keyed by the number of the shard, because gradients are added in the order of the shards
        # and not of the ranks.
        found = dict(zip(mine, own, strict=True))
        for other, share in zip(self._others, theirs, strict=True):
            for number, (loss, gradient) in zip(share, other.answer(), strict=True):
                tensor = torch.from_numpy(gradient).to(flat.device)
                # The loss was a float32 before it was sent as a Python float, so it becomes the
                # same float32 again.
                found[number] = ShardGradient(torch.tensor(loss), tensor)
        return [found[number] for number in range(len(shards))]

    def close(self) -> None:
        """End every thread and process."""
        self._stop()
        self._threads.close()


class _Rank:
    """The object in the process of another rank."""

    def __init__(
        self,
        make: MakeDifferentiate,
        shapes: Mapping[str, Shape],
        device: str,
        determinism: DeterminismSpec,
    ) -> None:
        self._device = torch.device(device)
        if self._device.type == "cuda":
            strict = determinism.algorithms != "off"
            gpu_test(self._device, repeats=strict, tf32=determinism.tf32)
        self._parameters = Parameters(shapes, self._device)
        self._differentiate = make(self._parameters)

    def differentiate(
        self, theta: NDArray[np.float32], shards: Sequence[Any]
    ) -> list[tuple[float, NDArray[np.float32]]]:
        """Return the loss and the gradient, float32 ``[size]``, of each shard at theta."""
        self._parameters.flat.copy_(torch.from_numpy(theta))
        results = [self._differentiate(shard) for shard in shards]
        check_memory(self._device)
        return [(float(loss), gradient.cpu().numpy()) for loss, gradient in results]


def _device(kind: str, rank: int) -> str:
    return f"cuda:{rank % torch.cuda.device_count()}" if kind == "cuda" else kind
