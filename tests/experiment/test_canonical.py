"""Canonical JSON."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.canonical import canonical_json, parse_canonical_json

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(-1e15, 1e15)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=12,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(VALUES)
def test_parsing_undoes_writing(value):
    data = canonical_json(value)
    assert canonical_json(parse_canonical_json(data)) == data


def test_the_example_of_rfc_8785_section_3_2_3():
    value = {
        "numbers": [333333333.33333329, 1e30, 4.50, 2e-3, 0.000000000000000000000000001],
        "literals": [None, True, False],
    }
    assert canonical_json(value) == (
        b'{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27]}'
    )


@pytest.mark.parametrize(
    "data",
    [
        b'{"a":1,"a":2}',
        b'{"a": 1}',
        b'{"b":1,"a":2}',
        b"\xef\xbb\xbf{}",
        b'{"a":NaN}',
        b'{"a":1.0}',
        b'{"a":9007199254740993}',
        b'"\\ud800"',
        b"{}\n",
        b"[" * 100_000,
        b"1" * 5000,
        b"\xff",
    ],
)
def test_what_is_not_canonical_is_refused(data):
    with pytest.raises(ValueError, match=r"JSON|canonical"):
        parse_canonical_json(data)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**53, {1: 2}])
def test_what_has_no_canonical_form_is_refused(value):
    with pytest.raises(ValueError, match="canonicalisable"):
        canonical_json(value)


def test_canonical_json_is_json():
    assert json.loads(canonical_json({"é": [1.5]})) == {"é": [1.5]}
