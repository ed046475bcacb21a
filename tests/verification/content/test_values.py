"""Values as JSON has them are compared leaf by leaf, and a pickle within a text by its content."""

import base64
import json
import math
import pickle
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.verification.content.parts import MAX_NAME_CHARACTERS, NotComparableError
from capsule.verification.content.values import compare_leaves, compare_values, parse
from tests.verification.content.comparing import (
    CLAIMED,
    FOUND,
    collected,
    compare,
    facts,
    summary,
    zipped,
)

LEAVES = st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def stable_baselines(start_time, policy=b"weights", episode=0.5):
    """Return what stable-baselines3 saves, in form: settings with pickles, and tensors."""
    settings = {
        "n_steps": 64,
        "start_time": start_time,
        "ep_info_buffer": {
            ":type:": "<class 'collections.deque'>",
            ":serialized:": base64.b64encode(
                pickle.dumps([{"r": 9.0, "l": 9, "t": episode}])
            ).decode(),
        },
    }
    data = json.dumps(settings, indent=4).encode()
    return zipped({"data": data, "policy.pth": policy}, method=zipfile.ZIP_STORED)


def test_a_saved_policy_whose_start_time_differs_differs_in_dates_only():
    left, right = stable_baselines(CLAIMED * 10**9 + 5), stable_baselines(FOUND * 10**9 + 7)
    found = compare(left, right)
    assert (found.nature, summary(found)) == ("date", [("data: start_time", "date")])
    assert "policy.pth" in found.equal


def test_a_saved_policy_that_was_timed_differs_in_more_than_dates():
    left = stable_baselines(CLAIMED * 10**9)
    found = compare(left, stable_baselines(FOUND * 10**9, episode=0.25))
    assert found.nature == "content"
    assert summary(found) == [
        ("data: start_time", "date"),
        ("data: ep_info_buffer.:serialized:: number after 't'", "content"),
    ]


def test_json_written_otherwise_is_packaging_and_numbers_of_other_types_are_not():
    assert compare(b'{"a": 1, "b": 2}', b'{"b":2,"a":1}').nature == "packaging"
    assert compare(b'{"a": 1}', b'{"a": 1.0}').nature == "content"
    assert compare(b'{"a": 1, "a": 2}', b'{"a": 3, "a": 2}').nature == "content"


# --- parsing --------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(JSON)
def test_json_is_read_as_it_was_written(value):
    found = parse(json.dumps(value))
    assert repr(found) == repr(value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1, "a": 1}', "a name twice"),
        ('[{"b": {"a": 1, "a": 2}}]', "a name twice"),
        ("1e500", "too large for a float"),
        ("[-1e500]", "too large for a float"),
    ],
)
def test_json_that_readers_may_take_differently_is_not_compared(text, reason):
    with pytest.raises(NotComparableError, match=reason):
        parse(text)


@pytest.mark.parametrize(
    "text", ["1e1000000000", "1e-1000000000", "0.5e+0000000001", f"0.{'1' * 401}", f"{'1' * 401}.0"]
)
def test_a_number_of_too_many_digits_is_not_compared(text):
    with pytest.raises(NotComparableError, match="too many digits"):
        parse(f"[{text}]")


def test_a_number_beyond_a_float_keeps_its_digits():
    found = parse("[12345678901234567.10, 9007199254740993.0, -1e-400, 0.1, -0.0, 1e5]")
    assert repr(found) == "[12345678901234567.1, 9007199254740993.0, -1E-400, 0.1, -0.0, 100000.0]"
    assert found == [12345678901234568.0, 9007199254740992.0, 0.0, 0.1, 0.0, 1e5]


@pytest.mark.parametrize("text", ["", "{", "{'a': 1}", "[1,]", "1 2"])
def test_text_that_is_not_json_is_an_error_of_its_value(text):
    with pytest.raises(ValueError, match=r"line 1"):
        parse(text)


# --- leaves ---------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(JSON, JSON)
def test_values_differ_if_and_only_if_their_json_with_sorted_names_does(left, right):
    equal = json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)
    there, back = (collected(compare_values, "", *pair) for pair in ((left, right), (right, left)))
    assert (there.count == 0) == equal
    assert there.count == back.count


@settings(max_examples=50)
@given(st.dictionaries(st.text(max_size=3), JSON, max_size=5))
def test_the_order_of_names_does_not_count(value):
    assert collected(compare_values, "", value, dict(reversed(value.items()))).count == 0


def test_a_leaf_is_named_by_its_path():
    left = {"a": {"b": [1, {"c": 2}]}, "d": 1, "e": [1], "f": {"g": 1}}
    right = {"a": {"b": [1, {"c": 3}]}, "d": 1, "e": [1, 2], "f": {"h": 1}}
    found = collected(compare_values, "", left, right)
    assert facts(found) == [
        ("a.b[1].c", "2", "3"),
        ("e", "[1]", "[1, 2]"),
        ("f.g", "1", "missing"),
        ("f.h", "missing", "1"),
    ]
    assert found.equal == ["d"]


def test_only_the_largest_equal_parts_are_named():
    left = {"a": {"b": [1, 2]}, "c": [[1], [2, 3]], "d": [1, 2], "e": {"f": 1, "g": 2}}
    right = {"a": {"b": [1, 2]}, "c": [[1], [2, 4]], "d": [1, 2], "e": {"g": 2, "f": 1}}
    assert collected(compare_values, "", left, right).equal == ["a", "c[0]", "c[1][0]", "d"]
    assert collected(compare_values, "", left, left).equal == [""]


def test_the_work_with_a_value_does_not_grow_with_its_depth():
    def work(depth):
        counts = []

        class Leaf:
            def __repr__(self):
                counts.append(self)
                return "leaf"

        left, right = [Leaf(), 1], [Leaf(), 2]
        for _ in range(depth):
            left, right = [left], [right]
        assert collected(compare_values, "", left, right).count == 1
        return len(counts)

    assert work(5) == work(200) == 2


@pytest.mark.parametrize(
    ("left", "right"), [(1, 1.0), (1, True), (0, False), (0.0, -0.0), ("1", 1), (None, "None")]
)
def test_equal_numbers_of_other_types_and_signs_differ(left, right):
    assert collected(compare_values, "x", left, right).count == 1


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        ("12345678901234567.1", "12345678901234567.2", False),
        ("9007199254740993.0", "9007199254740992.0", False),
        ("9007199254740993.0", "9007199254740993", False),  # an integer
        ("1e-400", "5e-500", False),
        ("1e-400", "0.0", False),
        ("1e-400", "-1e-400", False),
        ("1e-999999999", "1e-999999998", False),
        ("0.1", "0.10000000000000001", False),
        ("0.10000000000000000", "0.1", True),
        ("12345678901234567.1", "1.23456789012345671e16", True),
        ("1e-400", "10.0e-401", True),
        ("5.0e1", "50.0", True),
        ("0e5", "0.0", True),
        ("-0e5", "0.0", False),
        ("-0", "0", False),
        ("-0", "-0.0", False),  # an integer
    ],
)
def test_numbers_of_json_are_equal_if_all_their_digits_are(left, right, equal):
    for form in ("[%s]", '{"a": {"b": %s}}'):
        files = [(form % text).encode() for text in (left, right)]
        found = compare(*files)
        assert (found.format, found.nature) == ("JSON", "packaging" if equal else "content")
        assert equal or found.parts[0].claimed != found.parts[0].found


@given(st.integers(1, 10**25), st.integers(-400, 200), st.integers(0, 9))
def test_a_number_written_with_another_exponent_is_the_same(digits, exponent, zeros):
    texts = (
        f"{digits}.0e{exponent}",
        f"{digits}{'0' * zeros}.0e{exponent - zeros}",
        f"{digits + 1}.0e{exponent}",
    )
    first, same, other = (repr(parse(text)) for text in texts)
    assert first == same != other


def test_a_long_name_is_cut_off():
    found = compare(
        *(json.dumps({"k" * 10_000: {"l" * 10_000: [value]}}).encode() for value in (1, 2))
    )
    assert [part.where for part in found.parts] == [f"{'k' * 80}….{'l' * 80}…[0]"]


def test_names_within_names_are_cut_off():
    left, right = 1, 2
    for _ in range(90):
        left, right = {"k" * 79: left, "j": 1}, {"k" * 79: right, "j": 1}
    found = collected(compare_values, "", left, right)
    assert found.count == 1
    assert len(found.parts[0].where) == MAX_NAME_CHARACTERS + 1


@pytest.mark.parametrize(
    ("left", "right", "shown"),
    [
        (1.0, math.nextafter(1.0, 2.0), "1.0000000000000002, 1 ulp away"),
        (1.0, 2.0, "2.0, 4,503,599,627,370,496 ulp away"),  # 2 to the power of 52
        (1.0, math.inf, "inf"),
        (1, 2, "2"),
        (1.0, 2, "2"),
        ("a", "b", "b"),
    ],
)
def test_the_distance_of_two_floats_is_shown(left, right, shown):
    assert facts(collected(compare_leaves, "x", (left, right))) == [("x", str(left), shown)]


def encoded(value):
    return base64.b64encode(pickle.dumps(value)).decode()


def test_an_encoded_pickle_is_compared_by_its_content():
    pair = encoded({"loss": 0.5, "steps": 9}), encoded({"loss": 0.25, "steps": 9})
    found = collected(compare_leaves, "x", pair)
    assert [part.where for part in found.parts] == ["x: number after 'loss'"]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (encoded(1), encoded(2)),  # too short to be looked at
        (encoded({"loss": 0.5, "steps": 9}), "x" * 80),
        (base64.b64encode(b"1" * 40).decode(), base64.b64encode(b"2" * 40).decode()),
        (encoded({"loss": 0.5, "steps": 9}) + "!", encoded({"loss": 0.25, "steps": 9}) + "!"),
    ],
)
def test_a_text_that_is_no_encoded_pickle_is_compared_as_a_text(left, right):
    found = collected(compare_leaves, "x", (left, right))
    assert [(part.where, part.nature) for part in found.parts] == [("x", "content")]
