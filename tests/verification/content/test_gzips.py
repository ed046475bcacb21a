"""gzip files are compared by their content, and then by their headers."""

import gzip
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.verification.content import gzips
from capsule.verification.content.formats import compare_content
from capsule.verification.content.gzips import compare_gzip
from capsule.verification.content.parts import Budget, Context, NotComparableError
from tests.verification.content.comparing import (
    CLAIMED,
    CONTEXT,
    FOUND,
    TIMES,
    compare,
    facts,
    summary,
)


def test_gzip_is_compared_unpacked():
    left, right = gzip.compress(b"1\n2\n", mtime=5), gzip.compress(b"1\n2\n", mtime=6)
    found = compare(left, right)
    assert (found.format, found.equal) == ("gzip", ("content",))
    assert summary(found) == [("time in the header", "date")]
    found = compare(left, gzip.compress(b"1\n3\n", mtime=6))
    assert summary(found) == [("content: line 2", "content"), ("time in the header", "date")]
    level = compare(gzip.compress(bytes(9999), 1, mtime=5), gzip.compress(bytes(9999), 9, mtime=5))
    assert level.nature == "packaging"


def test_a_gzip_file_of_any_size_is_not_copied_to_be_unpacked(monkeypatch):
    def named(mtime):
        data = gzip.compress(b"1", mtime=mtime)
        return data[:3] + b"\x08" + data[4:10] + b"n" * 2_000 + b"\0" + data[10:]

    assert compare(named(5), named(6)).format == "gzip"
    monkeypatch.setattr(gzips, "MAX_MEMBER_BYTES", 1_000)
    assert compare(named(5), named(6)).format == "bytes"


MTIMES = st.integers(0, 2**32 - 1)


@given(st.binary(max_size=50), MTIMES, MTIMES, st.integers(1, 9))
def test_equal_contents_differ_in_the_time_of_the_header_alone(data, first, second, level):
    left, right = gzip.compress(data, mtime=first), gzip.compress(data, level, mtime=second)
    found = compare_gzip(left, right, CONTEXT)
    assert found.equal == ("content",)
    if first == second:
        assert found.nature == "packaging"
    else:
        assert facts(found) == [("time in the header", str(first), str(second))]
        assert found.nature == "date"


def with_fields(extra=None, name=None, comment=None, content=b"1"):
    """Return a gzip file with optional fields of the header (RFC 1952, section 2.3.1)."""
    data = gzip.compress(content, mtime=0)
    flags = (4 * (extra is not None)) | (8 * (name is not None)) | (16 * (comment is not None))
    fields = b"" if extra is None else struct.pack("<H", len(extra)) + extra
    fields += b"".join(text + b"\0" for text in (name, comment) if text is not None)
    return data[:3] + bytes([flags]) + data[4:10] + fields + data[10:]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"name": b"a"}, {"name": b"b"}),
        ({"comment": b"a"}, {"comment": b"b"}),
        ({"extra": b"a\0b"}, {"extra": b"a\0c"}),
        ({"name": b"a"}, {"comment": b"a"}),
        ({"name": b""}, {}),
        ({"extra": b"x\0", "name": b"n", "comment": b"c"},
         {"extra": b"x\0", "name": b"n", "comment": b"d"}),
    ],
)  # fmt: skip
def test_names_comments_and_extra_fields_are_content(left, right):
    files = with_fields(**left), with_fields(**right)
    assert {gzip.decompress(each) for each in files} == {b"1"}
    assert summary(compare_gzip(*files, CONTEXT)) == [("header", "content")]


def test_a_header_is_compared_whatever_the_content():
    contents = (b'{"time": %d}' % (moment + 1) for moment in (CLAIMED, FOUND))
    left, right = (with_fields(name=name, content=next(contents)) for name in (b"500", b"3"))
    found = compare_gzip(left, right, CONTEXT)
    assert summary(found) == [("content: time", "date"), ("header", "content")]
    assert found.equal == ()


def test_the_operating_system_and_the_level_are_packaging():
    plain = gzip.compress(b"1", mtime=0)
    other = plain[:8] + bytes([plain[8] ^ 2, plain[9] ^ 1]) + plain[10:]
    assert compare_gzip(plain, other, CONTEXT).nature == "packaging"


@pytest.mark.parametrize(
    "bend",
    [
        lambda data: data + data,
        lambda data: data + b"\0",
        lambda data: data[:-1],
        lambda data: data[:12],
    ],
    ids=["two members", "padding", "cut off in the trailer", "cut off in the content"],
)
def test_a_file_that_is_not_one_whole_member_is_not_compared(bend):
    plain = gzip.compress(b"12345", mtime=0)
    for pair in ((bend(plain), plain), (plain, bend(plain))):
        with pytest.raises(NotComparableError, match="cut off, or more than one member"):
            compare_gzip(*pair, CONTEXT)


def test_a_content_that_is_too_large_is_not_compared(monkeypatch):
    monkeypatch.setattr(gzips, "MAX_MEMBER_BYTES", 99)
    sizes = [gzip.compress(bytes(size), mtime=0) for size in (98, 101)]
    assert compare_gzip(sizes[0], sizes[0], CONTEXT).equal == ("content",)
    with pytest.raises(NotComparableError, match="too large"):
        compare_gzip(*sizes, CONTEXT)


def test_the_bytes_of_both_contents_are_taken_from_the_budget():
    data = gzip.compress(b"12345")
    context = Context(TIMES, compare_content, Budget(10))
    compare_gzip(data, data, context)
    assert context.budget.left == 0
    with pytest.raises(NotComparableError, match="are to be unpacked"):
        compare_gzip(data, data, context)
