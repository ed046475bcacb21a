"""Where schedules come from: the rule, whoever is ready first, the log."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError
from capsule.experiment.schedule_log import parse_schedule
from capsule.training.impala.schedule.executor import Executor
from capsule.training.impala.schedule.sources import Live, Lockstep, Recorded
from tests.training.impala.schedule.conftest import Play, drawn, follow, log_of, newest, oldest

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


def test_a_log_that_ends_before_the_run_is_refused_where_it_ends():
    learned = follow(Live(3, 2, 2), 3, 4, newest)
    log = log_of(3, 2, learned)
    with pytest.raises(CapsuleError, match="ends after 4 updates") as refusal:
        follow(Recorded(log, 2), 3, 5, oldest)
    assert refusal.value.code == "CAP-T343"


def test_another_order_of_arrival_is_another_schedule():
    logs = [log_of(4, 2, follow(Live(4, 2, 3), 4, 9, order)) for order in (newest, oldest)]
    assert logs[0].digest() != logs[1].digest()
