"""The sum tree: hand-computed cases, and naive references that look at every leaf."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.training.r2d2.sum_tree import SumTree


def array(*numbers):
    return np.array(numbers, np.float64)


def indices(*numbers):
    return np.array(numbers, np.int64)


def tree_of(leaves):
    tree = SumTree(len(leaves))
    tree.restore(np.array(leaves, np.float64))
    return tree


def bits(tree):
    return tree._nodes.tobytes()


def test_numbers_at_a_border_belong_to_the_leaf_after_it():
    """The literal cases of Dopamine's tests, and the ends."""
    tree = tree_of([0.5, 1.0, 0.5, 0.5])
    assert tree.total == 2.5
    assert tree.find(array(0.0, 0.5, 1.0, 1.5, 2.0, 2.25)).tolist() == [0, 1, 1, 2, 3, 3]
    assert tree.find(array(np.nextafter(0.5, 0), np.nextafter(1.5, 0))).tolist() == [0, 1]
    assert tree.find(array(2.5)).tolist() == [3]
    tree.set(indices(2), array(0.25))
    assert tree.total == 2.25


def test_leaves_of_weight_zero_are_never_found():
    tree = tree_of([0, 0, 2, 0, 0, 1, 0])
    assert tree.find(array(0.0, 1.9, 2.0, 2.9, 3.0)).tolist() == [2, 2, 5, 5, 5]


def test_a_number_that_rounding_put_too_high_falls_into_the_last_weight():
    """1 + 2^-53 is 1: the sum of the left half is less than its leaves, and the last is tiny."""
    tiny = 2.0**-53
    tree = tree_of([1.0, tiny, tiny, 0.0])
    assert tree.total == 1.0
    assert tree.find(array(np.nextafter(1, 0), 1.0)).tolist() == [0, 2]
    tree = tree_of([1.0, tiny, 0.0, 0.0])
    assert tree.find(array(1.0)).tolist() == [1]


def test_one_leaf():
    tree = tree_of([3.0])
    assert (tree.total, tree.leaves.tolist()) == (3.0, [3.0])
    assert tree.sample(array(0.0, 0.99)).tolist() == [0, 0]


def test_the_last_of_equal_indices_counts():
    tree = tree_of([1, 1, 1])
    tree.set(indices(2, 0, 2, 0, 2), array(5, 6, 7, 8, 9))
    assert tree.leaves.tolist() == [8, 1, 9]
    assert tree.total == 18
    assert tree.get(indices(2, 2, 0)).tolist() == [9, 9, 8]


def test_draws_by_hand():
    tree = tree_of([1, 1, 1, 1])
    assert tree.sample(array(0.0, 0.5, 0.99, 0.25)).tolist() == [0, 2, 3, 1]


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_impossible_weights_are_refused(weight):
    tree = tree_of([1, 2])
    before = bits(tree)
    with pytest.raises(ValueError, match="negative or not finite"):
        tree.set(indices(0, 1), array(7, weight))
    assert bits(tree) == before


@pytest.mark.parametrize("index", [-1, 3])
def test_leaves_outside_are_refused(index):
    tree = tree_of([1, 2, 3])
    before = bits(tree)
    with pytest.raises(IndexError, match=r"not in \[0, 3\)"):
        tree.set(indices(0, index), array(7, 7))
    with pytest.raises(IndexError, match=r"not in \[0, 3\)"):
        tree.get(indices(index))
    assert bits(tree) == before


@pytest.mark.parametrize("number", [-0.1, 3.1, math.nan])
def test_numbers_outside_are_refused(number):
    with pytest.raises(ValueError, match="a number is not in"):
        tree_of([1, 2]).find(array(1.0, number))


def test_nothing_is_drawn_from_nothing():
    with pytest.raises(ValueError, match="all weights are 0"):
        SumTree(4).sample(array(0.5))


EXACT = st.integers(0, 2**20).map(lambda number: number / 64)  # sums of these are exact
ANY = st.floats(0, 1e9) | st.just(0.0) | st.floats(0, 1e-300)


def naive_find(leaves, number):
    """The leaf whose share contains the number: one after another, with exact sums."""
    for index, weight in enumerate(leaves):
        if number < weight:
            return index
        number -= weight
    return max(index for index, weight in enumerate(leaves) if weight)


def naive_sum(leaves):
    """The sum of a power of two of leaves, in the order of the definition."""
    if len(leaves) == 1:
        return leaves[0]
    half = len(leaves) // 2
    return naive_sum(leaves[:half]) + naive_sum(leaves[half:])


def naive_descent(leaves, number):
    """The rule of the module's docstring, with every sum taken from the leaves."""
    if len(leaves) == 1:
        return 0
    half = len(leaves) // 2
    left, right = naive_sum(leaves[:half]), naive_sum(leaves[half:])
    if number < left or right == 0:
        return naive_descent(leaves[:half], number)
    return half + naive_descent(leaves[half:], number - left)


def padded(leaves):
    width = 1
    while width < len(leaves):
        width *= 2
    return leaves + [0.0] * (width - len(leaves))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(EXACT, min_size=1, max_size=40), st.lists(st.floats(0, 1, exclude_max=True)))
def test_exact_weights_are_found_as_by_looking_at_each(leaves, uniforms):
    if not any(leaves):
        leaves[0] = 1.0
    tree = tree_of(leaves)
    assert tree.total == math.fsum(leaves)
    borders = [sum(leaves[:index]) for index in range(len(leaves) + 1)]
    numbers = borders + [math.floor(u * tree.total * 64) / 64 for u in uniforms]
    found = tree.find(np.array(numbers)).tolist()
    assert found == [naive_descent(padded(leaves), number) for number in numbers]
    assert found == [naive_find(leaves, number) for number in numbers]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.lists(ANY, min_size=1, max_size=40),
    st.lists(st.floats(0, 1, exclude_max=True), min_size=1),
)
def test_any_weights_are_found_by_the_rule(leaves, uniforms):
    if not any(leaves):
        leaves[-1] = 1.0
    tree = tree_of(leaves)
    assert tree.total == naive_sum(padded(leaves))
    found = tree.sample(np.array(uniforms)).tolist()
    expected = [naive_descent(padded(leaves), uniform * tree.total) for uniform in uniforms]
    assert found == expected
    assert all(leaves[index] > 0 for index in found)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 40))
def test_the_tree_is_a_function_of_its_leaves(data, size):
    tree, leaves = SumTree(size), [0.0] * size
    one = st.tuples(st.integers(0, size - 1), ANY)
    for changes in data.draw(st.lists(st.lists(one, max_size=8), max_size=8)):
        tree.set(
            np.array([index for index, _ in changes], np.int64),
            np.array([weight for _, weight in changes], np.float64),
        )
        for index, weight in changes:
            leaves[index] = weight
    assert tree.leaves.tolist() == leaves
    assert bits(tree) == bits(tree_of(leaves))


@settings(max_examples=100, deadline=None)
@given(st.lists(ANY, min_size=16, max_size=16))
def test_an_aligned_block_is_a_subtree(leaves):
    """So trees of single actors, and one of all of them, have the same sums."""
    whole = tree_of(leaves)
    quarters = [tree_of(leaves[start : start + 4]) for start in range(0, 16, 4)]
    assert [quarter.total for quarter in quarters] == whole._nodes[4:8].tolist()
    assert tree_of([quarter.total for quarter in quarters]).total == whole.total


def test_frequencies_follow_the_weights():
    generator = np.random.default_rng(2)
    leaves = generator.random(50) ** 4
    tree = tree_of(leaves.tolist())
    counts = np.bincount(tree.sample(generator.random(100_000)), minlength=50)
    expected = leaves / leaves.sum() * 100_000
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected) + 1).all()
