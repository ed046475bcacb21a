"""Aggregates of scores over runs and tasks (Agarwal et al. 2021, arXiv:2108.13264, section 4.3).

Each takes scores, tasks x runs, and raises ValueError where there are none or one is not finite.
:func:`~capsule.study.statistics.bootstrap.stratified_interval` gives their intervals.
"""

from __future__ import annotations

from statistics import fmean, median

from capsule.study.statistics.bootstrap import Tasks, check_scores
from capsule.verification.equivalence.statistics import interquartile_mean


def pooled_iqm(tasks: Tasks) -> float:
    """Return the interquartile mean of all runs of all tasks together.

    A task with more runs than another has more weight.
    """
    check_scores(tasks)
    return interquartile_mean([score for task in tasks for score in task])


def mean_of_means(tasks: Tasks) -> float:
    """Return the mean over tasks of the mean over runs."""
    check_scores(tasks)
    return fmean(map(fmean, tasks))


def median_of_means(tasks: Tasks) -> float:
    """Return the median over tasks of the mean over runs: the usual aggregate of Atari."""
    check_scores(tasks)
    return median(map(fmean, tasks))


def optimality_gap(tasks: Tasks, target: float = 1.0) -> float:
    """Return by how much scores miss a target on average, higher scores counting as the target.

    The mean is over runs, then over tasks. The target has the scores' unit: the default of 1 is a
    person's score among human-normalised ones.
    """
    check_scores(tasks)
    return fmean(fmean(max(0.0, target - score) for score in task) for task in tasks)
