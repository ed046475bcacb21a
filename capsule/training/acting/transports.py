"""Transports: running actors in this process, or in other processes of this machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.util import Finalize
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from capsule.experiment.spec import Numerics
from capsule.training.acting.actor_worker import (
    ActorRequest,
    ActorResult,
    ActorWorker,
    Snapshot,
    WorkerSettings,
)
from capsule.training.acting.inference import Service
from capsule.training.acting.worker_process import STOP_SECONDS, WorkerProcess, stop

Versions = Mapping[int, NDArray[np.float32]]
"""Policy versions by number, each in the order of :attr:`Parameters.flat`."""


class Transport(Protocol):
    """A transport runs actors. The order and place in which it does so do not affect results.

    Attributes:
        replicas: Number of processes that choose actions; 0 if each worker chooses its own.
    """

    replicas: int

    def publish(self, versions: Versions) -> None:
        """Set the policy versions that requests may name from now on."""

    def begin(self, requests: Sequence[ActorRequest]) -> None:
        """Let actors begin to act. None of them may have an outstanding request."""

    def finished(self) -> list[ActorResult[Any]]:
        """Wait until a request is finished, and return the answers of all finished ones.

        Raises:
            CapsuleError: An error of a worker; CAP-T331 or CAP-T332, a worker was lost. All
                processes of this machine have ended then.
        """

    def restore(self, snapshots: Mapping[int, Snapshot]) -> None:
        """Restore actors from snapshots. None of them may have an outstanding request.

        Raises:
            CapsuleError: As :meth:`ActorWorker.restore`, and as :meth:`finished`.
        """

    def close(self) -> None:
        """End every process."""


class CloseableService(Service, Protocol):
    """A worker's connection to the processes that choose the actions of its actors."""

    def close(self) -> None:
        """Close this process's end of the connection, once the worker has its own."""


class InferenceProcesses(Protocol):
    """Processes that choose actions for all workers.

    Attributes:
        count: Number of processes.
    """

    count: int

    @property
    def clients(self) -> Sequence[CloseableService]:
        """The connections, one for each worker."""

    def begin(self) -> None:
        """Wait until all have tested themselves, and let them answer requests.

        Raises:
            CapsuleError: CAP-T321, rows of a batch depend on one another; CAP-T362, one died.
        """

    def publish(self, versions: Versions) -> None:
        """Give the processes the policy versions that requests may name from now on."""

    def explain(self, error: BaseException) -> None:
        """Raise the cause of ``error``, if that is the missing answer of one of these processes.

        Raises:
            CapsuleError: CAP-T362, a process died; or the error that it raised.
        """

    def close(self) -> None:
        """End the processes. All workers must have ended before."""


class Serial:
    """All actors in this process; they act while the learner waits."""

    replicas = 0

    def __init__(self, settings: WorkerSettings, actors: int, *, lag: int) -> None:
        """Make the actors.

        Args:
            settings: The settings of the actors.
            actors: Number of actors.
            lag: Lag of the schedule.

        Raises:
            CapsuleError: As :meth:`WorkerSettings.make_worker`.
        """
        self._worker = settings.make_worker(range(actors))
        self._lag = lag
        self._known: set[int] = set()
        self._versions: Versions = {}
        self._requests: list[ActorRequest] = []

    def publish(self, versions: Versions) -> None:
        """See :class:`Transport`."""
        self._versions = versions

    def begin(self, requests: Sequence[ActorRequest]) -> None:
        """See :class:`Transport`."""
        self._requests += requests

    def finished(self) -> list[ActorResult[Any]]:
        """See :class:`Transport`."""
        requests, self._requests = self._requests, []
        new = new_versions(self._versions, self._known, requests)
        return self._worker.play(requests, new, self._lag)

    def restore(self, snapshots: Mapping[int, Snapshot]) -> None:
        """See :class:`Transport`."""
        self._worker.restore(snapshots)

    def close(self) -> None:
        """See :class:`Transport`."""


class Processes:
    """Actors distributed over processes, which act while the learner learns."""

    def __init__(
        self,
        settings: WorkerSettings,
        actors: int,
        *,
        processes: int,
        lag: int,
        numerics: Numerics,
        inference: InferenceProcesses | None = None,
    ) -> None:
        """Start the processes and make the actors.

        Args:
            settings: The settings of the actors.
            actors: Number of actors.
            processes: Number of processes; at most one for each actor is started.
            lag: Lag of the schedule.
            numerics: The CPU numerics profile of the run.
            inference: The processes that choose actions, with a client for each process of actors;
                None if each of these chooses the actions of its own actors.

        Raises:
            CapsuleError: As :meth:`InferenceProcesses.begin`.
        """
        self._done: SimpleQueue[list[ActorResult[Any]] | BaseException] = SimpleQueue()
        count = min(actors, processes)
        self._inference = inference
        self.replicas = 0 if inference is None else inference.count
        clients: Sequence[CloseableService | None] = [None] * count
        if inference is not None:
            clients = inference.clients
        self._feeders = []
        for number, client in enumerate(clients):
            # Actors with neighbouring numbers are requested together, so they are distributed over
            # the processes.
            played = range(number, actors, count)
            make = partial(settings.make_worker, played, client)
            process = WorkerProcess(number, make, played, settings.determinism, numerics)
            self._feeders.append(_Feeder(process, self._done, lag))
            if client is not None:
                client.close()  # the process has its own copy
        self._of = {actor: self._feeders[actor % count] for actor in range(actors)}
        # This is also called when the interpreter ends, before multiprocessing waits for its
        # processes.
        self._stop = Finalize(self, _end, (self._feeders, inference), exitpriority=0)
        if inference is not None:
            with self._closing_on_failure():
                inference.begin()

    def publish(self, versions: Versions) -> None:
        """See :class:`Transport`."""
        if self._inference is not None:
            self._inference.publish(versions)
            return
        for feeder in self._feeders:
            feeder.versions = versions

    def begin(self, requests: Sequence[ActorRequest]) -> None:
        """See :class:`Transport`."""
        for feeder in self._feeders:
            feeder.give([each for each in requests if self._of[each.actor] is feeder])

    def finished(self) -> list[ActorResult[Any]]:
        """See :class:`Transport`."""
        finished = self._next()
        # Other finished requests are returned as well; the schedule decides which are used first.
        while not self._done.empty():
            finished += self._next()
        return finished

    def restore(self, snapshots: Mapping[int, Snapshot]) -> None:
        """See :class:`Transport`."""
        with self._closing_on_failure():
            # No request is outstanding, so the threads of the feeders do not use the pipes. All
            # processes begin before one is waited for, because playing episodes again takes time.
            for feeder in self._feeders:
                own = {a: each for a, each in snapshots.items() if self._of[a] is feeder}
                feeder.process.ask(ActorWorker.restore, own)
            for feeder in self._feeders:
                feeder.process.answer()

    def close(self) -> None:
        """See :class:`Transport`."""
        self._stop()

    def _next(self) -> list[ActorResult[Any]]:
        finished = self._done.get()
        if not isinstance(finished, BaseException):
            return finished
        with self._closing_on_failure():
            # A worker also fails when the process that chooses its actions has died. The error
            # should name the cause.
            if self._inference is not None:
                self._inference.explain(finished)
            raise finished

    @contextmanager
    def _closing_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


def _end(feeders: Sequence[_Feeder], inference: InferenceProcesses | None) -> None:
    """End all processes, those of inference last, because workers need them to finish a request."""
    # All threads are asked to end before one is waited for. They end before their pipes are closed,
    # because of two threads that wait for the same process, only one receives its exit status.
    for feeder in feeders:
        feeder.end()
    for feeder in feeders:
        feeder.join()
    stop([feeder.process for feeder in feeders])
    if inference is not None:
        inference.close()


class _Feeder:
    """A thread that sends requests to one process while this process learns.

    Requests that are given while its process is busy are sent together when it has answered.
    """

    def __init__(
        self,
        process: WorkerProcess,
        done: SimpleQueue[list[ActorResult[Any]] | BaseException],
        lag: int,
    ) -> None:
        self.process = process
        self.versions: Versions = {}
        self._done, self._lag = done, lag
        self._known: set[int] = set()
        self._waiting: list[ActorRequest] = []
        self._ended = False
        self._changed = Condition()
        self._thread: Thread | None = None

    def give(self, requests: Iterable[ActorRequest]) -> None:
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

    def join(self) -> None:
        """Wait for the thread. Its pipe must stay open until it has ended."""
        if self._thread is None:
            return
        self._thread.join(STOP_SECONDS)  # time in which its process may finish a request
        if self._thread.is_alive():
            self.process.kill()
            self._thread.join()

    def _work(self) -> None:
        try:
            while requests := self._take():
                # ``versions`` is read once, because publish() may replace it at any moment.
                new = new_versions(self.versions, self._known, requests)
                self.process.ask(ActorWorker.play, requests, new, self._lag)
                self._done.put(self.process.answer())
        except BaseException as error:  # noqa: BLE001 - raised again where the learner waits
            self._done.put(error)

    def _take(self) -> list[ActorRequest]:
        """Wait for requests and return them; none if the thread must end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended)
            requests, self._waiting = self._waiting, []
            return [] if self._ended else requests


def new_versions(versions: Versions, known: set[int], requests: Iterable[ActorRequest]) -> Versions:
    """Return the policy versions that a worker lacks for requests, and add them to ``known``.

    Versions that are no longer published are removed from ``known``, as the worker drops them by
    the lag. Nothing is published if inference processes choose the actions.
    """
    known.intersection_update(versions)
    needed = sorted({request.version for request in requests} & versions.keys() - known)
    known.update(needed)
    return {version: versions[version] for version in needed}


def local_transport(
    settings: WorkerSettings, actors: int, *, processes: int, lag: int, numerics: Numerics
) -> Transport:
    """Return a transport that runs actors on this machine.

    Args:
        settings: The settings of the actors.
        actors: Number of actors.
        processes: Number of other processes; 0 to run the actors in this process.
        lag: Lag of the schedule.
        numerics: The CPU numerics profile of the run.

    Raises:
        CapsuleError: Without other processes, as :meth:`WorkerSettings.make_worker`. Errors of
            other processes are raised by the transport's methods.
    """
    if processes == 0:
        return Serial(settings, actors, lag=lag)
    return Processes(settings, actors, processes=processes, lag=lag, numerics=numerics)
