"""The executor: what it asks for, when, and what it hands to the learner."""

import numpy as np
import pytest

from capsule.training.impala.schedule.executor import Executor
from capsule.training.impala.schedule.sources import Live, Lockstep
from tests.training.impala.schedule.conftest import Play, follow, newest, oldest


def test_lockstep_plays_nothing_that_nobody_learns():
    executor = Executor(Lockstep(6, 4, 2, 3), Play(oldest), 6)
    follow(None, 6, 3, oldest, executor)
    assert executor.trained == [2] * 6
    executor.publish(3, np.zeros(1, np.float32))
    assert executor._transport.outstanding == []


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_lag_is_what_is_played_while_the_learner_learns(lag):
    """With as many actors as learn at once in each of lag + 1 updates, all of them."""
    actors = 3 * (lag + 1)
    transport = Play(oldest)
    executor = Executor(Lockstep(actors, 3, lag, 99), transport, actors)
    for update in range(9):
        executor.publish(update, np.zeros(1, np.float32))
        executor.collect(update)
        assert len(transport.outstanding) + len(executor._arrived) == 3 * lag


class Scripted:
    """A schedule whose every answer is written down."""

    kind, lag = "lockstep", 2

    def __init__(self, versions, chosen):
        self.versions, self.chosen = versions, chosen

    def version(self, actor, number, current):
        known = self.versions.get((actor, number))
        return known if known is not None and known <= current else None

    def choose(self, update, outstanding, arrived):  # noqa: ARG002
        actors = self.chosen[update]
        return actors if set(actors) <= set(arrived) else None


def test_an_unroll_waits_for_its_version():
    transport = Play(oldest)
    versions = {(0, 0): 0, (1, 0): 1, (0, 1): 0}
    executor = Executor(Scripted(versions, [[0], [1], [0]]), transport, 2)
    executor.publish(0, np.zeros(1, np.float32))
    assert transport.outstanding == [(0, 0, 0)]
    assert [item.actor for item in executor.collect(0)] == [0]
    assert transport.outstanding == [(0, 1, 0)]
    executor.publish(1, np.zeros(1, np.float32))
    assert transport.outstanding == [(0, 1, 0), (1, 0, 1)]


def test_what_nobody_plays_is_not_waited_for():
    executor = Executor(Scripted({(0, 0): 0}, [[0], [1]]), Play(oldest), 2)
    executor.publish(0, np.zeros(1, np.float32))
    executor.collect(0)
    with pytest.raises(RuntimeError, match="update 1 waits for an unroll that no actor plays"):
        executor.collect(1)


def test_items_come_in_the_order_of_the_schedule_not_of_arrival():
    versions = {(actor, 0): 0 for actor in range(3)}
    for order in (newest, oldest):
        executor = Executor(Scripted(versions, [[1, 2, 0]]), Play(order), 3)
        executor.publish(0, np.zeros(1, np.float32))
        assert [item.actor for item in executor.collect(0)] == [1, 2, 0]


def test_versions_are_kept_as_long_as_somebody_may_play_them():
    executor = Executor(Lockstep(2, 2, 2, 99), Play(oldest), 2)
    for update in range(6):
        flat = np.full(1, update, np.float32)
        executor.publish(update, flat)
        assert list(executor.versions) == list(range(max(0, update - 2), update + 1))
        assert executor.versions[update] is flat
        executor.collect(update)


def test_the_state_between_updates_is_that_of_what_was_learned():
    executor = Executor(Live(3, 2, 2), Play(newest), 3)
    assert (executor.snapshots, executor.trained) == ([None] * 3, [0] * 3)
    follow(None, 3, 1, newest, executor)
    known = {a: each.document["number"] for a, each in enumerate(executor.snapshots) if each}
    assert known == {actor: 0 for actor, count in enumerate(executor.trained) if count}
    assert sum(executor.trained) == 2
    executor.close()
    assert executor._transport.closed
