"""Statistics of two samples of returns, in plain Python: the host side has no numpy.

Tests say whether samples differ; intervals say by how much. Only an interval can show that two
runs are alike: a test that finds no difference may have had too few returns to find one.

Sources: Mann and Whitney 1947, doi:10.1214/aoms/1177730491, and Wilcoxon 1945, doi:10.2307/3001968
(rank tests); Cliff 1993, doi:10.1037/0033-2909.114.3.494 (delta); Efron 1979,
doi:10.1214/aos/1176344552 (bootstrap); Agarwal et al. 2021, arXiv:2108.13264 (interquartile mean of
returns).
"""

from __future__ import annotations

import hashlib
import math
import struct
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from pydantic import Field

from capsule.experiment.fields import Model

Observation = TypeVar("Observation")

# Observations up to which a rank test counts every arrangement instead of taking the normal law.
EXACT = 50
RESAMPLES = 2_000
_WORD = struct.Struct("<4Q")  # of a SHA-256 digest: four 64-bit words


class RankTest(Model):
    """A two-sided rank test."""

    # U of the second sample; W+ of positive differences; or their number.
    statistic: float
    p_value: float
    exact: bool = Field(
        description="Whether every arrangement was counted, rather than the normal distribution "
        "used."
    )


# --- tests of a difference ------------------------------------------------------------------------


def rank_sum(first: Sequence[float], second: Sequence[float]) -> RankTest:
    """Test two independent samples by Wilcoxon's rank sum (Mann and Whitney's U).

    Ties have the mean of their ranks. Up to :data:`EXACT` observations in all, every choice of the
    ranks that could be the second sample's is counted, ties included (the permutation
    distribution); beyond, the normal approximation with corrections for ties and continuity.
    """
    n, m = len(first), len(second)
    ranks = doubled_ranks([*first, *second])
    doubled = sum(ranks[n:])
    u = doubled / 2 - m * (m + 1) / 2
    if n + m <= EXACT:
        ways = _sums_of_subsets(ranks, m)
        return RankTest(statistic=u, p_value=_two_sided(ways, doubled), exact=True)
    ties = sum(count**3 - count for count in Counter(ranks).values())
    total = n + m
    variance = n * m / 12 * (total + 1 - ties / (total * (total - 1)))
    return RankTest(statistic=u, p_value=_normal_p(u - n * m / 2, variance), exact=False)


def signed_rank(differences: Iterable[float]) -> RankTest:
    """Test paired differences by Wilcoxon's signed ranks; zero differences are left out.

    Up to :data:`EXACT` differences, every choice of signs is counted, ties included; beyond, the
    normal approximation with a correction for ties and none for continuity.
    """
    nonzero = [difference for difference in differences if difference]
    n = len(nonzero)
    ranks = doubled_ranks([abs(difference) for difference in nonzero])
    doubled = sum(rank for rank, sign in zip(ranks, nonzero, strict=True) if sign > 0)
    w = doubled / 2
    if n <= EXACT:
        ways = _sums_by_signs(ranks)
        return RankTest(statistic=w, p_value=_two_sided(ways, doubled), exact=True)
    ties = sum(count**3 - count for count in Counter(ranks).values())
    variance = n * (n + 1) * (2 * n + 1) / 24 - ties / 48
    p_value = _normal_p(w - n * (n + 1) / 4, variance, continuity=0)
    return RankTest(statistic=w, p_value=p_value, exact=False)


def sign_test(differences: Iterable[float]) -> RankTest:
    """Test paired differences by their signs: a fair coin's, zero differences left out."""
    nonzero = [difference for difference in differences if difference]
    positive = sum(difference > 0 for difference in nonzero)
    n = len(nonzero)
    ways = {count: math.comb(n, count) for count in range(n + 1)}
    return RankTest(statistic=positive, p_value=_two_sided(ways, positive), exact=True)


def doubled_ranks(values: Sequence[float]) -> list[int]:
    """Return twice the rank of each value, ties having the mean of theirs: an integer always."""
    ordered = sorted(values)
    return [bisect_left(ordered, value) + bisect_right(ordered, value) + 1 for value in values]


def _sums_of_subsets(ranks: Sequence[int], size: int) -> dict[int, int]:
    """Count the subsets of ``size`` ranks by their sum."""
    ways: list[Counter[int]] = [Counter({0: 1}), *(Counter[int]() for _ in range(size))]
    for rank in ranks:
        # Subsets are extended from the largest size down, so that the smaller ones do not have this
        # rank yet, and no subset gets it twice.
        for taken in range(size, 0, -1):
            for total, count in ways[taken - 1].items():
                ways[taken][total + rank] += count
    return ways[size]


def _sums_by_signs(ranks: Sequence[int]) -> dict[int, int]:
    """Count the choices of signs by the sum of the ranks that are positive."""
    ways = Counter({0: 1})
    for rank in ranks:
        # The copy has only the sums without this rank.
        for total, count in list(ways.items()):
            ways[total + rank] += count
    return ways


def _two_sided(ways: dict[int, int], found: int) -> float:
    """Return twice the smaller tail of a counted distribution, the statistic itself included."""
    below = sum(count for value, count in ways.items() if value <= found)
    above = sum(count for value, count in ways.items() if value >= found)
    return min(1.0, 2 * min(below, above) / sum(ways.values()))


def _normal_p(distance: float, variance: float, continuity: float = 0.5) -> float:
    """Return the two-sided p-value of a statistic that far from its mean."""
    if variance <= 0:  # all values are tied
        return 1.0
    z = (abs(distance) - continuity) / math.sqrt(variance)
    # A distance below the correction gives a negative z, and erfc of it is more than 1.
    return min(1.0, math.erfc(z / math.sqrt(2)))


# --- sizes of a difference ------------------------------------------------------------------------


def mean(values: Sequence[float]) -> float:
    """Return the mean, whatever the order of the values."""
    # fsum rounds once, at the end, and so does not depend on the order.
    return math.fsum(values) / len(values)


def interquartile_mean(values: Sequence[float]) -> float:
    """Return the mean without the lowest and the highest ``floor(n / 4)`` values."""
    ordered, cut = sorted(values), len(values) // 4
    return mean(ordered[cut : len(ordered) - cut])


def cliffs_delta(first: Sequence[float], second: Sequence[float]) -> float:
    """Return P(second > first) - P(second < first) over all pairs: Cliff's delta, in [-1, 1]."""
    ordered = sorted(first)
    higher = sum(bisect_left(ordered, value) for value in second)
    lower = sum(len(ordered) - bisect_right(ordered, value) for value in second)
    return (higher - lower) / (len(first) * len(second))


# --- bootstrap ------------------------------------------------------------------------------------


def draws(seed: str, size: int) -> Iterator[int]:
    """Yield integers in ``[0, size)`` for ever, always the same of one seed.

    Word ``w`` of SHA-256("seed/counter") gives ``w * size >> 64``: the generator is a counter's, so
    that it is the same on every machine and in every version of Python. The bias is below
    ``size / 2^64``.
    """
    counter = 0
    while True:
        digest = hashlib.sha256(f"{seed}/{counter}".encode()).digest()
        yield from (word * size >> 64 for word in _WORD.unpack(digest))
        counter += 1


def bootstrap(
    strata: Sequence[Sequence[Observation]],
    statistic: Callable[[list[list[Observation]]], Sequence[float]],
    places: Sequence[Iterator[int]],
    resamples: int = RESAMPLES,
) -> list[list[float]]:
    """Draw the observations of every stratum anew, with replacement, again and again.

    Args:
        strata: Their observations.
        statistic: Gives the numbers of interest of strata that were drawn.
        places: For each stratum, endless places in it, such as :func:`draws` yields.
        resamples: How often.

    Returns:
        Each number's ``resamples`` values, in ascending order.
    """
    found = [
        statistic(
            [
                # An iterator continues where the resample before ended, so each resample has other
                # draws.
                [stratum[place] for place in islice(drawn, len(stratum))]
                for stratum, drawn in zip(strata, places, strict=True)
            ]
        )
        for _ in range(resamples)
    ]
    return [sorted(column) for column in zip(*found, strict=True)]


def bootstrap_pairs(
    pairs: Sequence[tuple[float, float]],
    statistic: Callable[[Sequence[float], Sequence[float]], Sequence[float]],
    seed: str,
    *,
    paired: bool,
    resamples: int = RESAMPLES,
) -> list[list[float]]:
    """Resample two samples of one size by :func:`bootstrap`.

    Args:
        pairs: An observation of each sample, of the same start if ``paired``.
        statistic: Gives the numbers of interest of two samples.
        seed: Whose draws to take.
        paired: Whether pairs are drawn as a whole, or each sample by itself.
        resamples: How often.

    Returns:
        Each number's ``resamples`` values, in ascending order.
    """
    first, second = (draws(f"{seed}/{name}", len(pairs)) for name in ("first", "second"))
    if paired:
        return bootstrap(
            [pairs], lambda drawn: statistic(*zip(*drawn[0], strict=True)), [first], resamples
        )
    samples = [[pair[place] for pair in pairs] for place in (0, 1)]
    return bootstrap(samples, lambda drawn: statistic(*drawn), [first, second], resamples)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of values in ascending order, linear between them (Hyndman and Fan's 7)."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
