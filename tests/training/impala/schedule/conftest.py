"""A transport that plays nothing, and what follows a schedule with it."""

import random
from array import array

import numpy as np
from hypothesis import strategies as st

from capsule.experiment.schedule_log import ScheduleLog
from capsule.training.acting.actor_worker import ActorResult, Snapshot
from capsule.training.impala.schedule.executor import Executor

SPEC = "5" * 64


class Play:
    """A transport that plays nothing, and says how every unroll was asked for.

    An unroll is ``(actor, number, version)``. Unrolls finish in an order of its own.
    """

    replicas = 0

    def __init__(self, order):
        """Take the order: a function of how many are outstanding to the index of the next."""
        self.order = order
        self.published, self.outstanding, self.snapshots = {}, [], {}
        self.begun, self.update = {}, 0
        self.closed = False

    def publish(self, versions):
        self.published = dict(versions)

    def begin(self, requests):
        for actor, version in requests:
            assert version in self.published, "asked for before its version, or after it"
            assert actor not in [other for other, _, _ in self.outstanding], "two at a time"
            number = self.begun.get(actor, 0)
            self.begun[actor] = number + 1
            self.outstanding.append((actor, number, version))

    def finished(self):
        assert self.outstanding, "waits for nobody"
        count = 1 + self.order(len(self.outstanding))
        done = [
            self.outstanding.pop(self.order(len(self.outstanding)))
            for _ in range(min(count, len(self.outstanding)))
        ]
        return [ActorResult(each[0], each, after(each)) for each in done]

    def restore(self, snapshots):
        self.snapshots = dict(snapshots)
        for actor, snapshot in snapshots.items():
            self.begun[actor] = snapshot.document["number"] + 1

    def close(self):
        self.closed = True


def after(unroll):
    actor, number, _ = unroll
    return Snapshot({"actor": actor, "number": number}, np.zeros(0), np.zeros(0, np.float32))


def follow(schedule, actors, updates, order, executor=None, first=0):
    """Execute a schedule; return the items of each update."""
    executor = executor or Executor(schedule, Play(order), actors)
    learned = []
    for update in range(first, updates):
        executor.publish(update, np.full(1, update, np.float32))
        items = executor.collect(update)
        for item in items:
            assert item.unroll == (item.actor, item.number, item.version)
        learned.append(items)
    return learned


def drawn(data):
    """Return an order of completion of a seed that hypothesis draws."""
    return random.Random(data.draw(st.integers(0, 2**32))).randrange  # noqa: S311


def log_of(actors, batch, learned):
    """Make the log of what was learned."""
    slots = [(update, item) for update, items in enumerate(learned) for item in items]
    played = array("H", [item.actor for _, item in slots])
    return ScheduleLog(
        SPEC, actors, batch, played, array("H", [update - item.version for update, item in slots])
    )


def newest(_count):
    return _count - 1


def oldest(_count):
    return 0
