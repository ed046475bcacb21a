"""Comparisons of groups, against rliable, SciPy, every arrangement, and by hand."""

import itertools
import math
from fractions import Fraction
from statistics import median

import numpy as np
import pytest
import scipy.stats
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from capsule.study.statistics import comparison
from capsule.study.statistics.comparison import (
    equal_variance,
    holm,
    probability_of_improvement,
)
from tests.study.statistics.record_rliable import pair_with_a_tie

RETURNS = st.integers(-4, 4).map(float)  # few values, so that ties are the rule
GROUP = st.lists(RETURNS, min_size=3, max_size=4)
GROUPS = st.lists(GROUP, min_size=2, max_size=3).filter(
    lambda groups: sum(map(len, groups)) <= 9  # of three groups: 1,680 arrangements
)

DECIMALS = st.integers(-(10**7), 10**7).map(lambda value: value / 1_000)
MANY = st.lists(st.lists(DECIMALS, min_size=3, max_size=20), min_size=2, max_size=4)


def deviations(groups):
    return [[abs(score - median(group)) for score in group] for group in groups]


# --- probability of improvement -------------------------------------------------------------------


@pytest.mark.parametrize(("tasks", "runs"), [(1, 5), (4, 6)])
def test_the_probability_of_improvement_is_that_of_rliable(rliable, tasks, runs):
    wanted = rliable["improvements"][f"{tasks}x{runs}"]
    found = probability_of_improvement(*pair_with_a_tie(tasks, runs))
    assert found == pytest.approx(wanted, rel=1e-12)


def test_a_probability_of_improvement_by_hand():
    assert probability_of_improvement([[1.0, 2.0]], [[0.0, 1.0, 2.0]]) == (1.5 + 2.5) / 6
    assert probability_of_improvement([[1.0], [5.0]], [[2.0], [2.0]]) == 0.5


@given(st.lists(st.tuples(GROUP, GROUP), min_size=1, max_size=4))
def test_improvements_have_two_sides(pairs):
    first, second = zip(*pairs, strict=True)
    found = probability_of_improvement(first, second)
    assert 0 <= found <= 1
    assert found == pytest.approx(1 - probability_of_improvement(second, first))
    moved = [[[score * 3 + 7 for score in task] for task in sample] for sample in (first, second)]
    assert probability_of_improvement(*moved) == found


@pytest.mark.parametrize(
    ("first", "second"), [([[1.0]], [[1.0], [2.0]]), ([[1.0]], [[]]), ([[math.nan]], [[1.0]])]
)
def test_what_has_no_probability_of_improvement_is_rejected(first, second):
    with pytest.raises(ValueError):
        probability_of_improvement(first, second)


# --- tests of equal variance ----------------------------------------------------------------------


@settings(max_examples=60)
@given(MANY)
def test_f_is_that_of_scipy(groups):
    ratio = comparison._f_ratio(comparison._deviations(groups))
    assume(math.isfinite(ratio))  # SciPy divides by zero otherwise
    wanted = scipy.stats.levene(*groups, center="median")
    assert ratio == pytest.approx(float(wanted.statistic), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("sizes", [(5, 5), (3, 4), (5, 5, 5, 5, 5, 5), (12, 30)])
@pytest.mark.parametrize("offset", [0.0, 1e5])
def test_a_test_of_normal_groups_is_that_of_scipy(sizes, offset, monkeypatch):
    monkeypatch.setattr(comparison, "PERMUTATIONS", 100)
    generator = np.random.default_rng(len(sizes))
    groups = [generator.normal(offset, 1 + size, size).tolist() for size in sizes]
    found = equal_variance(groups, "seed")
    wanted = scipy.stats.levene(*groups, center="median")
    assert found.statistic == pytest.approx(float(wanted.statistic), rel=1e-8)
    assert found.p_value == pytest.approx(float(wanted.pvalue), abs=1e-10)


@pytest.mark.slow
@settings(max_examples=40)
@given(GROUPS)
def test_an_exact_p_value_is_the_share_of_all_arrangements(groups):
    # Exact numbers, so that ties between arrangements are ties.
    parts = [list(map(Fraction, part)) for part in deviations(groups)]
    values, sizes = [*itertools.chain(*parts)], [len(part) for part in parts]
    ends = [*itertools.accumulate(sizes)]

    def between(order):
        groups = [[values[place] for place in order[end - size : end]]
                  for size, end in zip(sizes, ends, strict=True)]  # fmt: skip
        return sum(sum(group) ** 2 / len(group) for group in groups)

    observed = between(range(len(values)))
    splits = [
        (*first, *second, *rest)
        for first in itertools.combinations(range(len(values)), sizes[0])
        for second in itertools.combinations(sorted({*range(len(values))} - {*first}), sizes[1])
        for rest in [sorted({*range(len(values))} - {*first} - {*second})]
    ]
    found = equal_variance(groups, "seed")
    assert found.exact
    assert found.permutation_p_value == sum(map(observed.__le__, map(between, splits))) / len(
        splits
    )


@pytest.mark.parametrize("seed", range(3))
def test_an_exact_p_value_is_that_of_scipy(seed):
    groups = np.random.default_rng(seed).normal(0, [[1], [3]], (2, 5)).tolist()
    wanted = scipy.stats.permutation_test(
        deviations(groups),
        lambda *samples: scipy.stats.f_oneway(*samples).statistic,
        alternative="greater",
        n_resamples=np.inf,
    )
    found = equal_variance(groups, "seed")
    assert found.statistic == pytest.approx(wanted.statistic)
    assert found.permutation_p_value == pytest.approx(wanted.pvalue)
    assert (found.permutation_p_value * math.comb(10, 5)) == pytest.approx(
        round(found.permutation_p_value * math.comb(10, 5))
    )


def test_deviations_that_only_rounding_tells_apart_are_ties():
    # In decimals both groups have the deviations 0, 0.1 and 0.2, and no F is smaller than 0. In
    # binary, 0.3 - 0.1 and 0.2 differ.
    groups = [[0.1, 0.3, 0.2, 0.5, 0.4], [1.2, 1.1, 1.5, 1.3, 1.4]]
    found = equal_variance(groups, "seed")
    assert found.statistic == pytest.approx(0, abs=1e-20)
    assert (found.permutation_p_value, found.exact) == (1.0, True)


@pytest.mark.slow
def test_with_many_scores_arrangements_are_drawn(monkeypatch):
    generator = np.random.default_rng(5)
    groups = [generator.normal(0, width, 7).tolist() for width in (1.0, 1.6)]  # 3,432 arrangements
    exact = equal_variance(groups, "seed")
    monkeypatch.setattr(comparison, "MAX_ARRANGEMENTS", 3_431)
    found = equal_variance(groups, "seed")
    assert (exact.exact, found.exact) == (True, False)
    error = math.sqrt(exact.permutation_p_value / comparison.PERMUTATIONS)
    assert found.permutation_p_value == pytest.approx(exact.permutation_p_value, abs=4 * error)
    assert found == equal_variance(groups, "seed")
    assert found != equal_variance(groups, "other")


def test_f_and_a_drawn_p_value_are_the_same_on_every_machine():
    groups = [[place * place / width for place in range(10)] for width in (7, 3)]
    found = equal_variance(groups, "seed")
    assert (found.statistic, found.exact) == (4.508237273042102, False)
    assert found.permutation_p_value == 757 / 20_001


def test_a_drawn_p_value_counts_the_observed_arrangement(monkeypatch):
    monkeypatch.setattr(comparison, "PERMUTATIONS", 99)
    groups = [[float(score) for score in range(20)], [1000.0 * score for score in range(20)]]
    assert equal_variance(groups, "seed").permutation_p_value == 1 / 100


def test_drawn_arrangements_are_even(monkeypatch):
    monkeypatch.setattr(comparison, "PERMUTATIONS", 6_000)
    shuffles = comparison._shuffles([1, 2, 3, 4], [1, 2, 1], "seed")
    found = [tuple(tuple(sorted(part)) for part in parts) for parts in shuffles]
    counts = [found.count(each) for each in set(found)]
    assert len(counts) == 12
    assert scipy.stats.chisquare(counts).pvalue > 0.001


def test_arrangements_are_all_different_and_complete():
    found = [
        tuple(map(tuple, arrangement))
        for arrangement in comparison._arrangements([1, 2, 3, 4, 5], [2, 2, 1])
    ]
    assert len(found) == len({*found}) == 30
    assert all(sorted(itertools.chain(*parts)) == [1, 2, 3, 4, 5] for parts in found)


def test_a_deterministic_group_differs_from_one_that_spreads():
    found = equal_variance([[7.0] * 5, [1.0, 4.0, 7.0, 11.0, 20.0]], "seed")
    wanted = scipy.stats.levene([7.0] * 5, [1.0, 4.0, 7.0, 11.0, 20.0], center="median")
    assert (found.statistic, found.p_value) == pytest.approx((wanted.statistic, wanted.pvalue))
    # Of the ten deviations, six are 0. The other four are together in one of two groups.
    assert found.permutation_p_value == pytest.approx(2 * math.comb(6, 1) / math.comb(10, 5))


@pytest.mark.parametrize("scores", [0.0, 0.1, 1e300])
def test_groups_without_any_spread_are_alike(scores):
    assert equal_variance([[scores] * 3, [-scores] * 4], "seed") == (None, 1.0, 1.0, True)
    assert equal_variance([[0.0, 1.0] * 2, [5.0, 6.0] * 3], "seed") == (None, 1.0, 1.0, True)


def test_groups_whose_deviations_differ_only_between_them():
    found = equal_variance([[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 6.0, 6.0]], "seed")
    assert (found.statistic, found.p_value) == (math.inf, 0.0)
    assert found.permutation_p_value == pytest.approx(2 / math.comb(8, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scores", "law", "level"),
    [(4, "normal", 0.11), (4, "exponential", 0.17), (5, "normal", 0.02), (5, "exponential", 0.045)],
)
def test_the_level_is_the_one_that_is_stated(scores, law, level):
    # docs/study.md, the report page and the docstring state these shares.
    draw = getattr(np.random.default_rng(1), law)
    tests = [equal_variance(pair, "seed") for pair in draw(size=(500, 2, scores)).tolist()]
    share = sum(test.permutation_p_value <= 0.1 for test in tests) / len(tests)
    assert share == pytest.approx(level, abs=3 * math.sqrt(level * (1 - level) / len(tests)))


@given(st.lists(DECIMALS, min_size=3, max_size=3), st.lists(DECIMALS, min_size=3, max_size=3))
def test_three_scores_in_both_groups_never_differ_significantly(first, second):
    found = equal_variance([first, second], "seed")
    assert min(found.p_value, found.permutation_p_value) > 0.1


@settings(max_examples=40)
@given(GROUPS, st.integers(-100, 100), st.sampled_from([-3.0, 0.1, 1e-200, 1e200]), st.randoms())
def test_order_shifts_and_scales_do_not_matter(groups, shift, scale, random):
    found = equal_variance(groups, "seed")
    assert 0 <= found.p_value <= 1
    assert 0 < found.permutation_p_value <= 1
    moved = [
        [(score + shift) * scale for score in random.sample(group, len(group))]
        for group in random.sample(groups, len(groups))
    ]
    again = equal_variance(moved, "other")
    assert (again.statistic is None) == (found.statistic is None)
    if found.statistic is not None:
        assert again.statistic == pytest.approx(found.statistic, rel=1e-9, abs=1e-20)
    assert again[1:] == pytest.approx(found[1:], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    "groups",
    [
        [],
        [[1.0, 2.0, 3.0]],
        [[1.0, 2.0], [1.0, 2.0, 3.0]],
        [[1.0, math.nan, 2.0], [1.0, 2.0, 3.0]],
        [[], [1.0, 2.0, 3.0]],
    ],
)
def test_what_has_no_variance_to_test_is_rejected(groups):
    with pytest.raises(ValueError):
        equal_variance(groups, "seed")


# --- several comparisons --------------------------------------------------------------------------


def test_holms_correction_by_hand():
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert found == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert list(found) == ["d", "a", "c", "b"]
    assert holm({"one": 0.7}) == {"one": 0.7}
    assert holm({}) == {}


@given(st.lists(st.integers(0, 32), min_size=1, max_size=8), st.integers(1, 31))
def test_holm_rejects_as_his_procedure_does(numbers, number):
    p_values = {str(place): value / 32 for place, value in enumerate(numbers)}
    alpha = number / 32
    rejected = set()
    for place, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        if p_values[name] * (len(p_values) - place) > alpha:
            break
        rejected.add(name)
    found = holm(p_values)
    assert {name for name, value in found.items() if value <= alpha} == rejected
    assert all(p_values[name] <= value <= 1 for name, value in found.items())


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_what_is_no_p_value_is_rejected(value):
    with pytest.raises(ValueError, match="p-value"):
        holm({"a": 0.5, "b": value})
