"""Statistics of groups of runs, in plain Python: the host side has no numpy.

Scores are a matrix: the tasks, each with the scores of its runs. Runs of a task are independent, so
the bootstrap draws them anew within each task (Agarwal et al. 2021, arXiv:2108.13264, section 4.1:
stratified bootstrap). The tests of equal variance answer the question of Nagarajan et al. 2019
(arXiv:1809.05676): does one source of randomness spread the scores more than another?
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from statistics import fmean, median
from typing import NamedTuple

from capsule.verification.equivalence.statistics import (
    RESAMPLES,
    cliffs_delta,
    draws,
    interquartile_mean,
    quantile,
)

LEVEL = 0.95  # of the intervals
MAX_ARRANGEMENTS = 20_000  # up to which a permutation test takes all of them
PERMUTATIONS = 20_000  # that it draws otherwise
_CLOSE = 1e-12  # relative: sums of equal values in another order
_CONVERGED = 1e-15  # relative change of a continued fraction

Tasks = Sequence[Sequence[float]]  # tasks x runs


class Interval(NamedTuple):
    """An estimate with the percentile interval of its bootstrap, at level :data:`LEVEL`."""

    estimate: float
    low: float
    high: float


class VarianceTest(NamedTuple):
    """Outcome of a test of equal variance.

    Attributes:
        statistic: Brown and Forsythe's F; infinite if only the groups' means of the deviations
            differ, and None if no deviation differs from another.
        p_value: Of the F distribution; 1 without a statistic.
        permutation_p_value: Share of the arrangements of the deviations whose F is as large.
        exact: Whether every arrangement was counted.
    """

    statistic: float | None
    p_value: float
    permutation_p_value: float
    exact: bool


def check_scores(tasks: Tasks) -> None:
    """Check that every task has runs, and every score is a finite number.

    Raises:
        ValueError: It is not so.
    """
    if not tasks or not all(tasks):
        raise ValueError("a task has no scores")
    if not all(math.isfinite(score) for task in tasks for score in task):
        raise ValueError("a score is not a finite number")


# --- aggregates and their intervals ---------------------------------------------------------------


def stratified_interval(
    samples: Sequence[Tasks],
    statistic: Callable[[Sequence[Tasks]], float],
    seed: str,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return a statistic of one or several samples with its percentile bootstrap interval.

    Args:
        samples: For each sample, the scores: tasks x runs.
        statistic: Of samples of these shapes.
        seed: Text that the draws follow from, so that the interval is the same on every machine.
        resamples: How often runs are drawn anew, with replacement, within each task.

    Raises:
        ValueError: A task has no scores, or a score is not finite.
    """
    for tasks in samples:
        check_scores(tasks)
    generators = [
        [draws(f"{seed}/{place}/{number}", len(task)) for number, task in enumerate(tasks)]
        for place, tasks in enumerate(samples)
    ]
    found = sorted(
        statistic(
            [
                [
                    [task[index] for index in islice(generator, len(task))]
                    for task, generator in zip(tasks, sources, strict=True)
                ]
                for tasks, sources in zip(samples, generators, strict=True)
            ]
        )
        for _ in range(resamples)
    )
    margin = (1 - LEVEL) / 2
    return Interval(statistic(samples), quantile(found, margin), quantile(found, 1 - margin))


def pooled_iqm(samples: Sequence[Tasks]) -> float:
    """Return the interquartile mean of all runs of all tasks together (Agarwal et al. 2021)."""
    (tasks,) = samples
    return interquartile_mean([score for task in tasks for score in task])


def median_of_means(samples: Sequence[Tasks]) -> float:
    """Return the median over tasks of the mean over runs: the usual aggregate of Atari."""
    (tasks,) = samples
    return median(fmean(task) for task in tasks)


def probability_of_improvement(samples: Sequence[Tasks]) -> float:
    """Return P(X > Y) for a run of the first sample and one of the second, averaged over tasks.

    Ties count one half (Agarwal et al. 2021, section 4.3; Mann and Whitney's U over its maximum).

    Raises:
        ValueError: The samples have different numbers of tasks.
    """
    first, second = samples
    return fmean((cliffs_delta(y, x) + 1) / 2 for x, y in zip(first, second, strict=True))


def performance_profile(tasks: Tasks, thresholds: Sequence[float]) -> list[float]:
    """Return the share of all runs whose score exceeds each threshold (ibid., section 4.2)."""
    check_scores(tasks)
    scores = [score for task in tasks for score in task]
    return [sum(score > threshold for score in scores) / len(scores) for threshold in thresholds]


# --- tests of equal variance ----------------------------------------------------------------------


def equal_variance(groups: Sequence[Sequence[float]], seed: str) -> VarianceTest:
    """Test whether groups have equal variance.

    Brown and Forsythe 1974 (doi:10.1080/01621459.1974.10482955): the F test of the absolute
    deviations from each group's median. It is computed against the F distribution, and against the
    arrangements of these deviations over the groups, which needs no normal law; up to
    :data:`MAX_ARRANGEMENTS` all of them, beyond that :data:`PERMUTATIONS` random ones with the
    estimate (b + 1) / (m + 1) of Phipson and Smyth 2010 (doi:10.2202/1544-6115.1585).

    Args:
        groups: At least two, each with at least two scores.
        seed: Text that random arrangements follow from.

    Raises:
        ValueError: There are fewer groups or scores, or a score is not finite.
    """
    check_scores(groups)
    if len(groups) < 2 or min(map(len, groups)) < 2:
        raise ValueError("a test of equal variance needs two groups of two scores")
    deviations = [[abs(score - median(group)) for score in group] for group in groups]
    statistic = _f_ratio(deviations)
    if statistic is None:
        return VarianceTest(None, 1.0, 1.0, exact=True)
    total = sum(map(len, groups))
    p_value = f_tail(statistic, len(groups) - 1, total - len(groups))
    share, exact = _permuted(deviations, statistic, seed)
    return VarianceTest(statistic, p_value, share, exact)


def _f_ratio(groups: Sequence[Sequence[float]]) -> float | None:
    """Return the F ratio of a one-way analysis of variance; None where all values are equal."""
    values = [value for group in groups for value in group]
    grand = fmean(values)
    means = [fmean(group) for group in groups]
    between = math.fsum(
        len(group) * (mean - grand) ** 2 for group, mean in zip(groups, means, strict=True)
    )
    within = math.fsum(
        (value - mean) ** 2 for group, mean in zip(groups, means, strict=True) for value in group
    )
    scale = _CLOSE * math.fsum(value**2 for value in values)
    if within <= scale:
        return None if between <= scale else math.inf
    return (between / (len(groups) - 1)) / (within / (len(values) - len(groups)))


def _permuted(groups: Sequence[Sequence[float]], statistic: float, seed: str) -> tuple[float, bool]:
    """Return the share of arrangements with an F ratio as large, and whether all were counted."""
    sizes = [len(group) for group in groups]
    values = [value for group in groups for value in group]
    number = math.factorial(len(values))
    for size in sizes:
        number //= math.factorial(size)
    exact = number <= MAX_ARRANGEMENTS
    arrangements = _arrangements(values, sizes) if exact else _shuffles(values, sizes, seed)
    as_large = sum(
        (ratio := _f_ratio(arrangement)) is not None and ratio >= statistic * (1 - _CLOSE)
        for arrangement in arrangements
    )
    return (as_large / number, True) if exact else ((as_large + 1) / (PERMUTATIONS + 1), False)


def _arrangements(values: Sequence[float], sizes: Sequence[int]) -> Iterator[list[list[float]]]:
    """Yield every way to part values into groups of these sizes."""
    if len(sizes) == 1:
        yield [list(values)]
        return
    places = range(len(values))
    for chosen in itertools.combinations(places, sizes[0]):
        taken = set(chosen)
        rest = [values[place] for place in places if place not in taken]
        for others in _arrangements(rest, sizes[1:]):
            yield [[values[place] for place in chosen], *others]


def _shuffles(
    values: Sequence[float], sizes: Sequence[int], seed: str
) -> Iterator[list[list[float]]]:
    """Yield random ways to part values into groups of these sizes (Fisher and Yates)."""
    sources = {size: draws(f"{seed}/{size}", size) for size in range(2, len(values) + 1)}
    ends = list(itertools.accumulate(sizes))
    for _ in range(PERMUTATIONS):
        shuffled = list(values)
        for size in range(len(values), 1, -1):
            place = next(sources[size])
            shuffled[place], shuffled[size - 1] = shuffled[size - 1], shuffled[place]
        yield [shuffled[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def f_tail(statistic: float, numerator: int, denominator: int) -> float:
    """Return P(F > statistic) of the F distribution with these degrees of freedom."""
    if math.isinf(statistic):
        return 0.0
    share = denominator / (denominator + numerator * statistic)
    return _regularized_beta(share, denominator / 2, numerator / 2)


def _regularized_beta(x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b).

    By its continued fraction (NIST Digital Library of Mathematical Functions, 8.17.22), evaluated
    by Lentz's method where it converges fast; 8.17.4 leads there from elsewhere.
    """
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _regularized_beta(1 - x, b, a)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front += a * math.log(x) + b * math.log1p(-x)
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = d
    for m in itertools.count(1):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + term * d)
            c = 1 + term / c
            value *= c * d
        if abs(c * d - 1) < _CONVERGED:
            break
    return math.exp(front) * value / a


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return p-values corrected for several comparisons (Holm 1979), in ascending order."""
    corrected: dict[str, float] = {}
    largest = 0.0
    for place, (name, value) in enumerate(sorted(p_values.items(), key=lambda pair: pair[1])):
        largest = max(largest, min(1.0, (len(p_values) - place) * value))
        corrected[name] = largest
    return corrected
