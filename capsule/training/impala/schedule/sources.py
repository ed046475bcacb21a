"""The sources of schedules: a rule, a log, or the order of arrival.

A *schedule* states for every parameter update the unrolls that it trains on, in order, and the
policy version with which each was played. Version ``v`` is the policy after ``v`` updates. The
*lag* of an unroll is the number of updates from its version to the update that trains on it. An
actor plays its unrolls one after the other, and begins the next one when the last is taken for
training.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol

from capsule.experiment.errors import CapsuleError
from capsule.experiment.schedule_log import ScheduleLog

Kind = Literal["lockstep", "replayed", "live"]


class Schedule(Protocol):
    """The interface of schedules, which the executor uses.

    Attributes:
        kind: ``lockstep``: a rule; ``replayed``: a log; ``live``: the order of arrival.
        lag: The largest lag of an unroll.
    """

    kind: Kind
    lag: int

    def version(self, actor: int, number: int, current: int) -> int | None:
        """Return the policy version with which an actor plays its next unroll.

        Args:
            actor: Number of the actor.
            number: The number of its unrolls that were trained on.
            current: Updates made.

        Returns:
            The version; None if it does not exist yet, or if the unroll is not in the schedule.
        """

    def choose(
        self, update: int, outstanding: Mapping[int, int], arrived: Sequence[int]
    ) -> list[int] | None:
        """Return the actors whose unrolls an update trains on, in order.

        Args:
            update: Updates made before.
            outstanding: The policy version of each actor's unroll that was begun and not trained on
                yet.
            arrived: The actors of finished unrolls, in the order of arrival.

        Returns:
            The actors, or None while the unroll of one of them has not arrived.
        """


class Lockstep:
    """Actors in turn: unroll ``n`` is one of actor ``n mod actors``, with a constant lag.

    Update ``t`` trains on unrolls ``t batch`` to ``(t + 1) batch - 1``, which are played with
    version ``max(0, t - lag)``. Lag 0 is synchronous: no actor acts while the learner learns. With
    lag 1, the actors play the unrolls of the next update meanwhile.
    """

    kind: Kind = "lockstep"

    def __init__(self, actors: int, batch: int, lag: int, updates: int) -> None:
        """Make the schedule of ``updates`` parameter updates with ``batch`` unrolls each."""
        self.lag = lag
        self._actors, self._batch, self._updates = actors, batch, updates

    def version(self, actor: int, number: int, current: int) -> int | None:
        """See :class:`Schedule`."""
        update = (number * self._actors + actor) // self._batch
        version = max(0, update - self.lag)
        return version if update < self._updates and version <= current else None

    def choose(
        self,
        update: int,
        outstanding: Mapping[int, int],  # noqa: ARG002
        arrived: Sequence[int],
    ) -> list[int] | None:
        """See :class:`Schedule`."""
        first = update * self._batch
        actors = [n % self._actors for n in range(first, first + self._batch)]
        return actors if set(actors) <= set(arrived) else None


class Recorded:
    """The schedule of an earlier run, from its log."""

    kind: Kind = "replayed"

    def __init__(self, log: ScheduleLog, lag: int) -> None:
        """Follow a log, with the bound on the lag under which it was recorded."""
        self.lag = lag
        self._log = log
        # Plain machine words: a log may have tens of millions of unrolls.
        self._versions: list[array[int]] = [array("L") for _ in range(log.actors)]
        for update in range(log.updates):
            for actor, version in log.slots(update):
                self._versions[actor].append(version)

    def version(self, actor: int, number: int, current: int) -> int | None:
        """See :class:`Schedule`."""
        versions = self._versions[actor]
        # An unroll that the log does not have would never be trained on, so it is not played.
        if number == len(versions) or versions[number] > current:
            return None
        return versions[number]

    def choose(
        self,
        update: int,
        outstanding: Mapping[int, int],  # noqa: ARG002
        arrived: Sequence[int],
    ) -> list[int] | None:
        """See :class:`Schedule`.

        Raises:
            CapsuleError: CAP-T343, the log ends before the run does.
        """
        if update >= self._log.updates:
            raise CapsuleError(
                "CAP-T343",
                f"the schedule log ends after {self._log.updates} updates, the run does not",
                fix="Use the log of the whole run.",
            )
        actors = [actor for actor, _ in self._log.slots(update)]
        return actors if set(actors) <= set(arrived) else None


class Live:
    """The asynchronous schedule: actors play with the newest version, and arrive in any order.

    Unrolls are trained on in the order of arrival, but at most ``lag`` updates after the version
    with which they were played: if an unroll would otherwise be late, the learner keeps a place for
    it and waits. There are at most ``batch lag`` actors, each with one outstanding unroll, so all
    of these fit into the ``lag`` updates before they are due.
    """

    kind: Kind = "live"

    def __init__(self, actors: int, batch: int, lag: int) -> None:
        """Make a schedule with ``batch`` unrolls per update and at most the lag ``lag``.

        Raises:
            ValueError: The bound cannot be kept with so many actors.
        """
        if actors > batch * lag:
            raise ValueError(f"{actors} actors > {batch} unrolls an update * lag {lag}")
        self.lag = lag
        self._batch = batch

    def version(self, actor: int, number: int, current: int) -> int | None:  # noqa: ARG002
        """See :class:`Schedule`."""
        return current

    def choose(
        self, update: int, outstanding: Mapping[int, int], arrived: Sequence[int]
    ) -> list[int] | None:
        """See :class:`Schedule`."""
        if len(arrived) < self._batch:
            return None
        # If no unroll is urgent, those that arrived first are taken.
        if not self._due(update, outstanding.values()):
            return list(arrived[: self._batch])
        # A copy, because a call that returns None must change nothing.
        left, chosen = dict(outstanding), list[int]()
        for actor in arrived:
            version = left.pop(actor)
            if self._due(update, left.values()) < self._batch - len(chosen):
                chosen.append(actor)
            else:  # the remaining places are for urgent ones
                left[actor] = version
            if len(chosen) == self._batch:
                return chosen
        return None

    def _due(self, update: int, versions: Iterable[int]) -> int:
        """Return how many of some unrolls ``update`` must train on, so that none will be late.

        ``versions`` are the policy versions of the unrolls. An unroll is due at update ``version +
        lag``. For every ``k``, the ``k`` unrolls that are due first must fit into this update and
        the ``batch`` places of each later one until the last of them is due.
        """
        times = sorted(version + self.lag - update for version in versions)
        needs = (count - self._batch * time for count, time in enumerate(times, start=1))
        return max(needs, default=0)
