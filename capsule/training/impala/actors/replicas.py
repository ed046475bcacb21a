"""Replicas: processes that compute the actions of actors in other processes.

This is the dynamic batching of Espeholt et al. 2018, arXiv:1802.01561, section 5.1.

Workers request their actors' next actions and wait. A replica answers all requests that have
arrived in one *dynamic batch*; those that arrive while it is computed make up the next. A replica
never waits for a batch to fill, so there is no time-out to choose.

Which requests share a batch depends on timing, and does not affect a result: an answer depends
neither on its batch, nor on the replica, nor on the order of arrival
(:mod:`capsule.training.acting.inference`). When it starts, each replica tests that the rows of its
batches are independent (CAP-T321). A request names the policy version that answers it, which the
schedule determines. The replicas are therefore not recorded, and their number is not part of a
run's identity. A worker that answers its own actors gets the same bits, as in a run in one process
and on the nodes of a cluster.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import Numerics
from capsule.training.acting.batched_actors import Inputs
from capsule.training.acting.batching import Tensors, require_independent_rows
from capsule.training.acting.inference import Answers, InferenceReplica, RequestBatch, replica_of
from capsule.training.acting.worker_process import Role, WorkerProcess, stop
from capsule.training.impala.actors.actor_worker import UnrollSettings, act
from capsule.training.impala.actors.probes import probe
from capsule.training.networks.feedforward import Parameters

REPLICA = Role("inference", "inference for actor", "CAP-T362")


class _News(NamedTuple):
    """The new policy versions, and the numbers of all versions that requests may name."""

    parameters: dict[int, NDArray[np.float32]]
    kept: frozenset[int]


class Client:
    """A worker's connections to the replicas.

    It is a :class:`~capsule.training.acting.inference.Service`.

    Attributes:
        replicas: Number of replicas.
    """

    def __init__(self, pipes: Sequence[Connection[Any, Any]], arrivals: Any | None) -> None:
        """Take the worker's ends of pipes.

        Args:
            pipes: One to each replica, by rank.
            arrivals: A :class:`multiprocessing.Value` that counts the requests of all workers, to
                distribute them in the order of arrival; None if they are routed by actor.
        """
        self.replicas = len(pipes)
        self._pipes, self._arrivals = pipes, arrivals

    def answer(self, batch: RequestBatch) -> Answers:
        """Send one request each of some actors, and wait for the answers; see :class:`Service`."""
        ranks = self._route(batch.actors)
        shares = {rank: np.flatnonzero(ranks == rank) for rank in np.unique(ranks).tolist()}
        try:
            answers = self._exchange({rank: _part(batch, rows) for rank, rows in shares.items()})
        except (EOFError, OSError):
            raise CapsuleError(
                REPLICA.death,
                "an inference replica does not answer",
                fix="See the end of output.log. Then run again: the run resumes from its last "
                "saved state.",
            ) from None
        columns = zip(*(answers[rank] for rank in shares), strict=True)
        # The shares one after the other are a permutation of the requests; this is its inverse.
        order = np.argsort(np.concatenate(list(shares.values())))
        return Answers(*map(np.concatenate, columns)).rows(order)

    def close(self) -> None:
        """Close this process's ends of the pipes."""
        for pipe in self._pipes:
            pipe.close()

    def _route(self, actors: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rank of the replica that is to answer each request."""
        if self._arrivals is None:
            return np.array([replica_of(actor, self.replicas) for actor in actors.tolist()])
        # Read and advanced under one lock, or two workers would use the same numbers.
        with self._arrivals.get_lock():
            first: int = self._arrivals.value
            self._arrivals.value += len(actors)
        return (first + np.arange(len(actors))) % self.replicas

    def _exchange(self, shares: Mapping[int, RequestBatch]) -> dict[int, Answers]:
        """Send requests to replicas and return the answers of each.

        Workers send in the order of ranks, and receive answers in the order of arrival. Otherwise
        two workers and two replicas could wait for each other, all with a full pipe.
        """
        for rank, share in sorted(shares.items()):
            self._pipes[rank].send(share)
        waiting: dict[Any, int] = {self._pipes[rank]: rank for rank in shares}
        answers: dict[int, Answers] = {}
        while waiting:
            ready: list[Any] = wait(list(waiting))
            answers |= {waiting.pop(pipe): pipe.recv() for pipe in ready}
        return answers


class Server:
    """The object in the process of a replica."""

    def __init__(
        self,
        settings: UnrollSettings,
        rank: int,
        news: Connection[Any, Any],
        workers: Sequence[Connection[Any, Any]],
    ) -> None:
        """Begin without a policy.

        Args:
            settings: The settings of the actors.
            rank: The replica's number.
            news: Receives policy versions. When it is closed, :meth:`serve` returns.
            workers: A pipe to each worker.
        """
        self._settings, self._news, self._workers = settings, news, list(workers)
        self._versions: dict[int, Parameters] = {}
        self._replica = InferenceReplica(
            rank, self._policy, settings.batching, settings.determinism, settings.seeds
        )

    def test(self) -> int:
        """See :func:`require_batch_invariance`."""
        return require_batch_invariance(self._settings)

    def serve(self) -> None:
        """Answer requests until the run closes the pipe of policy versions."""
        while True:
            ready = wait([self._news, *self._workers])
            # A version is sent before a request names it, but wait() may report the request first.
            if not self._take_news():
                return
            self._answer(
                [each for pipe in ready if pipe in self._workers for each in self._receive(pipe)]
            )

    def _take_news(self) -> bool:
        """Receive the policy versions that have been sent; return whether more may follow."""
        while self._news.poll():
            try:
                news: _News = self._news.recv()
            except (EOFError, OSError):
                return False
            for version, flat in news.parameters.items():
                shapes = self._settings.network.shapes
                self._versions[version] = Parameters(shapes, torch.device("cpu"))
                self._versions[version].flat.copy_(torch.from_numpy(flat))
            self._versions = {v: each for v, each in self._versions.items() if v in news.kept}
        return True

    def _receive(self, worker: Any) -> Iterator[tuple[Connection[Any, Any], RequestBatch]]:
        """Yield the requests of a worker, unless it has ended, which the run notices by itself."""
        try:
            yield worker, worker.recv()
        except (EOFError, OSError):
            self._workers.remove(worker)

    def _answer(self, received: Sequence[tuple[Connection[Any, Any], RequestBatch]]) -> None:
        if not received:
            return
        workers, batches = zip(*received, strict=True)
        for worker, answers in zip(workers, self._replica.answer_all(batches), strict=True):
            with contextlib.suppress(OSError):  # the worker has ended
                worker.send(answers)

    def _policy(self, version: int, inputs: Tensors) -> Tensors:
        return act(self._settings.network, self._versions[version], Inputs(*inputs))


class Replicas:
    """The replicas of a run, seen from the run's own process.

    Attributes:
        count: Number of replicas.
        clients: One for each worker, to be sent to it and closed here.
    """

    def __init__(
        self, settings: UnrollSettings, actors: int, workers: int, replicas: int, numerics: Numerics
    ) -> None:
        """Start them; :meth:`begin` must follow.

        Args:
            settings: The settings of the actors.
            actors: Number of actors.
            workers: Number of processes that run them.
            replicas: Number of replicas; at most one for each actor is started.
            numerics: The CPU numerics profile of the run.
        """
        self.count = min(actors, replicas)
        self._processes: list[WorkerProcess] = []
        self._news: list[Connection[Any, Any]] = []
        self._known: set[int] = set()
        by_actor = settings.determinism.deterministic_routing
        ends = []
        for rank in range(self.count):
            served = range(rank, actors, self.count) if by_actor else range(actors)
            ends.append(self._start(settings, rank, served, workers, numerics))
        arrivals = None if by_actor else get_context("spawn").Value("Q")
        self.clients = [Client(pipes, arrivals) for pipes in zip(*ends, strict=True)]

    def begin(self) -> None:
        """See :class:`InferenceProcesses`."""
        for process in self._processes:
            process.answer()
            # serve() answers only when a replica fails or ends; explain() receives this answer.
            process.ask(Server.serve)

    def publish(self, versions: Mapping[int, NDArray[np.float32]]) -> None:
        """See :class:`InferenceProcesses`."""
        # Versions that are kept were sent before, and need not be sent again.
        new = {version: flat for version, flat in versions.items() if version not in self._known}
        self._known = set(versions)
        for news in self._news:
            with contextlib.suppress(OSError):  # it has died, and its workers will report that
                news.send(_News(new, frozenset(versions)))

    def explain(self, error: BaseException) -> None:
        """See :class:`InferenceProcesses`."""
        if isinstance(error, CapsuleError) and error.code == REPLICA.death:
            # Without a time limit, because a worker has seen a replica's pipe close: one of the
            # replicas has died or is about to report why it failed.
            ready: list[Any] = wait(list[Any](self._processes))
            for process in ready:
                process.answer()

    def close(self) -> None:
        """See :class:`InferenceProcesses`."""
        # serve() waits for these pipes and not for those that stop() closes. If they stayed open,
        # the replicas would be killed after STOP_SECONDS.
        for news in self._news:
            news.close()
        stop(self._processes)

    def _start(
        self,
        settings: UnrollSettings,
        rank: int,
        served: Sequence[int],
        workers: int,
        numerics: Numerics,
    ) -> list[Connection[Any, Any]]:
        """Start a replica and return the workers' ends of its pipes."""
        context = get_context("spawn")
        pairs = [context.Pipe() for _ in range(workers)]
        theirs, news = context.Pipe(duplex=False)
        ends = [server for _, server in pairs]
        make = partial(Server, settings, rank, theirs, ends)
        process = WorkerProcess(rank, make, served, settings.determinism, numerics, role=REPLICA)
        process.ask(Server.test)
        for end in (theirs, *ends):  # so that the end of the process is the end of its pipes
            end.close()
        self._processes.append(process)
        self._news.append(news)
        return [worker for worker, _ in pairs]


def require_batch_invariance(settings: UnrollSettings) -> int:
    """Check that rows of the policy's batches are independent on this machine, if the spec says so.

    Weights and inputs are fixed. New specs with these batches have one maths thread in every
    process of actors, or the declared relaxation ``determinism.threads: null``.

    Returns:
        The number of rows compared; 0 if ``determinism.batch_invariance`` is off.

    Raises:
        CapsuleError: CAP-T321, they are not independent; CAP-T212 to CAP-T216, the environment
            is not available.
    """
    if not settings.determinism.batch_invariance:
        return 0
    parameters, inputs, _ = probe(settings, (settings.rows,))

    def policy(inputs: Tensors) -> Tensors:
        return act(settings.network, parameters, Inputs(*inputs))

    return require_independent_rows(policy, inputs, settings.batching)


def _part(batch: RequestBatch, rows: NDArray[np.int64]) -> RequestBatch:
    """Return some of the requests."""
    inputs = tuple(each[rows] for each in batch.inputs)
    return RequestBatch(batch.version, batch.actors[rows], batch.numbers[rows], inputs)
