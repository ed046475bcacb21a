"""Actors on the nodes of a Ray cluster.

A *host* is one stateful Ray actor, a process that plays many logical actors, dealt out as to the
processes of one machine. Policy versions are objects of Ray's store, put there once; what comes
back is taken in any order, as the executor decides what is learned next.

*Nodes.* Variables reach a host's process before its interpreter starts, and are read back in it, as
are the flags of torch and of the maths libraries. Then it digests a pass of the run's own network
(:mod:`~.preflight`). A node whose bits are not those of this process plays no part.

*Losses.* Every unroll brings a snapshot of its actor. When a host is lost, another begins with the
last snapshots, and is asked again for what is outstanding. Should the lost one still live, its
answers are equal to those, and nobody hears them. So a loss costs time and no bit. The run's own
state is with this process: after the loss of the head it is resumed, on any transport.

What hosts ask the operating system for is not part of a run's random profile. Actors draw from
streams alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.spec import DeterminismSpec, Numerics, Spec
from capsule.experiment.variables import environment_variables
from capsule.native import native_part
from capsule.training.acting.worker_process import Failure, settle, which
from capsule.training.determinism import cpu, self_test
from capsule.training.determinism.child_processes import check_start, environment_of
from capsule.training.impala.actors.actor_worker import UnrollWorker
from capsule.training.impala.actors.ray.connection import Cluster, first_line
from capsule.training.impala.actors.ray.preflight import pass_digest
from capsule.training.impala.actors.transports import Versions
from capsule.training.impala.actors.unrolls import Played, Request, Snapshot, UnrollSettings

START_SECONDS = 180.0  # that a host may take to be there, its node's first one the longest
LOSSES = 3  # of one host, without an answer between them, that are put down to chance


class Pins(NamedTuple):
    """What holds every process of a run that plays actors to the same bits.

    Attributes:
        variables: The environment that its interpreter starts with.
        determinism: The spec's ``determinism`` section. There is one maths thread, whatever it
            says.
        numerics: The CPU numerics profile; ``native`` if the run trains on a GPU.
    """

    variables: dict[str, str]
    determinism: DeterminismSpec
    numerics: Numerics


def pins_of(spec: Spec, numerics: Numerics) -> Pins:
    """Return the pins of a run's hosts.

    Raises:
        CapsuleError: CAP-N001, the maths shim is not there.
    """
    preloads = {}
    if cpu.is_portable(numerics):
        preloads = {"LD_PRELOAD": str(native_part("libcapsule-math.so"))}
    return Pins(environment_variables(spec) | preloads, spec.determinism, numerics)


class RayTransport:
    """Actors dealt out to hosts in a cluster, who play while the learner learns."""

    replicas = 0

    def __init__(
        self,
        settings: UnrollSettings,
        actors: int,
        *,
        cluster: str,
        hosts: int | None,
        lag: int,
        pins: Pins,
    ) -> None:
        """Connect, start the hosts, and make the actors.

        Args:
            settings: What makes them.
            actors: How many.
            cluster: Address of its head: ``HOST:PORT``, where this machine is one of its nodes, or
                ``ray://HOST:PORT``, from anywhere.
            hosts: How many, at most one for each actor; None: one for each free processor.
            lag: Of the schedule.
            pins: What every host's process must have.

        Raises:
            CapsuleError: CAP-T351, a node computes other bits; CAP-T352, there is no such cluster;
                CAP-T354, a host does not start; what a host raises as it is made.
        """
        self._settings, self._lag, self._pins = settings, lag, pins
        self._digest = pass_digest(settings)
        self._cluster = Cluster(cluster)
        self._ray = self._cluster.ray
        self._versions: Versions = {}
        self._stored: dict[int, Any] = {}  # policy version to its object
        self._snapshots: dict[int, Snapshot] = {}
        self._calls: dict[Any, _Host] = {}  # answers to come
        count = min(actors, hosts or self._cluster.free_processors())
        self._hosts = [_Host(number, range(number, actors, count)) for number in range(count)]
        self._of = {actor: self._hosts[actor % count] for actor in range(actors)}
        try:
            with self._cluster.reached():
                begun = [self._begin_host(host, processors=1) for host in self._hosts]
                for host, answer in zip(self._hosts, begun, strict=True):
                    self._admit(host, answer)
        except BaseException:
            self.close()
            raise

    def publish(self, versions: Versions) -> None:
        """See :class:`Transport`."""
        self._versions = versions
        self._stored = {v: stored for v, stored in self._stored.items() if v in versions}

    def begin(self, requests: Sequence[Request]) -> None:
        """See :class:`Transport`."""
        with self._cluster.reached():
            for host in self._hosts:
                theirs = [each for each in requests if self._of[each.actor] is host]
                host.requests |= {each.actor: each for each in theirs}
                self._call(host, theirs)

    def finished(self) -> list[Played]:
        """See :class:`Transport`.

        Raises:
            CapsuleError: As for other transports; or CAP-T351 or CAP-T354, in place of a host that
                was lost there is none to be had; CAP-T353, the head is lost.
        """
        with self._cluster.reached():
            while True:
                played: list[Played] = []
                for call in self._cluster.wait(list(self._calls)):
                    if call in self._calls:  # else its host is lost, and asked again elsewhere
                        played += self._take(call)
                if played:
                    return played

    def restore(self, snapshots: Mapping[int, Snapshot]) -> None:
        """See :class:`Transport`."""
        self._snapshots = dict(snapshots)
        with self._cluster.reached():
            for host in self._hosts:
                self._restore(host)

    def close(self) -> None:
        """See :class:`Transport`."""
        self._calls = {}
        self._cluster.leave([host.handle for host in self._hosts if host.handle is not None])

    def _begin_host(self, host: _Host, *, processors: int) -> Any:
        """Start a host; return what its answer will be in."""
        made = self._ray.remote(NodeWorker).options(
            num_cpus=processors,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": self._pins.variables},
        )
        host.known = set()
        host.handle = made.remote()
        return host.handle.prepare.remote(self._settings, host.played, self._pins)

    def _admit(self, host: _Host, answer: Any) -> None:
        """Wait until a host has begun, in as many attempts as it may have, and check its bits."""
        while True:
            try:
                host.node, digest = self._answer(host, answer, START_SECONDS)
                break
            except _WorkerLostError as loss:
                answer = self._again(host, loss)
        if isinstance(digest, Failure):
            raise digest.error(self._name(host))
        if digest != self._digest:
            raise CapsuleError(
                "CAP-T351",
                f"{self._name(host)} computes other bits: a pass of the run's network has the "
                f"digest {digest[:16]} there and {self._digest[:16]} here",
                fix="Take the node out of the cluster, or use the same image on every node; nodes "
                "with other processors need a portable profile in accelerator.numerics.",
                exit_code=ExitCode.INCONCLUSIVE,
            )

    def _again(self, host: _Host, loss: _WorkerLostError) -> Any:
        """Start a host in place of one that was lost; it needs no free processor.

        Raises:
            CapsuleError: CAP-T354, that happened too often.
        """
        host.losses += 1
        if host.losses > LOSSES:
            raise CapsuleError(
                "CAP-T354",
                f"{self._name(host)} was lost {host.losses} times in a row: {loss}",
                fix="See Ray's logs on that node; its memory may be too small. Then run again: "
                "the run resumes from its last saved state.",
                exit_code=ExitCode.TRAINING_FAILED,
            )
        self._cluster.kill(host.handle)
        self._calls = {call: of for call, of in self._calls.items() if of is not host}
        return self._begin_host(host, processors=0)

    def _replace(self, host: _Host, loss: _WorkerLostError) -> None:
        """Have another host go on from the last snapshots."""
        self._admit(host, self._again(host, loss))
        self._restore(host)
        self._call(host, list(host.requests.values()))

    def _restore(self, host: _Host) -> None:
        """Bring a host's actors back to their last snapshots."""
        while True:
            known = {a: self._snapshots[a] for a in host.played if a in self._snapshots}
            try:
                self._answer(host, host.handle.restore.remote(known))
                return
            except _WorkerLostError as loss:
                self._admit(host, self._again(host, loss))

    def _call(self, host: _Host, requests: Sequence[Request]) -> None:
        """Ask for unrolls; a host answers one call after the other."""
        if not requests:
            return
        host.known &= self._versions.keys()
        needed = sorted({request.version for request in requests} - host.known)
        host.known |= set(needed)
        for version in needed:
            if version not in self._stored:
                self._stored[version] = self._ray.put(self._versions[version])
        stored = [self._stored[version] for version in needed]
        call = host.handle.unroll.remote(requests, self._lag, needed, *stored)
        self._calls[call] = host

    def _take(self, call: Any) -> list[Played]:
        """Return what a finished call brought; nothing where its host is lost."""
        host = self._calls.pop(call)
        try:
            played: list[Played] = self._answer(host, call)
        except _WorkerLostError as loss:
            self._replace(host, loss)
            return []
        for each in played:
            del host.requests[each.actor]
            # A copy, or it would hold the whole answer in Ray's store.
            document, *arrays = each.after
            self._snapshots[each.actor] = Snapshot(document, *(array.copy() for array in arrays))
        return [each._replace(after=self._snapshots[each.actor]) for each in played]

    def _answer(self, host: _Host, call: Any, seconds: float | None = None) -> Any:
        """Wait for what a method of a host returned.

        Raises:
            _WorkerLostError: There is no answer.
            CapsuleError: CAP-T332, the method failed; CAP-T354, time is up; or what it raised.
        """
        errors = self._ray.exceptions
        if not self._cluster.wait([call], seconds):
            raise CapsuleError(
                "CAP-T354",
                f"{self._name(host)} has not begun within {seconds:.0f} s",
                fix="See with 'ray status' whether the cluster has a free processor for it.",
                exit_code=ExitCode.TRAINING_FAILED,
            )
        try:
            answer = self._ray.get(call)
        except errors.RayTaskError as error:
            raise CapsuleError(
                "CAP-T332",
                f"{self._name(host)}: {type(error.cause).__name__}: {error.cause}",
                fix="Report it, with the run's spec.",
                exit_code=ExitCode.TRAINING_FAILED,
            ) from error
        except errors.RayError as error:
            raise _WorkerLostError(first_line(error)) from error
        if isinstance(answer, Failure):
            raise answer.error(self._name(host))
        host.losses = 0
        return answer

    def _name(self, host: _Host) -> str:
        """Name a host by its node and its actors."""
        where = self._cluster.node_name(host.node) if host.node else "a node of the cluster"
        return f"{where} ({which(host.played)})"


class _Host:
    """What is known here of a host.

    Attributes:
        number: Its number.
        played: Actors that it plays.
        handle: The Ray actor, None before there is one.
        node: Id of its node, empty until it has answered.
        known: Policy versions that it was given.
        requests: Unrolls that were asked for and are not here, by actor.
        losses: Processes that were lost since one of them answered.
    """

    def __init__(self, number: int, played: Sequence[int]) -> None:
        self.number, self.played = number, played
        self.handle: Any = None
        self.node = ""
        self.known: set[int] = set()
        self.requests: dict[int, Request] = {}
        self.losses = 0


class _WorkerLostError(Exception):
    """A host's process, its node, or its answer is gone."""


class NodeWorker:
    """The Ray actor: an :class:`UnrollWorker` in a process whose pins are read back."""

    def prepare(
        self, settings: UnrollSettings, played: Sequence[int], pins: Pins
    ) -> tuple[str, str] | tuple[str, Failure]:
        """Settle this process and make the actors.

        Returns:
            Id of the node, and the digest of a pass of the network; or what is wrong with it.
        """
        import ray

        node = ray.get_runtime_context().get_node_id()
        try:
            for environment in (environment_of("self"), os.environ):
                check_start(environment, pins.variables)
            cpu.require(pins.numerics)
            settle(pins.determinism, pins.numerics)
            self_test.start_up_test(pins.numerics)
            self._host = UnrollWorker(settings, played)
            return node, pass_digest(settings)
        except CapsuleError as error:
            return node, Failure.of(error)

    def unroll(
        self,
        requests: Sequence[Request],
        lag: int,
        numbers: Sequence[int],
        *parameters: NDArray[np.float32],
    ) -> list[Played] | Failure:
        """See :meth:`UnrollWorker.unroll`; policy versions come as numbers, then parameters."""
        try:
            # Objects of the store can only be read, which torch takes exception to.
            copies = [np.array(each) for each in parameters]
            return self._host.unroll(requests, dict(zip(numbers, copies, strict=True)), lag)
        except CapsuleError as error:
            return Failure.of(error)

    def restore(self, snapshots: Mapping[int, Snapshot]) -> Failure | None:
        """See :meth:`UnrollWorker.restore`."""
        try:
            self._host.restore(snapshots)
            return None
        except CapsuleError as error:
            return Failure.of(error)
