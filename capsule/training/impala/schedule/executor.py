"""The executor: follows a schedule, whatever plays the actors, and whatever is ready when."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capsule.training.acting.actor_worker import ActorRequest, Played, Snapshot
from capsule.training.acting.transports import Transport
from capsule.training.impala.actors.unrolls import Unroll
from capsule.training.impala.schedule.sources import Schedule


class Item(NamedTuple):
    """An unroll that is trained on.

    Attributes:
        actor: Whose.
        number: Which of its unrolls, from 0.
        version: Version of the policy that acted.
        unroll: What it did.
    """

    actor: int
    number: int
    version: int
    unroll: Unroll


class Executor:
    """Has actors play what the schedule says next, and hands it to the learner in that order.

    Attributes:
        lag: The most that the schedule has.
        schedule: What decides.
        snapshots: Each actor after its last unroll that was trained on; None before the first. With
            :attr:`trained` and :attr:`versions` they are all that a run resumes from: what was
            played and not trained on is played again.
        trained: How many unrolls of each actor were trained on.
        versions: The policy versions that are still played with, by number, in the order of
            :attr:`Parameters.flat`: the newest, and as many before it as the lag.
        replicas: Number of replicas of the transport.
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
        self._arrived: dict[int, Played[Unroll]] = {}

    def publish(self, version: int, parameters: NDArray[np.float32]) -> None:
        """Give actors a version of the policy.

        Args:
            version: Its number: the parameter updates made so far.
            parameters: float32 ``[size]``, in the order of :attr:`Parameters.flat`; not written to
                afterwards.
        """
        oldest = version - self.lag
        # A new mapping, because a thread of the transport may still read the one before.
        self.versions = {v: kept for v, kept in self.versions.items() if v >= oldest}
        self.versions[version] = parameters
        self._transport.publish(self.versions)
        self._begin(version)

    def collect(self, update: int) -> list[Item]:
        """Wait for the unrolls of an update, and let their actors continue.

        Raises:
            CapsuleError: What the schedule or the transport raises.
        """
        while (actors := self._choose(update)) is None:
            # Nothing is under way, so the wait would never end.
            if len(self._arrived) == len(self._outstanding):
                raise RuntimeError(f"update {update} waits for an unroll that no actor plays")
            self._arrived |= {played.actor: played for played in self._transport.finished()}
        items = [self._take(actor) for actor in actors]
        # Before the learner works on the items, so that their actors play meanwhile.
        self._begin(update)
        return items

    def restore(
        self,
        snapshots: list[Snapshot | None],
        trained: list[int],
        versions: Mapping[int, NDArray[np.float32]],
    ) -> None:
        """Continue from where another executor was, before anything was published here.

        Raises:
            CapsuleError: An environment does not return to its snapshot.
        """
        self.snapshots, self.trained = list(snapshots), list(trained)
        known = {actor: each for actor, each in enumerate(snapshots) if each is not None}
        self._transport.restore(known)
        # The newest version is not among them: publish() adds it before anything is played.
        self.versions = dict(versions)

    def close(self) -> None:
        """End what plays."""
        self._transport.close()

    def _choose(self, update: int) -> list[int] | None:
        return self._schedule.choose(update, self._outstanding, list(self._arrived))

    def _take(self, actor: int) -> Item:
        played, version = self._arrived.pop(actor), self._outstanding.pop(actor)
        item = Item(actor, self.trained[actor], version, played.made)
        self.trained[actor] += 1
        self.snapshots[actor] = played.after
        return item

    def _begin(self, current: int) -> None:
        """Let every idle actor begin the unroll whose version there is."""
        requests = []
        # By number, and not as they arrived: every transport gets the same requests.
        for actor, number in enumerate(self.trained):
            if actor in self._outstanding:
                continue
            version = self._schedule.version(actor, number, current)
            if version is not None:
                requests.append(ActorRequest(actor, version))
                self._outstanding[actor] = version
        self._transport.begin(requests)
