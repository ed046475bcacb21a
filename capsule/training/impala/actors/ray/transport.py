"""Actors on the nodes of a Ray cluster.

An actor worker is one stateful Ray actor: a process that runs many logical actors. These are
distributed as over the processes of one machine. Each policy version is put into Ray's object store
once. Answers are taken in any order, because the executor decides what is trained on next.

*Nodes.* Environment variables are set before a worker's interpreter starts, and are read back in
it, as are the flags of torch and of the maths libraries. Then the worker digests a pass of the
run's own network (:mod:`~.preflight`). If this digest differs from that of this process, the run
ends with an error that names the node (CAP-T351).

*Losses.* Every unroll comes with a snapshot of its actor. When a worker is lost, another one begins
with the last snapshots, and the outstanding unrolls are requested again. If the lost worker still
runs, its answers are the same, and are ignored. A loss therefore costs time and does not change a
bit. The state of the run is in this process: after the loss of the head, the run can be resumed on
any transport.

Entropy that workers request from the operating system is not part of a run's random profile. Actors
draw from streams alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import DeterminismSpec, Numerics, Spec
from capsule.experiment.variables import environment_variables
from capsule.native import native_part
from capsule.training.acting.actor_worker import ActorRequest, ActorResult, Snapshot
from capsule.training.acting.transports import Versions, new_versions
from capsule.training.acting.worker_process import settle, which
from capsule.training.determinism import cpu, self_test
from capsule.training.determinism.child_processes import check_start, environment_of
from capsule.training.impala.actors.actor_worker import UnrollSettings
from capsule.training.impala.actors.ray.connection import Cluster, brief
from capsule.training.impala.actors.ray.preflight import pass_digest
from capsule.training.impala.actors.unrolls import Unroll

START_SECONDS = 180.0  # time in which a worker must begin; the first one of a node takes longest
LOSSES = 3  # most losses of one worker in a row, without an unroll in between, that are tolerated


class WorkerPins(NamedTuple):
    """The settings with which all worker processes of a run compute the same bits.

    Attributes:
        variables: Environment variables with which the interpreter starts.
        determinism: The spec's ``determinism`` section. A worker has one maths thread, whatever the
            section says.
        numerics: The CPU numerics profile of the run.
    """

    variables: dict[str, str]
    determinism: DeterminismSpec
    numerics: Numerics


def pins_of(spec: Spec, numerics: Numerics) -> WorkerPins:
    """Return the pins of a run's workers.

    Raises:
        CapsuleError: CAP-N001, the maths shim is not installed.
    """
    preloads = {}
    if cpu.is_portable(numerics):
        preloads = {"LD_PRELOAD": str(native_part("libcapsule-math.so"))}
    return WorkerPins(environment_variables(spec) | preloads, spec.determinism, numerics)


class RayTransport:
    """Actors distributed over workers in a cluster, which act while the learner learns."""

    replicas = 0

    def __init__(
        self,
        settings: UnrollSettings,
        actors: int,
        *,
        cluster: str,
        workers: int | None,
        lag: int,
        pins: WorkerPins,
    ) -> None:
        """Connect, start the workers, and make the actors.

        Args:
            settings: The settings of the actors.
            actors: Number of actors.
            cluster: Address of the cluster's head: ``HOST:PORT`` if this machine is one of its
                nodes, or ``ray://HOST:PORT`` from anywhere.
            workers: Number of workers, at most one for each actor; None for one on each free
                processor.
            lag: Lag of the schedule.
            pins: Settings of the workers' processes.

        Raises:
            CapsuleError: CAP-T351, a node computes other bits; CAP-T352, there is no such cluster;
                CAP-T354, a worker does not start; or an error of a worker as it starts.
        """
        self._settings, self._lag, self._pins = settings, lag, pins
        self._digest = pass_digest(settings)
        self._cluster = Cluster(cluster)
        self._ray = self._cluster.ray
        self._versions: Versions = {}
        self._stored: dict[int, Any] = {}  # policy version to its object
        self._snapshots: dict[int, Snapshot] = {}
        self._calls: dict[Any, _RemoteWorker] = {}  # outstanding calls
        count = min(actors, workers or self._cluster.free_processors())
        self._workers = [_RemoteWorker(range(number, actors, count)) for number in range(count)]
        self._of = {actor: self._workers[actor % count] for actor in range(actors)}
        try:
            with self._cluster.reached():
                # All are started before the first one is waited for, so that they start at the
                # same time.
                begun = [self._start_worker(worker, processors=1) for worker in self._workers]
                for worker, answer in zip(self._workers, begun, strict=True):
                    self._admit(worker, answer)
        except BaseException:
            self.close()
            raise

    def publish(self, versions: Versions) -> None:
        """See :class:`Transport`."""
        self._versions = versions
        # Ray's store frees an object when this process no longer refers to it.
        self._stored = {v: stored for v, stored in self._stored.items() if v in versions}

    def begin(self, requests: Sequence[ActorRequest]) -> None:
        """See :class:`Transport`."""
        with self._cluster.reached():
            for worker in self._workers:
                theirs = [each for each in requests if self._of[each.actor] is worker]
                # Noted before the call, so that they are requested again if the worker is lost.
                worker.requests |= {each.actor: each for each in theirs}
                self._call(worker, theirs)

    def finished(self) -> list[ActorResult[Unroll]]:
        """See :class:`Transport`.

        Raises:
            CapsuleError: As :meth:`Transport.finished`; CAP-T351 or CAP-T354, a lost worker cannot
                be replaced; CAP-T353, the head is lost.
        """
        with self._cluster.reached():
            while True:
                played: list[ActorResult[Unroll]] = []
                for call in self._cluster.wait(list(self._calls)):
                    if call in self._calls:  # otherwise its worker was replaced
                        played += self._take(call)
                if played:
                    return played

    def restore(self, snapshots: Mapping[int, Snapshot]) -> None:
        """See :class:`Transport`."""
        self._snapshots = dict(snapshots)
        with self._cluster.reached():
            for worker in self._workers:
                self._restore(worker)

    def close(self) -> None:
        """See :class:`Transport`."""
        self._calls = {}
        self._cluster.leave(
            [worker.handle for worker in self._workers if worker.handle is not None]
        )

    def _start_worker(self, worker: _RemoteWorker, *, processors: int) -> Any:
        """Start a worker; return the reference to its first answer."""
        made = self._ray.remote(NodeWorker).options(
            num_cpus=processors,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": self._pins.variables},
        )
        # A new process has no policy versions yet.
        worker.known = set()
        worker.handle = made.remote()
        return worker.handle.prepare.remote(self._settings, worker.played, self._pins)

    def _admit(self, worker: _RemoteWorker, answer: Any) -> None:
        """Wait until a worker has begun, replacing it if it is lost, and check its digest."""
        while True:
            try:
                worker.node, digest = self._answer(worker, answer, START_SECONDS)
                break
            except _WorkerLostError as loss:
                answer = self._again(worker, loss)
        if isinstance(digest, CapsuleError):
            raise digest.within(self._name(worker))
        if digest != self._digest:
            raise CapsuleError(
                "CAP-T351",
                f"{self._name(worker)} computes other bits: a pass of the run's network has the "
                f"digest {digest[:16]} there and {self._digest[:16]} here",
                fix="Remove the node from the cluster, or use the same image on every node; nodes "
                "with other processors need a portable profile in accelerator.numerics.",
            )

    def _again(self, worker: _RemoteWorker, loss: _WorkerLostError) -> Any:
        """Start a worker in place of a lost one. It claims no processor, so none need be free.

        Raises:
            CapsuleError: CAP-T354, the worker was lost too often.
        """
        worker.losses += 1
        if worker.losses > LOSSES:
            raise CapsuleError(
                "CAP-T354",
                f"{self._name(worker)} was lost {worker.losses} times in a row: {loss}",
                fix="See Ray's logs on that node; its memory may be too small. Then run again: "
                "the run resumes from its last saved state.",
            )
        self._cluster.kill(worker.handle)
        self._calls = {call: of for call, of in self._calls.items() if of is not worker}
        return self._start_worker(worker, processors=0)

    def _replace(self, worker: _RemoteWorker, loss: _WorkerLostError) -> None:
        """Let another worker continue from the last snapshots."""
        self._admit(worker, self._again(worker, loss))
        # Restored first, because the outstanding unrolls continue from these snapshots.
        self._restore(worker)
        self._call(worker, list(worker.requests.values()))

    def _restore(self, worker: _RemoteWorker) -> None:
        """Restore a worker's actors from their last snapshots."""
        while True:
            known = {a: self._snapshots[a] for a in worker.played if a in self._snapshots}
            try:
                self._answer(worker, worker.handle.restore.remote(known))
                return
            except _WorkerLostError as loss:
                self._admit(worker, self._again(worker, loss))

    def _call(self, worker: _RemoteWorker, requests: Sequence[ActorRequest]) -> None:
        """Request unrolls; a worker answers one call after the other."""
        if not requests:
            return
        new = new_versions(self._versions, worker.known, requests)
        for version, parameters in new.items():
            if version not in self._stored:
                self._stored[version] = self._ray.put(parameters)
        stored = [self._stored[version] for version in new]
        call = worker.handle.play.remote(requests, self._lag, list(new), *stored)
        self._calls[call] = worker

    def _take(self, call: Any) -> list[ActorResult[Unroll]]:
        """Return the result of a finished call; nothing if its worker is lost."""
        worker = self._calls.pop(call)
        try:
            played: list[ActorResult[Unroll]] = self._answer(worker, call)
        except _WorkerLostError as loss:
            self._replace(worker, loss)
            return []
        # Reset only here, because a worker that dies while it plays still answers prepare() and
        # restore().
        worker.losses = 0
        for each in played:
            del worker.requests[each.actor]
            # Copies, because views would keep the whole answer in Ray's store.
            document, *arrays = each.after
            self._snapshots[each.actor] = Snapshot(document, *(array.copy() for array in arrays))
        return [each._replace(after=self._snapshots[each.actor]) for each in played]

    def _answer(self, worker: _RemoteWorker, call: Any, seconds: float | None = None) -> Any:
        """Wait for a call of a worker's method, and return its result.

        Raises:
            _WorkerLostError: The worker is lost.
            CapsuleError: CAP-T332, the method failed; CAP-T354, the time is up; or the error that
                the method returned.
        """
        errors = self._ray.exceptions
        if not self._cluster.wait([call], seconds):
            raise CapsuleError(
                "CAP-T354",
                f"{self._name(worker)} has not begun within {seconds:.0f} s",
                fix="See with 'ray status' whether the cluster has a free processor for it.",
            )
        try:
            answer = self._ray.get(call)
        # RayTaskError, a subclass of RayError, means that the method raised and its process is
        # still alive.
        except errors.RayTaskError as error:
            raise CapsuleError(
                "CAP-T332",
                f"{self._name(worker)}: {type(error.cause).__name__}: {error.cause}",
                fix="Report it, with the run's spec.",
            ) from error
        except errors.RayError as error:
            raise _WorkerLostError(brief(error)) from error
        if isinstance(answer, CapsuleError):
            raise answer.within(self._name(worker))
        return answer

    def _name(self, worker: _RemoteWorker) -> str:
        """Return a name for a worker: its node and its actors."""
        where = self._cluster.node_name(worker.node) if worker.node else "a node of the cluster"
        return f"{where} ({which(worker.played)})"


class _RemoteWorker:
    """The state of a worker as this process knows it.

    Attributes:
        played: Actors that it runs.
        handle: The Ray actor; None before one is started.
        node: Id of its node; empty until it has answered.
        known: Policy versions that it was given.
        requests: Outstanding requests, by actor.
        losses: Processes lost since the last one that returned unrolls.
    """

    def __init__(self, played: Sequence[int]) -> None:
        self.played = played
        self.handle: Any = None
        self.node = ""
        self.known: set[int] = set()
        self.requests: dict[int, ActorRequest] = {}
        self.losses = 0


class _WorkerLostError(Exception):
    """A worker's process, its node, or its answer was lost."""


class NodeWorker:
    """The Ray actor: an actor worker in a process whose pins are read back."""

    def prepare(
        self, settings: UnrollSettings, played: Sequence[int], pins: WorkerPins
    ) -> tuple[str, str | CapsuleError]:
        """Check and settle this process, and make the actors.

        Returns:
            Id of the node; and the digest of a pass of the network, or an error. It is returned and
            not raised, because Ray would wrap it.
        """
        import ray

        node = ray.get_runtime_context().get_node_id()
        try:
            # The first is the environment with which the interpreter was started, the second the
            # one that libraries read now.
            for environment in (environment_of("self"), os.environ):
                check_start(environment, pins.variables)
            cpu.require(pins.numerics)
            settle(pins.determinism, pins.numerics)
            self_test.start_up_test(pins.numerics)
            self._worker = settings.make_worker(played)
            return node, pass_digest(settings)
        except CapsuleError as error:
            return node, error

    def play(
        self,
        requests: Sequence[ActorRequest],
        lag: int,
        numbers: Sequence[int],
        *parameters: NDArray[np.float32],
    ) -> list[ActorResult[Unroll]] | CapsuleError:
        """See :meth:`ActorWorker.play`; ``numbers`` are the policy versions of ``parameters``."""
        try:
            # Copies, because torch warns of arrays that cannot be written to, as Ray's are.
            copies = [np.array(each) for each in parameters]
            return self._worker.play(requests, dict(zip(numbers, copies, strict=True)), lag)
        except CapsuleError as error:
            return error

    def restore(self, snapshots: Mapping[int, Snapshot]) -> CapsuleError | None:
        """See :meth:`ActorWorker.restore`."""
        try:
            self._worker.restore(snapshots)
            return None
        except CapsuleError as error:
            return error
