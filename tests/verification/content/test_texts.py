"""Texts are compared line by line, JSON lines and tables field by field."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.verification.content import texts
from capsule.verification.content.parts import NotComparableError
from capsule.verification.content.texts import (
    compare_csv,
    compare_json,
    compare_json_lines,
    compare_text,
)
from tests.verification.content.comparing import CLAIMED, CONTEXT, FOUND, compare, facts, summary


def test_json_lines_and_tables_name_the_field():
    left, right = b'{"step":1,"loss":0.5}\n{"step":2,"loss":0.25}\n', b'{"step":1,"loss":0.5}\n'
    found = compare(left, right)
    assert (found.format, summary(found)) == ("JSON lines", [("line 2", "content")])
    found = compare(left, left.replace(b"0.25", b"0.26"))
    assert summary(found) == [("line 2: loss", "content")]
    left = b"time,loss\n%d,0.5\n%d,0.25\n" % (CLAIMED + 1, CLAIMED + 2)
    right = b"time,loss\n%d,0.5\n%d,0.25\n" % (FOUND + 1, FOUND + 2)
    found = compare(left, right, "log.csv")
    assert (found.format, found.nature) == ("CSV", "date")
    found = compare(left, right.replace(b"0.25", b"0.26"), "log.csv")
    assert found.parts[-1].where == "line 3, column loss"
    assert compare(b"a,b\n1.0,2\n", b"a,b\n1.00,2\n", "a.csv").nature == "packaging"


def test_the_same_lines_in_another_order_are_told_from_other_lines():
    assert compare(b"a\nb\nc\n", b"a\nc\nb\n").nature == "order"
    assert compare(b"a\nb\n", b"a\nb\nb\n").nature == "content"
    assert compare(b"a\n\nb\n", b"a\nx\nb\n").parts[0].claimed == ""


def joined(lines):
    return "".join(f"{line}\n" for line in lines).encode()


@given(st.lists(st.text("abc", max_size=3), max_size=8).flatmap(
    lambda lines: st.tuples(st.just(lines), st.permutations(lines))))  # fmt: skip
def test_lines_in_another_order_differ_in_as_many_places_as_moved(pair):
    lines, moved = pair
    found = compare_text(joined(lines), joined(moved), CONTEXT)
    places = [number for number, (a, b) in enumerate(zip(lines, moved, strict=True), 1) if a != b]
    if places:
        assert (found.nature, found.count) == ("order", len(places))
        assert [part.where for part in found.parts] == [f"line {number}" for number in places]
    else:
        assert found.nature == "packaging"


@pytest.mark.parametrize(("left", "right"), [("aabb", "abbb"), ("aab", "ab"), ("ab", "cd")])
def test_lines_that_occur_more_or_less_often_are_other_lines(left, right):
    pair = ("".join(f"{line}\n" for line in lines).encode() for lines in (left, right))
    assert compare_text(*pair, CONTEXT).nature == "content"


def test_the_order_of_many_lines_takes_no_more_memory_than_that_of_few():
    def peak(count):
        lines = [b"%d\n" % number for number in range(count)]
        left, right = b"".join(lines), b"".join(reversed(lines))
        tracemalloc.start()
        found = compare_text(left, right, CONTEXT)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert found.nature == "order"
        return peak

    # Only the numbers of lines are longer.
    assert peak(4_000) < 1.2 * peak(400)


def test_all_lines_in_another_order_count_though_few_are_kept():
    lines = [str(number) for number in range(5_000, 5_040)]
    found = compare_text(joined(lines), joined(lines[::-1]), CONTEXT)
    assert (found.nature, found.count, len(found.parts)) == ("order", 40, 20)
    assert {part.nature for part in found.parts} == {"order"}


def test_only_a_line_feed_ends_a_line():
    left, right = ("a\u2028b\x0bc\r\nd\n".encode(), "a\u2028b\x0bc\r\ne\n".encode())
    assert facts(compare_text(left, right, CONTEXT)) == [("line 2", "d", "e")]


def test_a_text_that_goes_on_is_compared_to_the_end_of_file():
    found = compare_text(b"a\n", b"a\nb\n", CONTEXT)
    assert facts(found) == [("line 2", "end of file", "b")]
    assert compare_text(b"a\nb\n", b"a\n", CONTEXT).parts[0].found == "end of file"
    assert compare_text(b"a", b"a\n", CONTEXT).count == 1  # the last line feed


@pytest.mark.parametrize("data", [b"a\0b\n", b"\xff\xfe", b"caf\xe9\n"])
def test_bytes_that_are_not_text_in_utf_8_are_not_compared_as_text(data):
    with pytest.raises((NotComparableError, UnicodeDecodeError)):
        compare_text(data, b"a\n", CONTEXT)


def test_the_size_of_a_text_is_bounded(monkeypatch):
    monkeypatch.setattr(texts, "MAX_TEXT_BYTES", 4)
    assert compare_text(b"1234", b"1235", CONTEXT).count == 1
    for pair in ((b"12345", b"1"), (b"1", b"12345")):
        with pytest.raises(NotComparableError, match="too large"):
            compare_text(*pair, CONTEXT)


# --- JSON -----------------------------------------------------------------------------------------


def test_a_document_is_compared_leaf_by_leaf():
    found = compare_json(b'{"a": [1, 2], "b": 0}', b'{"a": [1, 3], "b": 0}', CONTEXT)
    assert (found.format, found.equal) == ("JSON", ("a[0]", "b"))
    assert facts(found) == [("a[1]", "2", "3")]


@pytest.mark.parametrize("data", [b"1", b'"text"', b"null"])
def test_a_document_of_one_leaf_is_not_compared_as_json(data):
    with pytest.raises(NotComparableError, match="neither an object nor an array"):
        compare_json(data, b"{}", CONTEXT)


def test_the_size_of_a_document_is_bounded(monkeypatch):
    monkeypatch.setattr(texts, "MAX_JSON_BYTES", 3)
    with pytest.raises(NotComparableError, match="too large"):
        compare_json(b"[1]", b"[12]", CONTEXT)
    assert compare_json(b"[1]", b"[2]", CONTEXT).count == 1


def test_lines_of_json_are_compared_by_field_and_nature():
    rows = [b'{"time": %d, "loss": 0.5}\n{"x": 1}\n' % (moment + 1) for moment in (CLAIMED, FOUND)]
    assert summary(compare_json_lines(*rows, CONTEXT)) == [("line 1: time", "date")]
    spaced = rows[0].replace(b": ", b":")
    assert compare_json_lines(rows[0], spaced, CONTEXT).nature == "packaging"


def test_the_length_of_a_line_of_json_is_bounded(monkeypatch):
    monkeypatch.setattr(texts, "MAX_JSON_BYTES", 9)
    assert compare_json_lines(b'{"a": 1}\n' * 2, b'{"a": 2}\n' * 2, CONTEXT).count == 2
    for pair in ((b'{"a": 10}\n', b'{"a": 1}\n'), (b'{"a": 1}\n', b'{"a": 10}\n')):
        with pytest.raises(NotComparableError, match="a line is too long"):
            compare_json_lines(*pair, CONTEXT)


@pytest.mark.parametrize("line", [b"1\n", b"[1]\n", b'"text"\n', b"null\n"])
def test_lines_that_are_not_objects_are_not_compared_as_json_lines(line):
    good = b'{"a": 1}\n'
    for pair in ((good + line, good), (good, good + line)):
        with pytest.raises(NotComparableError, match="a line is not an object"):
            compare_json_lines(*pair, CONTEXT)


# --- tables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claimed", "found", "nature"),
    [
        ("0.5", "0.50", "packaging"),
        ("100", "1e2", "packaging"),
        ("0", "-0", "content"),
        ("9007199254740993", "9007199254740992", "content"),
        ("12345678901234567.1", "12345678901234567.10", "packaging"),
        ("1e500", "10e499", "packaging"),
        ("nan", "NaN", "content"),
        ("1_0", "10", "content"),
        ("left", "right", "content"),
        (f"{CLAIMED + 1}", f"{FOUND + 1}", "date"),
    ],
)
def test_a_cell_is_compared_as_a_number_if_every_reader_takes_it_for_one(claimed, found, nature):
    left, right = (f"a,b\n1,{cell}\n".encode() for cell in (claimed, found))
    assert summary(compare_csv(left, right, CONTEXT)) == [("line 2, column b", nature)]


def test_a_quoted_cell_may_have_commas_and_line_feeds():
    left, right = (b'a,b\n"1,\n2",%s\n' % cell for cell in (b"x", b"y"))
    assert facts(compare_csv(left, right, CONTEXT)) == [("line 2, column b", "x", "y")]


def test_the_name_of_a_column_is_cut_off():
    left, right = (b"%s,b\n%d,1\n" % (b"a" * 10_000, number) for number in (1, 2))
    (part,) = compare_csv(left, right, CONTEXT).parts
    assert part.where == f"line 2, column {'a' * 80}…"


def test_a_row_too_many_is_content():
    found = compare_csv(b"a,b\n1,2\n", b"a,b\n1,2\n3,4\n", CONTEXT)
    assert facts(found) == [("line 3", "end of file", "['3', '4']")]


def test_an_equal_blank_line_is_no_difference():
    found = compare_csv(b"a,b\n1,2\n\n3,4\n", b"a,b\n1,2\n\n3,4.0\n", CONTEXT)
    assert summary(found) == [("line 4, column b", "packaging")]
    found = compare_csv(b"a,b\n1,2\n\n", b"a,b\n1,2\n", CONTEXT)
    assert facts(found) == [("line 3", "[]", "end of file")]
    found = compare_csv(b"a,b\n\n", b"a,b\n1,2\n", CONTEXT)
    assert facts(found) == [("line 2", "[]", "['1', '2']")]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"a\n1\n", "not a table"),
        (b"a,b\n1\n", "not a table"),
        (b"a,b\n1,2,3\n", "not a table"),
        (b'a,b\n1,"2\n', "unexpected end of data"),
        (b'a,b\n1,"2"3\n', "expected after"),
    ],
)
def test_a_text_that_is_not_a_table_is_not_compared_as_one(data, reason):
    with pytest.raises(NotComparableError, match=reason):
        compare_csv(data, data, CONTEXT)
