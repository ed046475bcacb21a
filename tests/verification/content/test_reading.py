"""A window over a file in memory behaves as a stream of the standard library does."""

import io
import mmap
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.verification.content import reading
from capsule.verification.content.parts import NotComparableError
from capsule.verification.content.pickles import compare_pickle
from capsule.verification.content.reading import Window
from tests.verification.content.comparing import CONTEXT, zipped

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.tuples(st.none() | st.integers(-1, 12))),
        st.tuples(st.just("readline"), st.tuples(st.none() | st.integers(-1, 12))),
        st.tuples(st.just("seek"), st.tuples(st.integers(0, 12))),
        st.tuples(st.just("seek"), st.tuples(st.integers(0, 5), st.sampled_from([1, 2]))),
        st.tuples(st.just("tell"), st.just(())),
    ),
    max_size=8,
)


@given(st.binary(max_size=10) | st.text("a\n", max_size=10).map(str.encode), STEPS)
def test_reading_and_seeking_are_those_of_bytes_io(data, steps):
    window, oracle = Window(data), io.BytesIO(data)
    for method, arguments in steps:
        assert getattr(window, method)(*arguments) == getattr(oracle, method)(*arguments)


def test_a_place_before_the_beginning_is_an_error_and_changes_nothing():
    window = Window(b"12345")
    window.seek(2)
    for offset, whence in ((-1, io.SEEK_SET), (-3, io.SEEK_CUR), (-6, io.SEEK_END)):
        with pytest.raises(ValueError, match="before the beginning"):
            window.seek(offset, whence)
    assert window.tell() == 2
    assert window.seek(-2, io.SEEK_END) == 3


def test_no_piece_is_larger_than_the_bound(monkeypatch):
    monkeypatch.setattr(reading, "MAX_PIECE_BYTES", 4)
    window = Window(b"12345678")
    assert window.read(4) == b"1234"
    window.seek(3)
    for size in (5, 2**62, -1, None):
        with pytest.raises(NotComparableError, match="a piece of 5 bytes"):
            window.read(size)
    assert window.tell() == 3  # nothing was read
    window.seek(6)
    assert window.read(2**62) == b"78"  # what is left is small


def test_no_line_is_longer_than_the_bound(monkeypatch):
    monkeypatch.setattr(reading, "MAX_PIECE_BYTES", 4)
    window = Window(b"123\n12345\n1234")
    assert window.readline() == b"123\n"
    for size in (-1, None, 5):
        with pytest.raises(NotComparableError, match=r"a piece of [56] bytes"):
            window.readline(size)
    assert window.readline(4) == b"1234"
    assert [window.readline() for _ in range(3)] == [b"5\n", b"1234", b""]


def test_a_pickle_has_no_line_beyond_the_bound(monkeypatch):
    monkeypatch.setattr(reading, "MAX_PIECE_BYTES", 1_000)
    left, right = (b"\x80\x02cmodule\n" + b"n" * 2_000 + end + b"\n." for end in (b"1", b"2"))
    with pytest.raises(NotComparableError, match="a piece of 2,002 bytes"):
        compare_pickle(left, right, CONTEXT)


def test_other_readers_can_use_it_on_a_mapped_file(tmp_path):
    path = tmp_path / "archive"
    path.write_bytes(zipped({"a": b"1", "b": b"22"}))
    with path.open("rb") as stream:
        data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    window = Window(data)
    assert window.readable()
    assert window.seekable()
    with zipfile.ZipFile(window) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == {"a": b"1", "b": b"22"}
