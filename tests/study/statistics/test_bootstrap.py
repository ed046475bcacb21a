"""Intervals, against the binomial law, rliable, SciPy, and the share of them that is right."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from capsule.study.statistics.aggregates import mean_of_means, median_of_means, pooled_iqm
from capsule.study.statistics.bootstrap import (
    LEVEL,
    IntervalRow,
    check_scores,
    stratified_interval,
    stratified_intervals,
)
from capsule.study.statistics.comparison import probability_of_improvement
from tests.study.statistics.record_rliable import RESAMPLES, RESAMPLES_OF_TWO

RETURNS = st.integers(-50, 50).map(float)
TASKS = st.lists(st.lists(RETURNS, min_size=1, max_size=5), min_size=1, max_size=4)


@pytest.mark.parametrize("successes", [3, 10, 17])
def test_the_interval_of_a_share_is_that_of_the_binomial_law(successes):
    # The mean of 20 draws of zeros and ones has the law of a binomial number over 20. A quantile of
    # 5,000 resamples is next to the law's, in steps of 1/20, where the law jumps over the level.
    runs = 20
    found = stratified_interval(
        [[[1.0] * successes + [0.0] * (runs - successes)]], mean_of_means, "seed", 5_000
    )
    law = stats.binom(runs, successes / runs)
    for value, share in ((found.low, 0.025), (found.high, 0.975)):
        margin = 4 * math.sqrt(share * (1 - share) / 5_000)
        low, high = law.ppf([share - margin, share + margin]) / runs
        assert low - 1e-12 <= value <= high + 1e-12
    assert found.estimate == successes / runs


def test_runs_are_drawn_within_their_task():
    found = stratified_interval([[[1.0, 1.0], [5.0, 5.0]]], median_of_means, "seed")
    assert found == IntervalRow(estimate=3, low=3, high=3)


@pytest.mark.parametrize(
    ("name", "aggregate"),
    [("iqm", pooled_iqm), ("mean", mean_of_means), ("median", median_of_means)],
)
def test_intervals_are_those_of_rliable(rliable, scores, name, aggregate):
    found = stratified_interval([scores(1, 4, 8)], aggregate, "seed", RESAMPLES)
    # The 2.5 % quantile of 4,000 draws of a normal law has a standard error of 0.042 standard
    # deviations, and the interval is 3.92 of them wide: 6 % of it are four errors of a difference.
    tolerance = 0.06 * (found.high - found.low)
    assert (found.low, found.high) == pytest.approx(rliable["intervals"][name], abs=tolerance)


def test_the_interval_of_an_improvement_is_that_of_rliable(rliable, scores):
    first, second = scores(2, 3, 7), scores(3, 3, 9)
    found = stratified_interval(
        [first, second], probability_of_improvement, "seed", RESAMPLES_OF_TWO
    )
    tolerance = 0.12 * (found.high - found.low)  # as above, of 1,000 draws
    assert (found.low, found.high) == pytest.approx(
        rliable["intervals"]["improvement"], abs=tolerance
    )


def test_the_interval_of_one_task_is_that_of_scipy(scores):
    (task,) = tasks = scores(3, 1, 12)
    found = stratified_interval([tasks], pooled_iqm, "seed", 4_000)
    wanted = stats.bootstrap(
        (task,),
        lambda sample, axis: stats.trim_mean(sample, 0.25, axis=axis),
        method="percentile",
        n_resamples=4_000,
        rng=np.random.default_rng(1),
    ).confidence_interval
    tolerance = 0.06 * (found.high - found.low)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), abs=tolerance)


@pytest.mark.slow
def test_most_intervals_contain_the_true_mean():
    # 200 intervals of a level of 95 % that are right independently: 180 are five standard errors
    # below 190, and percentile intervals of 20 runs are a little narrow.
    generator = np.random.default_rng(5)
    right = 0
    for number in range(200):
        tasks = generator.normal([[3.0], [8.0]], [[1.0], [4.0]], size=(2, 10)).tolist()
        found = stratified_interval([tasks], mean_of_means, str(number), 200)
        right += found.low <= 5.5 <= found.high
    assert 170 <= right <= 200 * (LEVEL + 0.04)


@settings(max_examples=50)
@given(TASKS)
def test_an_interval_is_within_what_the_scores_allow(tasks):
    found = stratified_interval([tasks], mean_of_means, "seed", 40)
    low, high = (math.fsum(extreme(task) for task in tasks) / len(tasks) for extreme in (min, max))
    assert low - 1e-9 <= found.low <= found.high <= high + 1e-9
    assert low - 1e-9 <= found.estimate <= high + 1e-9


@settings(max_examples=30)
@given(TASKS, st.integers(-9, 9), st.sampled_from([0.5, 2.0, 4.0]))
def test_an_interval_moves_with_the_scores(tasks, shift, scale):
    found = stratified_interval([tasks], pooled_iqm, "seed", 30)
    moved = [[score * scale + shift for score in task] for task in tasks]
    again = stratified_interval([moved], pooled_iqm, "seed", 30)
    assert vars(again) == pytest.approx(
        {name: value * scale + shift for name, value in vars(found).items()}
    )


def test_an_interval_follows_from_its_seed(scores):
    tasks = scores(4, 2, 5)
    first = stratified_interval([tasks], pooled_iqm, "a", 200)
    assert first == stratified_interval([tasks], pooled_iqm, "a", 200)
    assert first != stratified_interval([tasks], pooled_iqm, "b", 200)
    assert first.estimate == stratified_interval([tasks], pooled_iqm, "b", 200).estimate


def test_an_interval_is_the_same_on_every_machine():
    tasks = [[0.1, 0.7, 2.3, -1.9, 3.1], [10.2, 11.4, 8.9, 10.7]]
    found = stratified_interval([tasks], mean_of_means, "seed", 500)
    assert found == IntervalRow(estimate=5.58, low=4.7375, high=6.475375)


def test_two_samples_have_draws_of_their_own(scores):
    tasks = scores(5, 1, 6)
    found = stratified_interval(
        [tasks, tasks], lambda x, y: mean_of_means(x) - mean_of_means(y), "seed", 100
    )
    assert found.low < found.estimate == 0 < found.high


def test_several_statistics_have_the_same_draws(scores):
    tasks = scores(6, 2, 5)
    found = stratified_intervals(
        [tasks], lambda drawn: [pooled_iqm(drawn), mean_of_means(drawn)], "seed", 100
    )
    assert found == [
        stratified_interval([tasks], statistic, "seed", 100)
        for statistic in (pooled_iqm, mean_of_means)
    ]


@pytest.mark.parametrize("tasks", [[], [[]], [[1.0], []], [[math.inf]], [[1.0], [math.nan]]])
def test_what_is_no_matrix_of_scores_is_rejected(tasks):
    with pytest.raises(ValueError):
        check_scores(tasks)
    with pytest.raises(ValueError):
        stratified_interval([[[1.0]], tasks], lambda _, y: mean_of_means(y), "seed", 10)
