"""Schedules: the rule, the log, who is ready first; the executor; recording."""

import random
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError
from capsule.experiment.schedule_log import ScheduleLog, parse_schedule
from capsule.training.acting.actor_worker import Played, Snapshot
from capsule.training.impala.schedule.executor import Executor
from capsule.training.impala.schedule.recorder import ScheduleRecorder
from capsule.training.impala.schedule.sources import Live, Lockstep, Recorded

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
        return [Played(each[0], each, after(each)) for each in done]

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


# --- lockstep -------------------------------------------------------------------------------------

SIZES = st.integers(1, 12).flatmap(
    lambda batch: st.tuples(st.integers(batch, batch + 14), st.just(batch), st.integers(0, 5))
)


@settings(deadline=None)
@given(SIZES, st.data())
def test_lockstep_is_its_formula_whatever_is_ready_when(sizes, data):
    actors, batch, lag = sizes
    learned = follow(Lockstep(actors, batch, lag, 15), actors, 15, drawn(data))
    numbers = dict.fromkeys(range(actors), 0)
    for update, items in enumerate(learned):
        for slot, item in enumerate(items):
            actor = (update * batch + slot) % actors
            expected = (actor, numbers[actor], max(0, update - lag))
            assert (item.actor, item.number, item.version) == expected
            numbers[actor] += 1


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


# --- live -----------------------------------------------------------------------------------------

BOUNDED = st.tuples(st.integers(1, 7), st.integers(1, 6), st.floats(0, 1)).map(
    lambda drawn: (max(1, round(drawn[0] * (1 + drawn[2] * (drawn[1] - 1)))), *drawn[:2])
)


@settings(deadline=None, max_examples=100)
@given(BOUNDED, st.data())
def test_a_live_schedule_keeps_its_lag_and_replays_to_the_same_slots(sizes, data):
    actors, batch, lag = sizes
    learned = follow(Live(actors, batch, lag), actors, 20, drawn(data))
    assert all(len({item.actor for item in items}) == batch for items in learned)
    log = parse_schedule(log_of(actors, batch, learned).document())
    assert max(log.lags) <= lag
    again = follow(Recorded(log, lag), actors, 20, drawn(data))
    assert again == learned


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(BOUNDED, st.data())
def test_a_live_schedule_goes_on_after_a_resumption_and_replays(sizes, data):
    """What is played again after it is of the newest version."""
    actors, batch, lag = sizes
    source, order = Live(actors, batch, lag), drawn(data)
    moment = data.draw(st.integers(1, 9))
    first = Executor(source, Play(order), actors)
    learned = follow(None, actors, moment, order, first)
    second = Executor(source, Play(order), actors)
    kept = {version: flat for version, flat in first.versions.items() if version < moment}
    second.restore(first.snapshots, first.trained, kept)
    learned += follow(None, actors, 20, order, second, first=moment)
    log = log_of(actors, batch, learned)
    assert max(log.lags) <= lag
    assert follow(Recorded(log, lag), actors, 20, drawn(data)) == learned
    third = Executor(Recorded(log, lag), Play(order), actors)
    follow(None, actors, moment, order, third)
    fourth = Executor(Recorded(log, lag), Play(order), actors)
    fourth.restore(third.snapshots, third.trained, third.versions)
    assert follow(None, actors, 20, order, fourth, first=moment) == learned[moment:]


def test_who_is_ready_first_is_learned_first():
    live = Live(6, 2, 3)
    assert live.choose(0, dict.fromkeys(range(6), 0), [4]) is None
    assert live.choose(0, dict.fromkeys(range(6), 0), [4, 1, 0]) == [4, 1]
    assert live.choose(2, {0: 0, 1: 0, 2: 0, 3: 2, 4: 2, 5: 2}, [3, 2, 5, 0]) == [3, 2]


def test_who_would_be_late_is_waited_for():
    """At update 3 the two of version 0 have a lag of 3, the most there may be."""
    live = Live(6, 2, 3)
    outstanding = {0: 0, 1: 0, 2: 2, 3: 2, 4: 2, 5: 2}
    assert live.choose(3, outstanding, [3, 2, 5]) is None
    assert live.choose(3, outstanding, [3, 2, 5, 1]) is None
    assert live.choose(3, outstanding, [3, 1, 5, 0]) == [1, 0]


def test_who_would_be_late_together_are_waited_for_in_time():
    """Five of version 0 need two updates of three, so the first of them can take one other."""
    live = Live(9, 3, 3)
    outstanding = {0: 0, 1: 0, 2: 0, 3: 0, 4: 0, 5: 1, 6: 1, 7: 1, 8: 1}
    assert live.choose(2, outstanding, [5, 6, 7, 0]) is None
    assert live.choose(2, outstanding, [5, 6, 0, 1]) == [5, 0, 1]
    assert live.choose(3, outstanding | {5: 2}, [6, 0, 1]) is None


def test_a_lag_that_cannot_be_kept_is_refused():
    Live(12, 4, 3)
    with pytest.raises(ValueError, match=r"13 actors > 4 unrolls an update \* lag 3"):
        Live(13, 4, 3)


@settings(deadline=None)
@given(st.data())
def test_the_order_of_arrival_is_kept_where_nobody_would_be_late(data):
    """With a lag that nobody comes near, unrolls are learned exactly as they arrive."""
    arrivals = []

    class Noted(Play):
        def finished(self):
            done = super().finished()
            arrivals.extend(played.actor for played in done)
            return done

    order = drawn(data)
    executor = Executor(Live(5, 2, 1_000), Noted(order), 5)
    learned = follow(None, 5, 20, order, executor)
    assert [item.actor for items in learned for item in items] == arrivals[:40]


# --- recorded -------------------------------------------------------------------------------------


def test_a_log_that_ends_before_the_run_is_refused_where_it_ends():
    learned = follow(Live(3, 2, 2), 3, 4, newest)
    log = log_of(3, 2, learned)
    with pytest.raises(CapsuleError, match="ends after 4 updates") as refusal:
        follow(Recorded(log, 2), 3, 5, oldest)
    assert refusal.value.code == "CAP-T343"


def test_another_order_of_arrival_is_another_schedule():
    logs = [log_of(4, 2, follow(Live(4, 2, 3), 4, 9, order)) for order in (newest, oldest)]
    assert logs[0].digest() != logs[1].digest()


# --- the executor ---------------------------------------------------------------------------------


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


# --- the recorder ---------------------------------------------------------------------------------


def slots(*pairs):
    return np.array(pairs, np.int64)


@pytest.fixture
def recorder(tmp_path):
    """A function that opens the recorder of one file."""
    opened = []

    def open_it():
        opened.append(ScheduleRecorder(tmp_path / "schedule", SPEC, 300, 2))
        return opened[-1]

    yield open_it
    for each in opened:
        each.close()


def test_a_recording_is_the_log_of_what_was_learned(recorder):
    first = recorder()
    assert first.log().updates == 0
    for update in range(300):
        first.append(update, slots((299, update), (update % 299, max(0, update - 256))))
    log = parse_schedule(first.log().document())
    assert (log.spec, log.actors, log.batch, log.updates) == (SPEC, 300, 2, 300)
    for update in range(300):
        assert list(log.slots(update)) == [(299, update), (update % 299, max(0, update - 256))]


def test_a_recording_begins_anew_or_where_it_is_cut(recorder):
    first = recorder()
    for update in range(5):
        first.append(update, slots((update, 0), (9, 0)))
    first.flush()
    second = recorder()
    second.cut(3)
    second.append(3, slots((7, 3), (8, 3)))
    assert second.log().played.tolist() == [0, 9, 1, 9, 2, 9, 7, 8]
    assert second.log().lags.tolist() == [0, 0, 1, 1, 2, 2, 0, 0]
    second.flush()
    third = recorder()
    third.append(0, slots((1, 0), (2, 0)))
    assert third.log().played.tolist() == [1, 2]


def test_a_recording_that_is_not_all_there_is_refused(recorder):
    first = recorder()
    first.append(0, slots((1, 0), (2, 0)))
    first.flush()
    with pytest.raises(CapsuleError, match="has 8 bytes, but the saved state needs 16") as refusal:
        recorder().cut(2)
    assert refusal.value.code == "CAP-T342"
