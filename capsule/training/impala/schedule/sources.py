"""Where schedules come from: a rule, a log, or whatever actor is ready first.

A *schedule* says for every parameter update which unrolls it learns, in order, and with which
version of the policy each was played. Version ``v`` is the policy after ``v`` updates. The *lag* of
an unroll is the number of updates from its version to the one that learns it. An actor plays its
unrolls one after the other, and begins the next when the last is taken for training.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol

from capsule.experiment.errors import CapsuleError
from capsule.experiment.schedule_log import ScheduleLog

Kind = Literal["lockstep", "replayed", "live"]


class Schedule(Protocol):
    """The questions that the executor asks a schedule.

    Attributes:
        kind: What decides: a rule, a log, or who is ready first.
        lag: The most there is.
    """

    kind: Kind
    lag: int

    def version(self, actor: int, number: int, current: int) -> int | None:
        """Return the version that an actor plays its next unroll with.

        Args:
            actor: Whose.
            number: How many of its unrolls were trained on before.
            current: Updates made.

        Returns:
            The version, or None where the unroll must wait, or never is.
        """

    def choose(
        self, update: int, outstanding: Mapping[int, int], arrived: Sequence[int]
    ) -> list[int] | None:
        """Return the actors whose unrolls an update learns, in order.

        Args:
            update: Updates made before.
            outstanding: The version of each actor's unroll that was begun and not trained on yet.
            arrived: The actors of those that are finished, first come first.

        Returns:
            The actors, or None while one of them has not arrived.
        """


class Lockstep:
    """Actors in turn: unroll ``n`` is of actor ``n mod actors``, with a constant lag.

    Update ``t`` learns unrolls ``t batch`` to ``(t + 1) batch - 1``, played with version
    ``max(0, t - lag)``. Lag 0 is synchronous: no actor acts while the learner learns. With lag 1
    they act for the next update meanwhile.
    """

    kind: Kind = "lockstep"

    def __init__(self, actors: int, batch: int, lag: int, updates: int) -> None:
        """Make the schedule of ``updates`` parameter updates, of ``batch`` unrolls each."""
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
    """The schedule that a log holds, again."""

    kind: Kind = "replayed"

    def __init__(self, log: ScheduleLog, lag: int) -> None:
        """Follow a log, with the bound that it was recorded under."""
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
                fix="Take the log of the whole run.",
            )
        actors = [actor for actor, _ in self._log.slots(update)]
        return actors if set(actors) <= set(arrived) else None


class Live:
    """Asynchronous: every actor plays with the newest version; ready unrolls are trained on.

    Unrolls are trained on in the order they arrive, but at most ``lag`` updates after the version
    they were played with: where a place is needed for one that could not be in time otherwise, the
    learner waits for that. As an actor begins its next unroll when its last is taken, ``batch lag``
    unrolls are outstanding at most, which is what fits into the updates until their time.
    """

    kind: Kind = "live"

    def __init__(self, actors: int, batch: int, lag: int) -> None:
        """Make the source of a schedule with at most that lag.

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
        # As long as none is urgent, those that arrived first are taken.
        if not self._due(update, outstanding.values()):
            return list(arrived[: self._batch])
        # A copy, since a call that has to wait must change nothing.
        left, chosen = dict(outstanding), list[int]()
        for actor in arrived:
            version = left.pop(actor)
            if self._due(update, left.values()) < self._batch - len(chosen):
                chosen.append(actor)
            else:  # the places left are for others
                left[actor] = version
            if len(chosen) == self._batch:
                return chosen
        return None

    def _due(self, update: int, versions: Iterable[int]) -> int:
        """Return how many unrolls ``update`` must learn so that all can be in time.

        The first ``k`` by their time must fit into the updates up to the time of the last of them.
        """
        times = sorted(version + self.lag - update for version in versions)
        needs = (count - self._batch * time for count, time in enumerate(times, start=1))
        return max(needs, default=0)
