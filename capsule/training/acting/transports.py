"""Transports: how actors are asked to act, in this process or in others of this machine."""

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
    ActorWorker,
    Played,
    Snapshot,
    WorkerSettings,
)
from capsule.training.acting.inference import Service
from capsule.training.acting.worker_process import STOP_SECONDS, WorkerProcess, stop

Versions = Mapping[int, NDArray[np.float32]]


class Transport(Protocol):
    """A transport plays actors. The order and place in which it does so do not affect results.

    Attributes:
        replicas: Processes that answer actors; 0: they are answered where they play.
    """

    replicas: int

    def publish(self, versions: Versions) -> None:
        """Take the policy versions that requests may name from now on."""

    def begin(self, requests: Sequence[ActorRequest]) -> None:
        """Let actors begin to act; none of them has a request outstanding."""

    def finished(self) -> list[Played[Any]]:
        """Wait until requests are finished, and return what was played.

        Raises:
            CapsuleError: What a worker raised; CAP-T331 or CAP-T332, one was lost. No process of
                this machine is left then.
        """

    def restore(self, snapshots: Mapping[int, Snapshot]) -> None:
        """Restore actors from snapshots; none of them has a request outstanding.

        Raises:
            CapsuleError: As :meth:`ActorWorker.restore`, and as :meth:`finished`.
        """

    def close(self) -> None:
        """End every process."""


class CloseableService(Service, Protocol):
    """A worker's way to what chooses the actions of its actors."""

    def close(self) -> None:
        """Close this process's end, once another has it."""


class InferenceProcesses(Protocol):
    """Processes that choose actions for all workers.

    Attributes:
        count: How many there are.
    """

    count: int

    @property
    def clients(self) -> Sequence[CloseableService]:
        """One for each worker."""

    def begin(self) -> None:
        """Wait until all have tested themselves, and have them answer.

        Raises:
            CapsuleError: CAP-T321, rows of a batch depend on each other there; CAP-T362, one died.
        """

    def publish(self, versions: Versions) -> None:
        """Give them the policy versions that may be asked for from now on."""

    def explain(self, error: BaseException) -> None:
        """Say why one of them left a worker without an answer, if that is what ``error`` is.

        Raises:
            CapsuleError: CAP-T362, it died; or what it raised.
        """

    def close(self) -> None:
        """End them, after every worker."""


class Serial:
    """All actors in this process, playing while the learner waits for them."""

    replicas = 0

    def __init__(self, settings: WorkerSettings, actors: int, *, lag: int) -> None:
        """Make the actors."""
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

    def finished(self) -> list[Played[Any]]:
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
    """Actors dealt out to processes, who play while the learner learns."""

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
            settings: What makes them.
            actors: How many.
            processes: How many to play in, at most one for each actor.
            lag: Lag of the schedule.
            numerics: The CPU numerics profile of the run.
            inference: Chooses actions, with a client for each of the processes; None: each process
                chooses those of the actors that it plays.

        Raises:
            CapsuleError: As :meth:`InferenceProcesses.begin`.
        """
        self._done: SimpleQueue[list[Played[Any]] | BaseException] = SimpleQueue()
        count = min(actors, processes)
        self._inference = inference
        self.replicas = 0 if inference is None else inference.count
        clients: Sequence[CloseableService | None] = [None] * count
        if inference is not None:
            clients = inference.clients
        self._feeders = []
        for number, client in enumerate(clients):
            # Dealt out, because actors with neighbouring numbers are asked together.
            played = range(number, actors, count)
            make = partial(settings.make_worker, played, client)
            process = WorkerProcess(number, make, played, settings.determinism, numerics)
            self._feeders.append(_Feeder(process, self._done, lag))
            if client is not None:
                client.close()  # the process has it
        self._of = {actor: self._feeders[actor % count] for actor in range(actors)}
        # Also called at the interpreter's end, before multiprocessing waits for its processes.
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

    def finished(self) -> list[Played[Any]]:
        """See :class:`Transport`."""
        finished = self._next()
        # What else is ready is handed over as well; the schedule decides what of it is used first.
        while not self._done.empty():
            finished += self._next()
        return finished

    def restore(self, snapshots: Mapping[int, Snapshot]) -> None:
        """See :class:`Transport`."""
        with self._closing_on_failure():
            # No request is outstanding, so the threads of the feeders leave the pipes alone.
            # Episodes are played again, which takes time: all processes begin before one is waited
            # for.
            for feeder in self._feeders:
                own = {a: each for a, each in snapshots.items() if self._of[a] is feeder}
                feeder.process.ask(ActorWorker.restore, own)
            for feeder in self._feeders:
                feeder.process.answer()

    def close(self) -> None:
        """See :class:`Transport`."""
        self._stop()

    def _next(self) -> list[Played[Any]]:
        finished = self._done.get()
        if not isinstance(finished, BaseException):
            return finished
        with self._closing_on_failure():
            # A worker fails, too, when the process that chooses its actions has died. The cause is
            # what the error should name.
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
    """End processes; workers in the middle of their steps need inference to finish them."""
    # All threads are told before one is waited for, and have ended before their pipes are closed:
    # of two threads that wait for one process, only one learns how it ended.
    for feeder in feeders:
        feeder.end()
    for feeder in feeders:
        feeder.join()
    stop([feeder.process for feeder in feeders])
    if inference is not None:
        inference.close()


class _Feeder:
    """A thread that keeps one process busy while this one learns.

    What arrives while its process plays is asked for at once, and played together, when it is done.
    """

    def __init__(
        self,
        process: WorkerProcess,
        done: SimpleQueue[list[Played[Any]] | BaseException],
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
        """Wait for the thread: while it reads the pipe, the pipe must stay open."""
        if self._thread is None:
            return
        self._thread.join(STOP_SECONDS)  # that its process has to finish a request in
        if self._thread.is_alive():
            self.process.kill()
            self._thread.join()

    def _work(self) -> None:
        try:
            while requests := self._take():
                # Read once: publish() exchanges the mapping while this thread works.
                new = new_versions(self.versions, self._known, requests)
                self.process.ask(ActorWorker.play, requests, new, self._lag)
                self._done.put(self.process.answer())
        except BaseException as error:  # noqa: BLE001 - raised again where the learner waits
            self._done.put(error)

    def _take(self) -> list[ActorRequest]:
        """Wait for requests; none where it is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended)
            requests, self._waiting = self._waiting, []
            return [] if self._ended else requests


def new_versions(versions: Versions, known: set[int], requests: Iterable[ActorRequest]) -> Versions:
    """Return the policy versions that a worker needs for requests, and note them in ``known``.

    A version that is no longer published is not given again, and the worker drops it by the lag.
    Nothing is published to the workers where inference processes answer them.
    """
    known.intersection_update(versions)
    needed = sorted({request.version for request in requests} & versions.keys() - known)
    known.update(needed)
    return {version: versions[version] for version in needed}


def local_transport(
    settings: WorkerSettings, actors: int, *, processes: int, lag: int, numerics: Numerics
) -> Transport:
    """Start what plays actors on this machine.

    Args:
        settings: What makes them.
        actors: How many.
        processes: How many others to play in; 0: in this process.
        lag: Lag of the schedule.
        numerics: The CPU numerics profile of the run.
    """
    if processes == 0:
        return Serial(settings, actors, lag=lag)
    return Processes(settings, actors, processes=processes, lag=lag, numerics=numerics)
