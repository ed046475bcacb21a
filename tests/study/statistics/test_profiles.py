"""Performance profiles, against rliable and by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.study.statistics.bootstrap import stratified_interval
from capsule.study.statistics.profiles import performance_profile, profile_band
from tests.study.statistics.record_rliable import THRESHOLDS

RETURNS = st.integers(-9, 9).map(float)
TASKS = st.lists(st.lists(RETURNS, min_size=1, max_size=5), min_size=1, max_size=4)


def test_profiles_by_hand():
    tasks = [[1, 2, 3], [2, 2, 5]]
    assert performance_profile(tasks, [0, 1, 2, 4, 5]) == [1, 5 / 6, 2 / 6, 1 / 6, 0]


def test_a_profile_and_its_band_are_those_of_rliable(rliable, scores):
    tasks, wanted = scores(1, 5, 8), rliable["profile"]
    assert performance_profile(tasks, THRESHOLDS) == pytest.approx(wanted["shares"])
    found = profile_band(tasks, THRESHOLDS, "seed")
    assert [interval.estimate for interval in found] == performance_profile(tasks, THRESHOLDS)
    # Percentiles of a share go in steps of a run.
    for bound, low_or_high in zip(("low", "high"), wanted["bands"], strict=True):
        ours = [getattr(interval, bound) for interval in found]
        assert ours == pytest.approx(low_or_high, abs=1 / 40 + 1e-9)


def test_a_band_has_the_interval_of_each_threshold(scores):
    tasks = scores(2, 2, 5)
    found = profile_band(tasks, THRESHOLDS, "seed", resamples=200)
    for interval, threshold in zip(found, THRESHOLDS, strict=True):
        assert interval == stratified_interval(
            [tasks],
            lambda drawn, above=threshold: performance_profile(drawn, [above])[0],
            "seed",
            200,
        )


@given(TASKS)
def test_a_profile_descends_from_one_to_zero(tasks):
    shares = performance_profile(tasks, list(range(-10, 11)))
    assert shares[0] == 1
    assert shares[-1] == 0
    assert shares == sorted(shares, reverse=True)


@pytest.mark.slow
@given(TASKS, st.randoms(), st.integers(-5, 5))
def test_order_and_shifts_do_not_matter(tasks, random, shift):
    shuffled = [random.sample(task, len(task)) for task in random.sample(tasks, len(tasks))]
    moved = [[score + shift for score in task] for task in shuffled]
    thresholds = [threshold + shift for threshold in THRESHOLDS]
    assert performance_profile(moved, thresholds) == performance_profile(tasks, THRESHOLDS)


@pytest.mark.parametrize(
    ("tasks", "thresholds"),
    [([], [1.0]), ([[]], [1.0]), ([[math.nan]], [1.0]), ([[1]], [math.nan])],
)
def test_what_has_no_profile_is_rejected(tasks, thresholds):
    with pytest.raises(ValueError):
        performance_profile(tasks, thresholds)
    with pytest.raises(ValueError):
        profile_band(tasks, thresholds, "seed", resamples=5)
