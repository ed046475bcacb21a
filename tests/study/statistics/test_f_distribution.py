"""The tail of the F distribution, against SciPy."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from capsule.study.statistics.f_distribution import f_tail

FREE = st.integers(1, 400)


@given(st.floats(1e-9, 1e30), FREE, FREE)
def test_the_tail_is_that_of_scipy(value, numerator, denominator):
    wanted = stats.f.sf(value, numerator, denominator)
    assert f_tail(value, numerator, denominator) == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("free", [(1, 1), (1, 8), (2, 3), (5, 24), (1, 300), (40, 20_000)])
@pytest.mark.parametrize("value", [1e-6, 0.3, 1.0, 5.0, 40.0, 1e4])
def test_the_tail_is_that_of_scipy_where_it_is_used(value, free):
    assert f_tail(value, *free) == pytest.approx(stats.f.sf(value, *free), abs=1e-10)


@given(st.floats(1e-30, 1e30))
def test_tails_in_closed_form(value):
    # SciPy 1.17 gives 1 for F = 1e-18 with one and one degree of freedom; it is 1 - 6.4e-10. F is
    # then the square of a Cauchy variable.
    cauchy = 2 / math.pi * math.atan(1 / math.sqrt(value))
    assert f_tail(value, 1, 1) == pytest.approx(cauchy, rel=1e-12)
    assert f_tail(value, 2, 2) == pytest.approx(1 / (1 + value), rel=1e-12)


def test_tails_at_the_ends():
    assert (f_tail(0.0, 3, 4), f_tail(math.inf, 3, 4), f_tail(1e308, 9, 9)) == (1, 0, 0)


@given(st.floats(0, 1e6), st.floats(0, 1e6), FREE, FREE)
def test_the_tail_descends(first, second, numerator, denominator):
    low, high = sorted([first, second])
    small, large = (f_tail(value, numerator, denominator) for value in (high, low))
    assert 0 <= small <= large + 1e-12
    assert large <= 1


@pytest.mark.parametrize("arguments", [(-1.0, 1, 1), (math.nan, 1, 1), (1.0, 0, 1), (1.0, 1, 0)])
def test_what_has_no_tail_is_rejected(arguments):
    with pytest.raises(ValueError, match="degrees of freedom"):
        f_tail(*arguments)
