"""Performance profiles (Agarwal et al. 2021, arXiv:2108.13264, section 4.2).

Each function takes scores, tasks x runs, and thresholds in the scores' unit. It raises ValueError
where there are no scores, or one of them or a threshold is not finite.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from capsule.study.statistics.bootstrap import (
    IntervalRow,
    Tasks,
    check_scores,
    stratified_intervals,
)
from capsule.verification.equivalence.statistics import RESAMPLES


def performance_profile(tasks: Tasks, thresholds: Sequence[float]) -> list[float]:
    """Return the share of all runs of all tasks whose score exceeds each threshold."""
    check_scores(tasks)
    if not all(map(math.isfinite, thresholds)):
        raise ValueError("a threshold is not a finite number")
    ordered = sorted(score for task in tasks for score in task)
    number = len(ordered)
    return [(number - bisect_right(ordered, threshold)) / number for threshold in thresholds]


def profile_band(
    tasks: Tasks,
    thresholds: Sequence[float],
    seed: str,
    resamples: int = RESAMPLES,
) -> list[IntervalRow]:
    """Return a profile with the percentile interval at each threshold by stratified bootstrap.

    The intervals are pointwise: at each threshold by itself, the bootstrap's percentiles.

    Args:
        tasks: Scores, tasks x runs.
        thresholds: Where the profile is evaluated.
        seed: Text that the draws follow from.
        resamples: How often all runs are drawn anew.
    """
    return stratified_intervals(
        [tasks], lambda drawn: performance_profile(drawn, thresholds), seed, resamples
    )
