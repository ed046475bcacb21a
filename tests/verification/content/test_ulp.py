"""Distances in ulp on the host, against numpy."""

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.verification.content.ulp import Distance, distance

TINY = math.ulp(0.0)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize(
    ("a", "b", "steps"),
    [
        (1.0, math.nextafter(1.0, 2.0), 1),
        (1.0, math.nextafter(1.0, 0.0), 1),
        (0.0, -0.0, 0),
        (TINY, -TINY, 2),
        (0.0, TINY, 1),
        (1.0, 2.0, 1 << 52),
        (-1.0, 1.0, 2 * struct.unpack("<q", struct.pack("<d", 1.0))[0]),
    ],
)
def test_steps_between_doubles(a, b, steps):
    assert distance(a, b).ulp == distance(b, a).ulp == steps


def test_signed_zeros_differ_in_bits_only():
    assert distance(0.0, -0.0) == Distance(elements=1, differing=1)


@pytest.mark.parametrize("other", [1.0, math.inf, -math.inf, -math.nan])
def test_nan_has_no_distance(other):
    found = distance(math.nan, other)
    assert (found.differing, found.nonfinite, found.ulp, found.relative) == (1, 1, 0, 0.0)
    assert distance(math.nan, math.nan) == Distance(elements=1)


def test_infinity_has_no_distance_but_from_itself_none():
    assert distance(math.inf, math.inf) == Distance(elements=1)
    assert distance(math.inf, -math.inf).nonfinite == 1
    assert distance(1e300, 1.0, width=32).nonfinite == 1  # beyond float32


@given(FLOATS, FLOATS)
def test_doubles_against_numpy(a, b):
    bits = np.array([a, b]).view(np.int64).tolist()
    ordered = [each if each >= 0 else -(1 << 63) - each for each in bits]
    found = distance(a, b)
    assert found.ulp == abs(ordered[0] - ordered[1])
    scale = max(abs(a), abs(b))
    with np.errstate(over="ignore"):
        expected = np.abs(np.float64(a) - np.float64(b)) / scale if scale else 0.0
    assert found.relative == expected


@given(st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), max_size=20))
def test_sequences_are_the_sum_of_their_pairs(pairs):
    left, right = (
        (np.array(each, np.float32) for each in zip(*pairs, strict=True))
        if pairs
        else (
            np.zeros(0, np.float32),
            np.zeros(0, np.float32),
        )
    )
    whole = Distance()
    whole.add(left.tobytes(), right.tobytes())
    single = [Distance() for _ in pairs]
    for each, a, b in zip(single, left, right, strict=True):
        each.add(a.tobytes(), b.tobytes())
    assert whole.elements == len(pairs)
    assert whole.differing == int((left.view(np.int32) != right.view(np.int32)).sum())
    assert whole.nonfinite == sum(each.nonfinite for each in single)
    assert whole.ulp == max((each.ulp for each in single), default=0)
    assert whole.relative == max((each.relative for each in single), default=0.0)
