"""Statistics of groups of runs, in plain Python: the host side has no numpy.

The scores of a group are a matrix, the tasks, each with the scores of its runs. Runs of a task are
independent of one another, and every task may have a number of runs of its own. Scores are returns,
or any other unit in which more is better; the unit has to be the same for all tasks where tasks are
joined, as human-normalised scores are.
"""

from __future__ import annotations

from capsule.study.statistics.aggregates import (
    mean_of_means,
    median_of_means,
    optimality_gap,
    pooled_iqm,
)
from capsule.study.statistics.bootstrap import (
    LEVEL,
    ConfidenceInterval,
    Tasks,
    stratified_interval,
    stratified_intervals,
)
from capsule.study.statistics.comparison import (
    MAX_ARRANGEMENTS,
    MIN_SCORES,
    PERMUTATIONS,
    VarianceTest,
    equal_variance,
    holm,
    probability_of_improvement,
)
from capsule.study.statistics.f_distribution import f_tail
from capsule.study.statistics.profiles import (
    performance_profile,
    profile_band,
)

__all__ = [
    "LEVEL",
    "MAX_ARRANGEMENTS",
    "MIN_SCORES",
    "PERMUTATIONS",
    "ConfidenceInterval",
    "Tasks",
    "VarianceTest",
    "equal_variance",
    "f_tail",
    "holm",
    "mean_of_means",
    "median_of_means",
    "optimality_gap",
    "performance_profile",
    "pooled_iqm",
    "probability_of_improvement",
    "profile_band",
    "stratified_interval",
    "stratified_intervals",
]
