"""Statistics against scipy, against every arrangement, and against cases done by hand."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from capsule.verification.equivalence.statistics import (
    EXACT,
    RankTest,
    bootstrap_pairs,
    cliffs_delta,
    doubled_ranks,
    draws,
    interquartile_mean,
    mean,
    quantile,
    rank_sum,
    sign_test,
    signed_rank,
)

EVERY = stats.PermutationMethod(n_resamples=float("inf"))
# Few values, so that ties are the rule, and no rounding: scipy ranks what it computed itself.
RETURNS = st.integers(-4, 4).map(float)
SMALL = st.lists(RETURNS, min_size=2, max_size=5)


def sample(seed, size, span):
    """Draw integers by a generator that is not under test."""
    return [float(value) for value in stats.randint(0, span).rvs(size, random_state=seed)]


# --- rank tests -----------------------------------------------------------------------------------


def test_a_rank_sum_by_hand():
    # Ranks of the second sample: 3, 4, 5 of 5. Of the 10 choices of three ranks, one sums to 12.
    found = rank_sum([1.0, 2.0], [3.0, 4.0, 5.0])
    assert (found.statistic, found.p_value, found.exact) == (6.0, 0.2, True)


def test_a_signed_rank_and_a_sign_test_by_hand():
    # All five differences positive: one choice of signs of 32, and the tail is doubled.
    differences = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert signed_rank(differences) == RankTest(statistic=15, p_value=2 / 32, exact=True)
    assert sign_test(differences) == RankTest(statistic=5, p_value=2 / 32, exact=True)
    assert sign_test([1.0, -1.0, 0.0, 0.0]) == RankTest(statistic=1, p_value=1, exact=True)


@settings(max_examples=40)
@given(SMALL, SMALL)
def test_a_rank_sum_with_ties_is_the_permutation_test(first, second):
    found = rank_sum(first, second)
    expected = stats.mannwhitneyu(second, first, method=EVERY)
    assert found.statistic == expected.statistic
    assert found.p_value == pytest.approx(expected.pvalue, abs=1e-12)


@pytest.mark.parametrize("sizes", [(3, 9), (12, 12), (25, 25)])
def test_a_rank_sum_without_ties_is_the_exact_test(sizes):
    values = stats.norm.rvs(size=sum(sizes), random_state=sum(sizes)).tolist()
    first, second = values[: sizes[0]], values[sizes[0] :]
    found = rank_sum(first, second)
    expected = stats.mannwhitneyu(second, first, method="exact")
    assert found.exact
    assert (found.statistic, found.p_value) == pytest.approx((expected.statistic, expected.pvalue))


@pytest.mark.parametrize("span", [4, 50, 10_000])
def test_a_rank_sum_of_many_is_the_corrected_normal_test(span):
    first, second = sample(1, 100, span), sample(2, 90, span)
    found = rank_sum(first, second)
    expected = stats.mannwhitneyu(second, first, method="asymptotic", use_continuity=True)
    assert not found.exact
    assert (found.statistic, found.p_value) == pytest.approx((expected.statistic, expected.pvalue))


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(RETURNS.filter(bool), min_size=2, max_size=7))
def test_signed_ranks_with_ties_are_the_permutation_test(differences):
    found = signed_rank(differences)
    expected = stats.wilcoxon(differences, method=EVERY)
    assert min(found.statistic, sum(range(len(differences) + 1)) - found.statistic) == (
        expected.statistic
    )
    assert found.p_value == pytest.approx(expected.pvalue, abs=1e-12)


@pytest.mark.parametrize("span", [3, 1_000])
def test_signed_ranks_of_many_are_the_corrected_normal_test(span):
    both = zip(sample(3, 150, span), sample(4, 150, span), strict=True)
    differences = [left - right for left, right in both]
    found = signed_rank(differences)
    expected = stats.wilcoxon(differences, method="approx", zero_method="wilcox")
    assert not found.exact
    assert found.p_value == pytest.approx(expected.pvalue)


def test_the_exact_and_the_normal_test_meet():
    first, second = sample(5, EXACT // 2, 40), sample(6, EXACT // 2, 40)
    normal = stats.mannwhitneyu(second, first, method="asymptotic").pvalue
    assert rank_sum(first, second).p_value == pytest.approx(normal, abs=0.01)


@given(st.lists(RETURNS, max_size=40))
def test_signs_are_a_fair_coin(differences):
    nonzero = [difference for difference in differences if difference]
    heads = sum(difference > 0 for difference in nonzero)
    expected = stats.binomtest(heads, len(nonzero)).pvalue if nonzero else 1.0
    assert sign_test(differences).p_value == pytest.approx(expected)


@given(SMALL, SMALL)
def test_tests_have_no_side(first, second):
    assert rank_sum(first, second).p_value == rank_sum(second, first).p_value
    mirrored = rank_sum([-value for value in first], [-value for value in second])
    assert rank_sum(first, second).p_value == mirrored.p_value
    opposite = [-value for value in first]
    for test in (signed_rank, sign_test):
        assert test(first).p_value == test(opposite).p_value


@pytest.mark.parametrize("size", [3, 60])
def test_no_difference_at_all_is_no_evidence(size):
    assert rank_sum([2.0] * size, [2.0] * size).p_value == 1
    assert signed_rank([0.0] * size).p_value == 1
    assert sign_test([0.0] * size).p_value == 1


@given(st.lists(st.floats(-1e300, 1e300), min_size=1))
def test_ranks_are_scipys(values):
    assert doubled_ranks(values) == [2 * rank for rank in stats.rankdata(values)]


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.slow
@given(SMALL, SMALL)
def test_cliffs_delta_counts_pairs(first, second):
    signs = [(b > a) - (b < a) for a, b in itertools.product(first, second)]
    found = cliffs_delta(first, second)
    assert found == pytest.approx(sum(signs) / len(signs))
    assert found == -cliffs_delta(second, first)
    shifted = cliffs_delta([value * 3 + 7 for value in first], [value * 3 + 7 for value in second])
    assert found == shifted


def test_cliffs_delta_by_hand():
    assert cliffs_delta([1.0, 2.0], [2.0, 3.0]) == 0.75
    assert cliffs_delta([1.0], [0.0]) == -1


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.randoms())
def test_an_interquartile_mean_is_a_trimmed_mean_of_any_order(values, random):
    assert interquartile_mean(values) == pytest.approx(stats.trim_mean(values, 0.25), abs=1e-6)
    shuffled = random.sample(values, len(values))
    assert interquartile_mean(shuffled) == interquartile_mean(values)
    assert mean(shuffled) == mean(values)


def test_an_interquartile_mean_by_hand():
    assert interquartile_mean([100.0, 1.0, 2.0, 3.0, -50.0]) == 2.0


# --- bootstrap ------------------------------------------------------------------------------------


def means(first, second):
    return mean(first), mean(second), mean(second) - mean(first)


def test_draws_are_fixed_for_ever():
    first = list(itertools.islice(draws("seed", 1_000), 6))
    assert first == list(itertools.islice(draws("seed", 1_000), 6))
    assert first != list(itertools.islice(draws("other", 1_000), 6))
    # SHA-256("seed/0") begins with this word, by sha256sum.
    word = int.from_bytes(bytes.fromhex("b0943760c66211bf"), "little")
    assert first[0] == word * 1_000 >> 64


def test_draws_are_even():
    counts = [0] * 7
    for number in itertools.islice(draws("even", 7), 14_000):
        counts[number] += 1
    assert stats.chisquare(counts).pvalue > 0.001


@pytest.mark.parametrize("paired", [True, False])
def test_intervals_are_those_of_all_resamples(paired):
    pairs = [(3.0, 4.0), (-1.0, 1.0), (4.0, 2.0), (1.0, 1.0)]
    size = range(len(pairs))
    chosen = [
        (left, right)
        for left in itertools.product(size, repeat=len(pairs))
        for right in ([left] if paired else itertools.product(size, repeat=len(pairs)))
    ]
    every = zip(
        *(
            means([pairs[i][0] for i in left], [pairs[i][1] for i in right])
            for left, right in chosen
        ),
        strict=True,
    )
    found = bootstrap_pairs(pairs, means, "seed", paired=paired, resamples=10_000)
    for column, values in zip(found, every, strict=True):  # multiples of a quarter
        for share in (0.05, 0.5, 0.95):
            assert quantile(column, share) == pytest.approx(
                quantile(sorted(values), share), abs=0.26
            )
        assert mean(column) == pytest.approx(mean(values), abs=0.04)


def test_intervals_of_a_paired_mean_are_scipys():
    both = zip(sample(7, 40, 99), sample(8, 40, 9), strict=True)
    pairs = [(left, right + left / 2) for left, right in both]
    difference = bootstrap_pairs(pairs, means, "seed", paired=True)[2]
    expected = stats.bootstrap(
        tuple(zip(*pairs, strict=True)),
        lambda left, right: sum(right) / 40 - sum(left) / 40,
        paired=True,
        vectorized=False,
        method="percentile",
        confidence_level=0.9,
        n_resamples=2_000,
        rng=1,
    ).confidence_interval
    assert quantile(difference, 0.05) == pytest.approx(expected.low, abs=0.25)
    assert quantile(difference, 0.95) == pytest.approx(expected.high, abs=0.25)


def test_equal_input_gives_equal_intervals():
    pairs = [(1.0, 2.0), (3.0, 5.0)]
    once, again, other = (
        bootstrap_pairs(pairs, means, seed, paired=True, resamples=20) for seed in ("a", "a", "b")
    )
    assert once == again != other


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.floats(0, 1))
def test_quantiles_are_linear_between_values(values, share):
    ordered = sorted(values)
    expected = stats.mstats.mquantiles(ordered, share, alphap=1, betap=1)[0]
    assert quantile(ordered, share) == pytest.approx(expected, abs=1e-6)
    assert math.isfinite(quantile(ordered, share))
