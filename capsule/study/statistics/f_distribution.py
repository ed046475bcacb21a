"""The upper tail of the F distribution."""

from __future__ import annotations

import itertools
import math

_CONVERGED = 1e-15  # relative change of a continued fraction


def f_tail(statistic: float, numerator: int, denominator: int) -> float:
    """Return P(F > statistic) of the F distribution with these degrees of freedom.

    Abramowitz and Stegun 1964, 26.6.2. An infinite statistic has the tail 0.

    Raises:
        ValueError: The statistic is negative or not a number, or a degree of freedom is below 1.
    """
    if not statistic >= 0 or min(numerator, denominator) < 1:
        raise ValueError(
            f"F is at least 0 with degrees of freedom of at least 1; F is {statistic!r} with "
            f"{numerator} and {denominator}"
        )
    if math.isinf(statistic):
        return 0.0
    scaled = numerator * statistic / denominator
    x, rest = 1 / (1 + scaled), scaled / (1 + scaled)
    # F is 0 or overflows here, and one of the logarithms below does not exist.
    if x == 0 or rest == 0:
        return float(rest == 0)
    a, b = denominator / 2, numerator / 2
    if x > (a + 1) / (a + b + 2):
        return 1 - _regularized_beta(rest, x, b, a)
    return _regularized_beta(x, rest, a, b)


def _regularized_beta(x: float, rest: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b) for x up to (a + 1) / (a + b + 2).

    The continued fraction 8.17.22 of the NIST Digital Library of Mathematical Functions, which
    converges fast there, is evaluated by Lentz's method; 8.17.4 leads there from elsewhere.
    ``rest`` is 1 - x: an argument of its own because the difference has few digits where x is close
    to 1.
    """
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front += a * math.log(x) + b * math.log(rest)
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
