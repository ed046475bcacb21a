"""The executor, which follows a schedule over any transport and with any order of arrival."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capsule.training.acting.actor_worker import ActorRequest, ActorResult, Snapshot
from capsule.training.acting.transports import Transport
from capsule.training.impala.actors.unrolls import Unroll
from capsule.training.impala.schedule.sources import Schedule


class Item(NamedTuple):
    """An unroll that is trained on.

    Attributes:
        actor: Number of the actor.
        number: Number of the unroll among those of its actor, from 0.
        version: Version of the policy that acted.
        unroll: The unroll itself.
    """

    actor: int
    number: int
    version: int
    unroll: Unroll


class Executor:
    """Lets actors play the unrolls of a schedule, and gives them to the learner in its order.

    Attributes:
        lag: The largest lag of the schedule.
        schedule: The kind of the schedule.
        snapshots: Each actor after its last unroll that was trained on; None before the first.
            Together with :attr:`trained` and :attr:`versions`, they suffice to resume a run:
            unrolls that were played and not trained on are played again.
        trained: The number of unrolls of each actor that were trained on.
        versions: The policy versions with which unrolls may still be played, by number, in the
            order of :attr:`Parameters.flat`: the newest, and as many before it as the lag.
        replicas: Number of inference replicas of the transport.
    """

    def __init__(self, schedule: Schedule, transport: Transport, actors: int) -> None:
        """Begin before the first update; :meth:`publish` must give the first version."""
        self.snapshots: list[Snapshot | None] = [None] * actors
        self.trained = [0] * actors
        self.versions: dict[int, NDArray[np.float32]] = {}
        self.lag, self.schedule = schedule.lag, schedule.kind
        self.replicas = transport.replicas
        self._schedule, self._transport = schedule, transport
        self._outstanding: dict[int, int] = {}
        self._arrived: dict[int, ActorResult[Unroll]] = {}

    def publish(self, version: int, parameters: NDArray[np.float32]) -> None:
        """Give actors a version of the policy, and let idle ones begin unrolls with it.

        Args:
            version: Its number: the parameter updates made so far.
            parameters: float32 ``[size]``, in the order of :attr:`Parameters.flat`; the caller must
                not change it afterwards.
        """
        oldest = version - self.lag
        # A new mapping, because a thread of the transport may still read the previous one.
        self.versions = {v: kept for v, kept in self.versions.items() if v >= oldest}
        self.versions[version] = parameters
        self._transport.publish(self.versions)
        self._begin(version)

    def collect(self, update: int) -> list[Item]:
        """Wait for the unrolls of an update, and let their actors continue.

        Raises:
            CapsuleError: As :meth:`Schedule.choose` and :meth:`Transport.finished`.
            RuntimeError: The schedule names an unroll that no actor plays.
        """
        outstanding = self._outstanding
        while (actors := self._schedule.choose(update, outstanding, list(self._arrived))) is None:
            # If no actor is playing, the wait would never end.
            if len(self._arrived) == len(outstanding):
                raise RuntimeError(f"update {update} waits for an unroll that no actor plays")
            self._arrived |= {played.actor: played for played in self._transport.finished()}
        items = [self._take(actor) for actor in actors]
        # The actors continue before the learner works on their items, so that they play meanwhile.
        self._begin(update)
        return items

    def restore(
        self,
        snapshots: list[Snapshot | None],
        trained: list[int],
        versions: Mapping[int, NDArray[np.float32]],
    ) -> None:
        """Continue from the attributes of another executor; :meth:`publish` must follow.

        Raises:
            CapsuleError: As :meth:`Transport.restore`.
        """
        self.snapshots, self.trained = list(snapshots), list(trained)
        known = {actor: each for actor, each in enumerate(snapshots) if each is not None}
        self._transport.restore(known)
        # The newest version is missing: publish() adds it before anything is played.
        self.versions = dict(versions)

    def close(self) -> None:
        """Close the transport."""
        self._transport.close()

    def _take(self, actor: int) -> Item:
        played, version = self._arrived.pop(actor), self._outstanding.pop(actor)
        item = Item(actor, self.trained[actor], version, played.experience)
        self.trained[actor] += 1
        self.snapshots[actor] = played.after
        return item

    def _begin(self, current: int) -> None:
        """Let every idle actor begin its next unroll, if the policy version for it exists."""
        requests = []
        # In the order of the actors, and not of arrival, so that every transport gets the same
        # requests.
        for actor, number in enumerate(self.trained):
            if actor in self._outstanding:
                continue
            version = self._schedule.version(actor, number, current)
            if version is not None:
                requests.append(ActorRequest(actor, version))
                self._outstanding[actor] = version
        self._transport.begin(requests)
