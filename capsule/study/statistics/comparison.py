"""Comparisons of groups of runs: by probability of improvement, and by their variance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from statistics import fmean, median
from typing import NamedTuple

from capsule.study.statistics.bootstrap import Tasks, check_scores
from capsule.study.statistics.f_distribution import f_tail
from capsule.verification.equivalence.statistics import cliffs_delta, draws

MIN_SCORES = 3  # of a group whose variance is tested
MAX_ARRANGEMENTS = 20_000  # up to which a permutation test takes all of them
PERMUTATIONS = 20_000  # that it draws otherwise
_ROUNDING = 2**-46  # differences that rounding alone can make between scores of a size up to 1


class VarianceTest(NamedTuple):
    """Outcome of a test of equal variance.

    Attributes:
        statistic: Brown and Forsythe's F; infinite if the deviations differ between groups and in
            no group, and None if no deviation differs from another.
        p_value: P-value of the F distribution: 0 if F is infinite, 1 without a statistic.
        permutation_p_value: Share of the arrangements of the deviations whose F is as large.
        exact: Whether every arrangement was counted.
    """

    statistic: float | None
    p_value: float
    permutation_p_value: float
    exact: bool


def probability_of_improvement(first: Tasks, second: Tasks) -> float:
    """Return P(X > Y) for a run X of the first sample and Y of the second, averaged over tasks.

    Ties count one half (Agarwal et al. 2021, arXiv:2108.13264, section 4.3; Mann and Whitney's U
    over its maximum).

    Args:
        first: Scores, tasks x runs.
        second: Scores of the same tasks in the same order, of any number of runs.

    Raises:
        ValueError: The samples have different numbers of tasks, a task has no scores, or a score is
            not finite.
    """
    check_scores(first)
    check_scores(second)
    return fmean((cliffs_delta(y, x) + 1) / 2 for x, y in zip(first, second, strict=True))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return p-values corrected for several comparisons, in ascending order.

    Holm 1979 (Scandinavian Journal of Statistics 6:65-70): the chance of one or more false
    rejections is at most alpha if the comparisons with a corrected value up to alpha are rejected.

    Raises:
        ValueError: A p-value is not between 0 and 1.
    """
    if not all(0 <= value <= 1 for value in p_values.values()):
        raise ValueError("a p-value is not between 0 and 1")
    corrected: dict[str, float] = {}
    largest = 0.0
    for place, (name, value) in enumerate(sorted(p_values.items(), key=lambda pair: pair[1])):
        largest = max(largest, min(1.0, (len(p_values) - place) * value))
        corrected[name] = largest
    return corrected


# --- tests of equal variance ----------------------------------------------------------------------


def equal_variance(groups: Sequence[Sequence[float]], seed: str) -> VarianceTest:
    """Test whether groups have equal variance.

    This is the question of Nagarajan et al. 2019 (arXiv:1809.05676, Discussion): does one source of
    randomness spread the scores more than another? The test of Brown and Forsythe 1974
    (doi:10.1080/01621459.1974.10482955) is the F test of the absolute deviations from each group's
    median. The ratio is compared with the F distribution, and with its values for the arrangements
    of these deviations over the groups. Up to :data:`MAX_ARRANGEMENTS`, all of them are counted;
    beyond, :data:`PERMUTATIONS` random ones give the estimate (b + 1) / (m + 1) of Phipson and
    Smyth 2010 (doi:10.2202/1544-6115.1585).

    A group of equal scores, such as a deterministic one, has deviations of 0 and is tested like any
    other. If all groups are of this kind, there is no difference: no statistic, and p-values of 1.
    The level of both is only approximate, because the deviations from a group's own median depend
    on one another: the median of an odd number of scores is one of them, so that each group has a
    deviation of 0 whatever its variance, and the median of an even number is in the middle of two
    scores. Of pairs of groups with one normal law, 2 % have a permutation p-value up to 0.1 with
    five scores each, and 11 % with four (17 % with one exponential law). With three scores each,
    none can.

    Args:
        groups: At least two, each with at least :data:`MIN_SCORES` scores: the two deviations of
            two scores are always equal, and F would be infinite.
        seed: Text that random arrangements follow from.

    Raises:
        ValueError: There are fewer groups or scores, or a score is not finite.
    """
    check_scores(groups)
    if len(groups) < 2 or min(map(len, groups)) < MIN_SCORES:
        raise ValueError(
            f"a test of equal variance needs two groups of at least {MIN_SCORES} scores"
        )
    deviations = _deviations(groups)
    # Without any spread, F is 0/0.
    if _alike([*chain(*deviations)]):
        return VarianceTest(None, 1.0, 1.0, exact=True)
    statistic = _f_ratio(deviations)
    p_value = f_tail(statistic, len(groups) - 1, sum(map(len, groups)) - len(groups))
    share, exact = _permuted(deviations, seed)
    return VarianceTest(statistic, p_value, share, exact)


def _deviations(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the absolute deviations from each group's median.

    Their unit is a power of two, by which the largest score has a size between 1/2 and 1. F does
    not depend on it, and rounding has about the same size for all scores.
    """
    _, exponent = math.frexp(max(map(abs, chain(*groups))))
    scaled = [[math.ldexp(score, -exponent) for score in group] for group in groups]
    return [
        [abs(score - middle) for score in group] for group in scaled for middle in [median(group)]
    ]


def _alike(deviations: Sequence[float]) -> bool:
    return max(deviations) - min(deviations) <= _ROUNDING


def _f_ratio(groups: Sequence[Sequence[float]]) -> float:
    """Return the F ratio of a one-way analysis of variance; infinite if no group has a spread.

    A square is a product here: ``**`` is the C library's, which may round another way elsewhere.
    """
    if all(map(_alike, groups)):
        return math.inf
    grand = fmean(chain(*groups))
    means = [fmean(group) for group in groups]
    between = math.fsum(
        len(group) * (mean - grand) * (mean - grand)
        for group, mean in zip(groups, means, strict=True)
    )
    within = math.fsum(
        (value - mean) * (value - mean)
        for group, mean in zip(groups, means, strict=True)
        for value in group
    )
    freedom = sum(map(len, groups)) - len(groups)
    return (between / (len(groups) - 1)) / (within / freedom)


def _permuted(groups: Sequence[Sequence[float]], seed: str) -> tuple[float, bool]:
    """Return the share of arrangements with an F ratio as large, and whether all were counted."""
    sizes = [len(group) for group in groups]
    values = [*chain(*groups)]
    number = math.factorial(len(values)) // math.prod(map(math.factorial, sizes))
    exact = number <= MAX_ARRANGEMENTS
    arrangements = _arrangements(values, sizes) if exact else _shuffles(values, sizes, seed)
    # Arrangements whose sums differ from the observed ones by rounding alone count as equal.
    found = _between(groups) - _ROUNDING * math.fsum(values)
    as_large = sum(_between(arrangement) >= found for arrangement in arrangements)
    return (as_large / number, True) if exact else ((as_large + 1) / (PERMUTATIONS + 1), False)


def _between(groups: Sequence[Sequence[float]]) -> float:
    """Return the sum of squares between groups, plus a number that no arrangement changes.

    F ascends with it, since an arrangement leaves the total sum of squares as it is.
    """
    sums = [math.fsum(group) for group in groups]
    return math.fsum(total * total / len(group) for group, total in zip(groups, sums, strict=True))


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
    """Yield random ways to part values into groups of these sizes.

    Fisher and Yates's shuffle goes from the last place downwards. It ends where only the first
    group is left, whose order does not matter.
    """
    open_places = range(len(values), sizes[0], -1)
    # One generator for each number of open places: draws() makes integers below a fixed bound.
    sources = [(size, draws(f"{seed}/{size}", size)) for size in open_places]
    ends = list(itertools.accumulate(sizes))
    for _ in range(PERMUTATIONS):
        shuffled = list(values)
        for size, source in sources:
            place = next(source)
            shuffled[place], shuffled[size - 1] = shuffled[size - 1], shuffled[place]
        yield [shuffled[end - size : end] for size, end in zip(sizes, ends, strict=True)]
