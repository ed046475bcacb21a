"""Files of no known format are compared by the place of their first difference."""

import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.verification.content.binary import compare_binary
from tests.verification.content.comparing import CONTEXT, compare, facts


def test_bytes_of_no_format_are_compared_by_place():
    found = compare(b"\xff\x00\x01" * 5, b"\xff\x00\x02" * 5)
    assert (found.format, found.parts[0].where) == ("bytes", "byte 2")


TAILS = st.lists(st.binary(max_size=4), min_size=2, max_size=2).filter(
    lambda tails: tails[0][:1] != tails[1][:1]
)


@given(st.binary(max_size=9), TAILS)
def test_the_first_difference_is_where_the_common_beginning_ends(common, tails):
    found = compare_binary(common + tails[0], common + tails[1], CONTEXT)
    assert (found.count, found.nature) == (1, "content")
    assert found.parts[0].where == f"byte {len(common)}"


@pytest.mark.parametrize(
    ("left", "right", "shown"),
    [
        (b"ab\x0a", b"ab\xff", ("byte 2", "0x0a of 3 bytes", "0xff of 3 bytes")),
        (b"ab", b"abc", ("byte 2", "end of file of 2 bytes", "0x63 of 3 bytes")),
        (b"", b"a", ("byte 0", "end of file of 0 bytes", "0x61 of 1 byte")),
    ],
)
def test_the_byte_and_the_size_are_shown(left, right, shown):
    assert facts(compare_binary(left, right, CONTEXT)) == [shown]


@pytest.mark.parametrize("place", [(1 << 20) - 1, 1 << 20, (1 << 20) + 1])
def test_a_difference_is_found_around_the_border_of_two_pieces(place):
    left, right = bytearray((1 << 20) + 2), bytearray((1 << 20) + 2)
    right[place] = 1
    (found,) = facts(compare_binary(bytes(left), bytes(right), CONTEXT))
    assert found == (f"byte {place:,}", "0x00 of 1,048,578 bytes", "0x01 of 1,048,578 bytes")


def test_mapped_files_are_compared(tmp_path):
    maps = []
    for name, data in (("a", b"123"), ("b", b"124")):
        (tmp_path / name).write_bytes(data)
        with (tmp_path / name).open("rb") as stream:
            maps.append(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    assert facts(compare_binary(*maps, CONTEXT))[0][0] == "byte 2"
