"""Transports: how actors are asked for unrolls, in this process or in others of this machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from multiprocessing.util import Finalize
from queue import SimpleQueue
from threading import Condition, Thread
from typing import NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import Numerics
from capsule.training.acting.worker_process import STOP_SECONDS, WorkerProcess, stop
from capsule.training.impala.actors.actor_worker import UnrollWorker
from capsule.training.impala.actors.replicas import REPLICA, Client, Replicas
from capsule.training.impala.actors.unrolls import Played, Request, Snapshot, UnrollSettings

Versions = Mapping[int, NDArray[np.float32]]


class Transport(Protocol):
    """What plays actors. In which order and where it does so reaches nobody's result.

    Attributes:
        replicas: Processes that answer actors; 0: they are answered where they play.
    """

    replicas: int

    def publish(self, versions: Versions) -> None:
        """Take the policy versions that requests may name from now on."""

    def begin(self, requests: Sequence[Request]) -> None:
        """Let actors begin an unroll; none of them has one outstanding."""

    def finished(self) -> list[Played]:
        """Wait for unrolls, and return those that are finished.

        Raises:
            CapsuleError: What a host raised; CAP-T331 or CAP-T332, one was lost.
        """

    def restore(self, snapshots: Mapping[int, Snapshot]) -> None:
        """Bring actors back to snapshots, before any request.

        Raises:
            CapsuleError: As :meth:`UnrollWorker.restore`.
        """

    def close(self) -> None:
        """End every process."""


class Serial:
    """All actors in this process, playing while the learner waits for them."""

    replicas = 0

    def __init__(self, settings: UnrollSettings, actors: int, *, lag: int) -> None:
        """Make the actors.

        Args:
            settings: What makes them.
            actors: How many.
            lag: Of the schedule.
        """
        self._host = UnrollWorker(settings, range(actors))
        self._lag = lag
        self._known: set[int] = set()
        self._versions: Versions = {}
        self._requests: list[Request] = []

    def publish(self, versions: Versions) -> None:
        """See :class:`Transport`."""
        self._versions = versions

    def begin(self, requests: Sequence[Request]) -> None:
        """See :class:`Transport`."""
        self._requests += requests

    def finished(self) -> list[Played]:
        """See :class:`Transport`."""
        requests, self._requests = self._requests, []
        needed = {request.version for request in requests} - self._known
        self._known |= needed
        return self._host.unroll(requests, {v: self._versions[v] for v in needed}, self._lag)

    def restore(self, snapshots: Mapping[int, Snapshot]) -> None:
        """See :class:`Transport`."""
        self._host.restore(snapshots)

    def close(self) -> None:
        """See :class:`Transport`."""


class Processes:
    """Actors dealt out to processes, who play while the learner learns."""

    def __init__(
        self,
        settings: UnrollSettings,
        actors: int,
        *,
        processes: int,
        lag: int,
        numerics: Numerics,
        replicas: int = 0,
    ) -> None:
        """Start the processes and make the actors.

        Args:
            settings: What makes them.
            actors: How many.
            processes: How many to play in, at most one for each actor.
            lag: Of the schedule.
            numerics: The CPU numerics profile of the run; ``native`` if it trains on a GPU.
            replicas: How many other processes answer them, at most one for each actor; 0: each
                process answers the actors that it plays.

        Raises:
            CapsuleError: As :meth:`Replicas.begin`.
        """
        done: SimpleQueue[list[Played] | BaseException] = SimpleQueue()
        count = min(actors, processes)
        self._replicas = None
        clients: Sequence[Client | None] = [None] * count
        if replicas:
            self._replicas = Replicas(settings, actors, count, replicas, numerics)
            clients = self._replicas.clients
        self.replicas = 0 if self._replicas is None else self._replicas.count
        self._workers = []
        for number, client in enumerate(clients):
            # Dealt out, as neighbours are asked for together.
            played = range(number, actors, count)
            make = partial(UnrollWorker, settings, played, client)
            host = WorkerProcess(number, make, played, settings.determinism, numerics)
            self._workers.append(_Worker(host, done, lag))
            if client is not None:
                client.close()  # the host has it
        self._of = {actor: self._workers[actor % count] for actor in range(actors)}
        self._done = done
        # Also called at the interpreter's end, before multiprocessing waits for its processes.
        hosts = [worker.host for worker in self._workers]
        self._stop = Finalize(self, _end, (hosts, self._replicas), exitpriority=0)
        if self._replicas is not None:
            self._begin_replicas(self._replicas)

    def publish(self, versions: Versions) -> None:
        """See :class:`Transport`."""
        if self._replicas is not None:
            self._replicas.publish(versions)
            return
        for worker in self._workers:
            worker.versions = versions

    def begin(self, requests: Sequence[Request]) -> None:
        """See :class:`Transport`."""
        for worker in self._workers:
            worker.give([each for each in requests if self._of[each.actor] is worker])

    def finished(self) -> list[Played]:
        """See :class:`Transport`."""
        finished = self._next()
        while not self._done.empty():
            finished += self._next()
        return finished

    def restore(self, snapshots: Mapping[int, Snapshot]) -> None:
        """See :class:`Transport`."""
        for worker in self._workers:
            theirs = {a: each for a, each in snapshots.items() if self._of[a] is worker}
            worker.host.ask(UnrollWorker.restore, theirs)
        for worker in self._workers:
            worker.host.answer()

    def close(self) -> None:
        """See :class:`Transport`."""
        for worker in self._workers:
            worker.end()
        self._stop()

    def _next(self) -> list[Played]:
        finished = self._done.get()
        if not isinstance(finished, BaseException):
            return finished
        try:
            self._explain(finished)
        finally:
            self.close()

    def _begin_replicas(self, replicas: Replicas) -> None:
        try:
            replicas.begin()
        except BaseException:
            self.close()
            raise

    def _explain(self, error: BaseException) -> NoReturn:
        """Raise what a host did, or why a replica left it without an answer."""
        unanswered = isinstance(error, CapsuleError) and error.code == REPLICA.death
        if self._replicas is not None and unanswered:
            self._replicas.explain()
        raise error


def _end(hosts: Sequence[WorkerProcess], replicas: Replicas | None) -> None:
    """End processes; hosts in the middle of an unroll need the replicas to finish it."""
    stop(hosts)
    if replicas is not None:
        replicas.close()


class _Worker:
    """A thread that keeps one process busy while this one learns.

    What arrives while its process plays is asked for at once, and played together, when it is done.
    """

    def __init__(
        self, host: WorkerProcess, done: SimpleQueue[list[Played] | BaseException], lag: int
    ) -> None:
        self.host = host
        self.versions: Versions = {}
        self._done, self._lag = done, lag
        self._known: set[int] = set()
        self._waiting: list[Request] = []
        self._ended = False
        self._changed = Condition()
        self._thread: Thread | None = None

    def give(self, requests: Iterable[Request]) -> None:
        with self._changed:
            self._waiting += requests
            self._changed.notify()
        if self._thread is None:
            self._thread = Thread(target=self._work, name="actors", daemon=True)
            self._thread.start()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)  # that its process has to end an unroll in

    def _work(self) -> None:
        try:
            while requests := self._take():
                versions = self.versions
                self._known &= versions.keys()
                needed = ({request.version for request in requests} & versions.keys()) - self._known
                self._known |= needed
                new = {version: versions[version] for version in needed}
                self.host.ask(UnrollWorker.unroll, requests, new, self._lag)
                self._done.put(self.host.answer())
        except BaseException as error:  # noqa: BLE001 - raised again where the learner waits
            self._done.put(error)

    def _take(self) -> list[Request]:
        """Wait for requests; none where it is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended)
            requests, self._waiting = self._waiting, []
            return [] if self._ended else requests
