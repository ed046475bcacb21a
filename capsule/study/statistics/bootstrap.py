"""Percentile intervals by stratified bootstrap.

The strata are the tasks: runs are drawn anew, with replacement, within each task (Agarwal et al.
2021, arXiv:2108.13264, section 4.1). The draws follow from a text, so that an interval is the same
on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from capsule.experiment.fields import Model
from capsule.verification.equivalence.statistics import RESAMPLES, bootstrap, draws, quantile

LEVEL = 0.95  # of the intervals

Tasks = Sequence[Sequence[float]]  # tasks x runs


class IntervalRow(Model):
    """An estimate with its 95 % percentile interval by stratified bootstrap."""

    estimate: float
    low: float
    high: float


def check_scores(tasks: Tasks) -> None:
    """Check that there are tasks, every task has runs, and every score is a finite number.

    Raises:
        ValueError: It is not so.
    """
    if not tasks:
        raise ValueError("there are no tasks")
    if not all(tasks):
        raise ValueError("a task has no scores")
    if not all(math.isfinite(score) for task in tasks for score in task):
        raise ValueError("a score is not a finite number")


def stratified_interval(
    samples: Sequence[Tasks],
    statistic: Callable[..., float],
    seed: str,
    resamples: int = RESAMPLES,
) -> IntervalRow:
    """Return a statistic of one or several samples with its percentile interval.

    Args:
        samples: For each sample, the scores: tasks x runs.
        statistic: Takes as many samples of these shapes as arguments.
        seed: Text that the draws follow from.
        resamples: How often all runs are drawn anew.

    Raises:
        ValueError: A sample has no tasks, a task has no scores, or a score is not finite.
    """
    (interval,) = stratified_intervals(samples, lambda *drawn: [statistic(*drawn)], seed, resamples)
    return interval


def stratified_intervals(
    samples: Sequence[Tasks],
    statistics: Callable[..., Sequence[float]],
    seed: str,
    resamples: int = RESAMPLES,
) -> list[IntervalRow]:
    """Return several statistics of the same draws, each with its own (pointwise) interval.

    Arguments and errors are those of :func:`stratified_interval`.
    """
    for tasks in samples:
        check_scores(tasks)
    strata = [task for tasks in samples for task in tasks]
    # Each task of each sample has draws of its own. With equal ones, samples of equal sizes would
    # be drawn in step, as if their runs were pairs.
    places = [
        draws(f"{seed}/{place}/{number}", len(task))
        for place, tasks in enumerate(samples)
        for number, task in enumerate(tasks)
    ]

    # bootstrap() draws from a flat list of strata, and the statistic takes samples.
    def of_samples(drawn: Iterable[Sequence[float]]) -> Sequence[float]:
        following = iter(drawn)
        return statistics(*([*islice(following, len(tasks))] for tasks in samples))

    found = bootstrap(strata, of_samples, places, resamples)
    margin = (1 - LEVEL) / 2
    return [
        IntervalRow(
            estimate=estimate, low=quantile(column, margin), high=quantile(column, 1 - margin)
        )
        for estimate, column in zip(statistics(*samples), found, strict=True)
    ]
