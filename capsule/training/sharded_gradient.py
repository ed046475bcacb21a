"""The gradient of a batch, computed in shards: the same bits for any number of threads or ranks.

*Shards*. The spec splits a batch into parts of fixed sizes (``trainer.micro_batches``):
:func:`split`. The gradient of a shard is one computation in one thread, and the gradients of all
shards are added one after the other in the order of the spec: :func:`added`. Which thread or
process computed a shard, and when, therefore shows in no result. (An all-reduce would not do: it
adds what each rank has, in an order that depends on the number of ranks.)

*Threads* (:class:`Threads`) each take the next shard as soon as they are free. *Ranks* are
processes; with ``n`` of them, rank ``s mod n`` computes shard ``s``. Rank 0 is the run: it alone
has the optimizer, the trace, and what is saved. Every other rank keeps nothing: for each update it
is sent theta and its shards, and answers with their losses and gradients. There is thus no state of
a rank to save, to restore, or to drift. :class:`Learners` has both.

*Failures*. An exception in a thread is raised where the shards were handed out, after all threads
have stopped. The exception of a rank arrives as a ``CapsuleError`` that names its process and its
shards, and so does its death.

*Pipes, not torch.distributed*. An exchange of 8 shards' gradients of 1.2 million parameters, on two
busy cores, median of six::

    ranks                                        2         4         8
    gloo, all_gather; every rank updates    303 ms    461 ms    428 ms
    gloo, theta broadcast; gather           129 ms    168 ms    174 ms
    pipes, theta sent; gradients back       137 ms    164 ms    458 ms

Most of the first row's time is due to every rank adding and updating by itself, for which each
receives every gradient. Compared with the second row, pipes lose only with more ranks than cores,
and they need no rendezvous, no port and no timeout: the end of a process is the end of its pipe.
They also serve ranks on GPUs, of which any number may share one, which NCCL does not allow.
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
        loss: Scalar.
        gradient: float32 ``[size]``, in the memory order of the parameters.
    """

    loss: torch.Tensor
    gradient: torch.Tensor


Differentiate = Callable[[Any], ShardGradient]
"""Differentiates the loss of a shard at the current values of some parameters."""

MakeDifferentiate = Callable[[Parameters], Differentiate]
"""Makes it for parameters, whose values it reads at every call; can be sent to a process."""


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Split a list, an array or a tensor into shards: ``sizes[s]`` rows each, in order."""
    cuts = np.cumsum([0, *sizes]).tolist()
    return [batch[first:end] for first, end in pairwise(cuts)]


def added(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors of one shape, added one after the other in order."""
    return reduce(add, tensors)


def flat_gradient(loss: torch.Tensor, leaves: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the gradient of a loss, float32 ``[size]``.

    Args:
        loss: Scalar.
        leaves: What it is differentiated by: all of :meth:`Parameters.leaves`.
    """
    return torch.cat([flatten(each) for each in torch.autograd.grad(loss, list(leaves.values()))])


class Threads:
    """The calling thread and others, which share work among them.

    The first time that there is work, the calling thread does all of it: MKL chooses the kernels of
    its vector functions at their first call, and that choice is not thread-safe in the version that
    torch brings (pytorch issue 188792).

    Attributes:
        count: Threads, the calling one included.
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
        """Return what a function gives for each item, in the order of the items.

        Args:
            function: No call may depend on another.
            items: Each is taken by the next free thread.
            beside: What the calling thread does before it takes its first item.

        Raises:
            Exception: That of a call, after all threads have stopped.
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
            # A call that can still be cancelled has not begun, so this thread takes its item.
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
    """The threads and processes that compute a run's gradients. Their number changes no bit."""

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
        """Start them.

        Args:
            parameters: Theta. If it is on a GPU, the ranks are dealt out to all GPUs.
            make: Makes the gradient, here and there.
            shards: Shards of a batch.
            threads: Threads of this process, which is rank 0.
            ranks: Processes, this one included; no more than there are shards are used.
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
        # Also called at the interpreter's end, before multiprocessing waits for its processes.
        self._stop = Finalize(self, stop, (self._others,), exitpriority=0)

    def differentiate(self, shards: Sequence[Any]) -> list[ShardGradient]:
        """Return losses and gradients of shards, in order, at the parameters as they are now.

        Raises:
            CapsuleError: CAP-T361 or CAP-T332, a process was lost.
        """
        mine, *theirs = self._shares
        flat = self._parameters.flat
        theta = flat.detach().cpu().numpy() if theirs else None
        for other, share in zip(self._others, theirs, strict=True):
            # All are asked before anything is computed here, so that they compute meanwhile.
            other.ask(_Rank.differentiate, theta, [shards[number] for number in share])
        own = self._threads.map(self._differentiate, [shards[number] for number in mine])
        # Keyed by number, because the gradients are added in the order of the shards and not of the
        # ranks that return them.
        found = dict(zip(mine, own, strict=True))
        for other, share in zip(self._others, theirs, strict=True):
            for number, (loss, gradient) in zip(share, other.answer(), strict=True):
                tensor = torch.from_numpy(gradient).to(flat.device)
                # The loss was a float32 before it travelled as a Python float, so it becomes the
                # same one again.
                found[number] = ShardGradient(torch.tensor(loss), tensor)
        return [found[number] for number in range(len(shards))]

    def close(self) -> None:
        """End every thread and process."""
        self._stop()
        self._threads.close()


class _Rank:
    """One of the other processes."""

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
        """Return loss and gradient of each shard at theta, float32 ``[size]``."""
        self._parameters.flat.copy_(torch.from_numpy(theta))
        results = [self._differentiate(shard) for shard in shards]
        check_memory(self._device)
        return [(float(loss), gradient.cpu().numpy()) for loss, gradient in results]


def _device(kind: str, rank: int) -> str:
    return f"cuda:{rank % torch.cuda.device_count()}" if kind == "cuda" else kind
