"""Aggregates, against rliable, SciPy, and by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from capsule.study.statistics.aggregates import (
    mean_of_means,
    median_of_means,
    optimality_gap,
    pooled_iqm,
)
from tests.study.statistics.record_rliable import SHAPES, TARGETS

RETURNS = st.integers(-1_000, 1_000).map(lambda value: value / 8)  # sums of them are exact
TASKS = st.lists(st.lists(RETURNS, min_size=1, max_size=6), min_size=1, max_size=5)
EVERY = [pooled_iqm, mean_of_means, median_of_means, optimality_gap]


@pytest.mark.parametrize(("tasks", "runs"), SHAPES)
def test_aggregates_are_those_of_rliable(scores, rliable, tasks, runs):
    matrix = scores(tasks * runs, tasks, runs)
    wanted = rliable["aggregates"][f"{tasks}x{runs}"]
    assert pooled_iqm(matrix) == pytest.approx(wanted["iqm"], rel=1e-12)
    assert mean_of_means(matrix) == pytest.approx(wanted["mean"], rel=1e-12)
    assert median_of_means(matrix) == pytest.approx(wanted["median"], rel=1e-12)
    for target in TARGETS:
        gap = wanted[f"optimality gap to {target}"]
        assert optimality_gap(matrix, target) == pytest.approx(gap, rel=1e-12)


@given(TASKS)
def test_an_iqm_is_the_trimmed_mean_of_all_runs(tasks):
    flat = [score for task in tasks for score in task]
    assert pooled_iqm(tasks) == pytest.approx(stats.trim_mean(flat, 0.25))


def test_an_iqm_without_a_cut_through_a_score_is_the_mean_between_the_quartiles(scores):
    (task,) = tasks = scores(1, 1, 8)
    low, high = np.quantile(task, [0.25, 0.75], method="hazen")
    assert high - low == pytest.approx(stats.iqr(task, interpolation="hazen"))
    between = [score for score in task if low <= score <= high]
    assert pooled_iqm(tasks) == pytest.approx(np.mean(between))


def test_aggregates_by_hand():
    tasks = [[0.0, 4.0], [1.0], [-1.0, 2.0, 8.0]]  # means 2, 1 and 3
    assert mean_of_means(tasks) == median_of_means(tasks) == 2
    assert pooled_iqm(tasks) == (0 + 1 + 2 + 4) / 4
    assert optimality_gap(tasks) == pytest.approx((1 / 2 + 0 + 2 / 3) / 3)


@pytest.mark.slow
@given(TASKS, st.randoms())
def test_order_does_not_matter(tasks, random):
    shuffled = [random.sample(task, len(task)) for task in random.sample(tasks, len(tasks))]
    for aggregate in EVERY:
        assert aggregate(shuffled) == aggregate(tasks)


@given(TASKS, RETURNS, st.sampled_from([0.5, 1.0, 3.0]))
def test_aggregates_move_with_the_scores(tasks, shift, scale):
    moved = [[score * scale + shift for score in task] for task in tasks]
    for aggregate in EVERY[:3]:
        assert aggregate(moved) == pytest.approx(aggregate(tasks) * scale + shift)
    gap = optimality_gap(moved, scale + shift)
    assert gap == pytest.approx(optimality_gap(tasks) * scale)
    assert gap >= 0


@pytest.mark.parametrize("aggregate", EVERY)
@pytest.mark.parametrize("tasks", [[], [[1.0], []], [[1.0, math.nan]], [[-math.inf]]])
def test_what_has_no_aggregate_is_rejected(aggregate, tasks):
    with pytest.raises(ValueError):
        aggregate(tasks)
