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


def test_a_restored_executor_plays_again_what_was_not_trained_on():
    first = Executor(Lockstep(4, 2, 1, 99), Play(newest), 4)
    follow(None, 4, 3, newest, first)  # 6 unrolls are trained on, and two more are under way
    transport = Play(oldest)
    second = Executor(Lockstep(4, 2, 1, 99), transport, 4)
    second.restore(first.snapshots, first.trained, first.versions)
    assert {a: each.document["number"] for a, each in transport.snapshots.items()} == {
        0: 1, 1: 1, 2: 0, 3: 0,
    }  # fmt: skip
    second.publish(3, np.full(1, 3, np.float32))
    # With lag 1, update 3 learns from version 2, and update 4 from version 3.
    assert transport.outstanding == [(0, 2, 3), (1, 2, 3), (2, 1, 2), (3, 1, 2)]
    items = second.collect(3)
    assert [(item.actor, item.number, item.version) for item in items] == [(2, 1, 2), (3, 1, 2)]
    assert second.trained == [2, 2, 2, 2]


def test_before_the_first_unroll_there_is_nothing_to_restore():
    first = Executor(Lockstep(2, 2, 0, 99), Play(oldest), 2)
    transport = Play(oldest)
    second = Executor(Lockstep(2, 2, 0, 99), transport, 2)
    second.restore(first.snapshots, first.trained, first.versions)
    assert (transport.snapshots, transport.outstanding, second.versions) == ({}, [], {})


def test_a_restored_executor_shares_no_state_with_what_it_was_given():
    trained, snapshots, versions = [0, 0], [None, None], {}
    executor = Executor(Lockstep(2, 2, 0, 99), Play(oldest), 2)
    executor.restore(snapshots, trained, versions)
    follow(None, 2, 1, oldest, executor)
    assert (trained, snapshots, versions) == ([0, 0], [None, None], {})
    assert executor.trained == [1, 1]


def test_a_mapping_of_versions_that_a_transport_has_is_not_changed_afterwards():
    """A thread of a transport may still read it."""
    given = []

    class Kept(Play):
        def publish(self, versions):
            super().publish(versions)
            given.append((versions, list(versions)))

    executor = Executor(Lockstep(2, 2, 1, 99), Kept(oldest), 2)
    follow(None, 2, 5, oldest, executor)
    assert [list(versions) for versions, _ in given] == [numbers for _, numbers in given]
    assert [numbers for _, numbers in given] == [[0], [0, 1], [1, 2], [2, 3], [3, 4]]


@pytest.mark.parametrize(
    ("schedule", "kind", "lag"), [(Lockstep(2, 2, 3, 9), "lockstep", 3), (Live(2, 2, 1), "live", 1)]
)
def test_an_executor_says_what_it_follows_and_who_answers(schedule, kind, lag):
    transport = Play(oldest)
    transport.replicas = 7
    executor = Executor(schedule, transport, 2)
    assert (executor.schedule, executor.lag, executor.replicas) == (kind, lag, 7)
