"""Statistics of groups, against rliable and SciPy, and by hand."""

import itertools
import math
from statistics import fmean

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from rliable import metrics

from capsule.study import statistics
from capsule.study.statistics import (
    equal_variance,
    f_tail,
    holm,
    median_of_means,
    performance_profile,
    pooled_iqm,
    probability_of_improvement,
    stratified_interval,
)

SCORES = st.floats(-1e6, 1e6).map(lambda value: round(value, 3))
GROUP = st.lists(SCORES, min_size=2, max_size=5)


def matrix(seed, tasks, runs):
    source = np.random.default_rng(seed)
    return [source.normal(10 * task, 3, runs).tolist() for task in range(tasks)]


@pytest.mark.parametrize(("tasks", "runs"), [(1, 5), (1, 8), (3, 5), (26, 10)])
def test_aggregates_are_those_of_rliable(tasks, runs):
    scores = matrix(tasks * runs, tasks, runs)
    columns = np.array(scores).T  # rliable has runs x tasks
    assert pooled_iqm([scores]) == pytest.approx(metrics.aggregate_iqm(columns), rel=1e-12)
    assert median_of_means([scores]) == pytest.approx(metrics.aggregate_median(columns), rel=1e-12)


@pytest.mark.parametrize(("tasks", "runs"), [(1, 5), (4, 6)])
def test_the_probability_of_improvement_is_that_of_rliable(tasks, runs):
    first, second = matrix(1, tasks, runs), matrix(2, tasks, runs + 1)
    first[0][0] = second[0][0]  # a tie
    wanted = metrics.probability_of_improvement(np.array(first).T, np.array(second).T)
    assert probability_of_improvement([first, second]) == pytest.approx(wanted, rel=1e-12)


def test_the_interval_is_close_to_the_percentile_bootstrap_of_scipy():
    scores = matrix(3, 1, 12)
    found = stratified_interval([scores], pooled_iqm, "seed", resamples=4_000)
    wanted = scipy.stats.bootstrap(
        (scores[0],),
        lambda sample, axis: scipy.stats.trim_mean(sample, 0.25, axis=axis),
        method="percentile",
        n_resamples=4_000,
        rng=np.random.default_rng(1),
    ).confidence_interval
    assert found.estimate == pytest.approx(scipy.stats.trim_mean(scores[0], 0.25))
    spread = max(scores[0]) - min(scores[0])
    assert found.low == pytest.approx(wanted.low, abs=0.02 * spread)
    assert found.high == pytest.approx(wanted.high, abs=0.02 * spread)


def test_runs_are_drawn_within_their_task():
    one = stratified_interval([[[1.0, 1.0], [5.0, 5.0]]], median_of_means, "seed")
    assert one == (3.0, 3.0, 3.0)


def test_an_interval_follows_from_its_seed():
    scores = matrix(4, 2, 5)
    first = stratified_interval([scores], pooled_iqm, "a", resamples=200)
    assert first == stratified_interval([scores], pooled_iqm, "a", resamples=200)
    assert first != stratified_interval([scores], pooled_iqm, "b", resamples=200)


def test_a_profile_has_the_share_of_runs_above_each_threshold():
    assert performance_profile([[1, 2, 3], [2, 2, 5]], [0, 1, 2, 4, 5]) == [
        1.0,
        5 / 6,
        2 / 6,
        1 / 6,
        0.0,
    ]


@given(st.lists(GROUP, min_size=2, max_size=4))
def test_the_statistic_is_brown_and_forsythes(groups):
    deviations = [[abs(value - np.median(group)) for value in group] for group in groups]
    ratio = statistics._f_ratio(deviations)
    if ratio is not None and math.isfinite(ratio):
        wanted = scipy.stats.levene(*groups, center="median")
        assert ratio == pytest.approx(float(wanted.statistic), rel=1e-6, abs=1e-9)
        free = len(groups) - 1, sum(map(len, groups)) - len(groups)
        assert f_tail(ratio, *free) == pytest.approx(float(wanted.pvalue), abs=1e-7)


@pytest.mark.parametrize("free", [(1, 1), (1, 8), (2, 3), (5, 24), (1, 300)])
@pytest.mark.parametrize("value", [1e-6, 0.3, 1.0, 5.0, 40.0, 1e4])
def test_the_tail_of_the_f_distribution(value, free):
    assert f_tail(value, *free) == pytest.approx(scipy.stats.f.sf(value, *free), abs=1e-11)


def test_a_permutation_test_counts_every_arrangement():
    groups = [[1.0, 4.0, 9.0, 2.0], [5.0, 5.5, 6.5, 5.2]]
    deviations = [[abs(value - np.median(group)) for value in group] for group in groups]
    wanted = scipy.stats.permutation_test(
        deviations,
        lambda *samples: scipy.stats.f_oneway(*samples).statistic,
        alternative="greater",
        n_resamples=np.inf,
    )
    found = equal_variance(groups, "seed")
    assert found.exact
    assert found.statistic == pytest.approx(wanted.statistic)
    assert found.permutation_p_value == pytest.approx(wanted.pvalue)
    assert found.permutation_p_value * math.comb(8, 4) == pytest.approx(
        round(found.permutation_p_value * math.comb(8, 4))
    )


def test_with_many_scores_arrangements_are_drawn():
    source = np.random.default_rng(5)
    groups = [source.normal(0, width, 12).tolist() for width in (1, 1, 6)]
    found = equal_variance(groups, "seed")
    assert not found.exact
    assert found == equal_variance(groups, "seed")
    assert found.permutation_p_value == pytest.approx(found.p_value, abs=0.01)
    assert found.permutation_p_value >= 1 / (statistics.PERMUTATIONS + 1)


def test_a_deterministic_group_has_another_variance_than_one_that_spreads():
    found = equal_variance([[7.0] * 5, [1.0, 4.0, 7.0, 11.0, 20.0]], "seed")
    assert found.exact
    assert found.permutation_p_value < 0.1


def test_groups_without_any_spread_are_alike():
    found = equal_variance([[1.0, 1.0], [2.0, 2.0]], "seed")
    assert found == (None, 1.0, 1.0, True)


def test_groups_whose_deviations_only_differ_between_them():
    found = equal_variance([[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 6.0, 6.0]], "seed")
    assert found.statistic == math.inf
    assert found.p_value == 0.0
    assert found.permutation_p_value == pytest.approx(2 / math.comb(8, 4))


@given(st.lists(GROUP, min_size=2, max_size=3), st.integers(-100, 100))
def test_a_shift_and_the_order_do_not_matter(groups, shift):
    def outcome(values):
        return statistics._f_ratio(
            [[abs(value - float(np.median(group))) for value in group] for group in values]
        )

    moved = [[value + shift for value in reversed(group)] for group in groups]
    first, second = outcome(groups), outcome(moved)
    if first is None or not math.isfinite(first) or second is None:
        return
    assert second == pytest.approx(first, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "groups", [[[1.0, 2.0]], [[1.0], [1.0, 2.0]], [[1.0, math.nan], [1.0, 2.0]], [[], [1.0, 2.0]]]
)
def test_what_has_no_spread_to_test_is_refused(groups):
    with pytest.raises(ValueError):
        equal_variance(groups, "seed")


@pytest.mark.parametrize("tasks", [[], [[]], [[math.inf]]])
def test_scores_that_cannot_be_summarised_are_refused(tasks):
    with pytest.raises(ValueError):
        stratified_interval([tasks], pooled_iqm, "seed")


def test_arrangements_are_all_different_and_complete():
    found = [
        tuple(map(tuple, arrangement))
        for arrangement in statistics._arrangements([1, 2, 3, 4, 5], [2, 2, 1])
    ]
    assert len(found) == len({*found}) == 30
    assert all(sorted(itertools.chain(*parts)) == [1, 2, 3, 4, 5] for parts in found)


def test_holms_correction_by_hand():
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert found == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert fmean(holm({"one": 0.7}).values()) == 0.7
