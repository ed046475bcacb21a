"""The header before a member of a zip archive must say what the directory says."""

import io
import struct
import zipfile
import zlib
from datetime import date

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.verification.content import zip_headers
from capsule.verification.content.parts import Budget, NotComparableError
from capsule.verification.content.zip_headers import checked_header
from tests.verification.content.comparing import compare, zipped


def test_bytes_beside_the_members_make_an_archive_incomparable():
    plain = zipped({"a": b"1"})
    hidden = plain[:31] + zipped({"a": b"1"}, 2025)[31:]  # a control: dates in the directory only
    assert compare(plain, hidden).nature == "date"
    start = plain.index(b"PK\x01\x02")
    stream = bytearray(plain[:start] + b"score=9000" * 9 + plain[start:])
    place = stream.index(b"PK\x05\x06") + 16
    stream[place : place + 4] = struct.pack("<I", start + 90)
    assert zipfile.ZipFile(io.BytesIO(bytes(stream))).read("a") == b"1"
    found = compare(plain, bytes(stream))
    assert (found.format, found.nature) == ("bytes", "content")


def with_extra(here=b"", there=b"", size=1):
    """Return an archive of one stored byte with extra fields in its header and its directory."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        info = zipfile.ZipInfo("a")
        archive.writestr(info, b"1")
        info.extra = there
    data = bytearray(stream.getvalue())
    data[18:26] = struct.pack("<2I", size, size)
    data[28:30] = struct.pack("<H", len(here))
    data[31:31] = here
    place = data.index(b"PK\x05\x06") + 16
    data[place : place + 4] = struct.pack("<I", data.index(b"PK\x01\x02"))
    return bytes(data)


def record(kind, body):
    return struct.pack("<2H", kind, len(body)) + body


ONE = struct.pack("<Q", 1)
IN_EXTRA = 0xFFFFFFFF
DATE = struct.pack("<I", 1_732_262_001)


@pytest.mark.parametrize(
    ("extra", "nature"),
    [
        ({"here": record(1, ONE * 2), "size": IN_EXTRA}, "packaging"),
        ({"here": record(1, ONE * 2)}, "packaging"),
        ({"here": record(1, ONE + struct.pack("<Q", 9)), "size": IN_EXTRA}, "content"),
        ({"size": IN_EXTRA}, "content"),
        ({"here": record(1, b"score500")}, "content"),
        ({"there": record(1, b"score500")}, "content"),
        ({"there": record(1, ONE)}, "packaging"),
        ({"here": record(0x5455, b"\1" + DATE), "there": record(0x5455, b"\1" + DATE)}, "date"),
        ({"here": record(0x5455, b"\3" + DATE * 2), "there": record(0x5455, b"\3" + DATE)}, "date"),
        ({"here": record(0x5455, b"\2" + DATE), "there": record(0x5455, b"\2")}, "date"),
        ({"here": record(0x5455, b"score500")}, "content"),
        ({"here": record(0x5455, b"")}, "content"),
        ({"here": record(0x5455, b"\1" + DATE) * 2}, "content"),
        ({"here": b"UT\xff\xff"}, "content"),
        ({"here": record(0x4246, b"ZZZ")}, "packaging"),
    ],
)
def test_an_extra_field_hides_nothing(extra, nature):
    assert compare(with_extra(), with_extra(**extra)).nature == nature


def test_arrays_saved_together_have_sizes_in_an_extra_field():
    streams = [io.BytesIO(), io.BytesIO()]
    for stream, save in zip(streams, (np.savez, np.savez_compressed), strict=True):
        save(stream, a=np.arange(99))
    left, right = (stream.getvalue() for stream in streams)
    assert (compare(left, right).format, compare(left, right).nature) == ("zip", "packaging")


def stated(data):
    """Check the header of an archive's only member, up to the directory."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (info,) = archive.infolist()
        return checked_header(data, info, data.index(b"PK\x01\x02"), Budget())


@given(st.dates(date(1980, 1, 1), date(2107, 12, 31)), st.times())
def test_the_date_of_a_header_is_the_one_that_was_written(day, time):
    # Seconds are even (APPNOTE 4.4.6).
    written = (day.year, day.month, day.day, time.hour, time.minute, time.second // 2 * 2)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(zipfile.ZipInfo("a", written), b"1")
    assert stated(stream.getvalue()).date == written


def test_a_header_states_its_version_and_extra_fields_without_sizes_and_filler():
    plain = stated(with_extra())
    assert (plain.version, plain.extra_dates) == (20, ())
    assert b"".join(plain.extra) == b""
    dated, unknown = record(0x5455, b"\1" + DATE), record(0x9901, b"500")
    filler, sizes = record(0x4246, b"ZZZ"), record(1, ONE * 2)
    found = stated(with_extra(sizes + dated + filler + unknown, dated + unknown))
    assert found.extra_dates == (dated, dated)
    assert b"".join(found.extra) == unknown * 2


class Pipe(io.RawIOBase):
    """A file in which a writer cannot go back."""

    def __init__(self):
        self.data = b""

    def writable(self):
        return True

    def write(self, data):
        self.data += bytes(data)
        return len(data)


def streamed(method=zipfile.ZIP_STORED, *, zip64=False, year=2024):
    """Return an archive whose sizes follow the member, and the place of the descriptor."""
    pipe = Pipe()
    info = zipfile.ZipInfo("a", (year, 1, 1, 0, 0, 0))
    info.compress_type = method
    with (
        zipfile.ZipFile(pipe, "w") as archive,
        archive.open(info, "w", force_zip64=zip64) as member,
    ):
        member.write(b"12345")
    return pipe.data, pipe.data.index(b"PK\x07\x08")


def moved(data, place, number):
    """Remove bytes before the directory, and correct the place of the directory."""
    shorter = bytearray(data[:place] + data[place + number :])
    end = shorter.index(b"PK\x05\x06")
    shorter[end + 16 : end + 20] = struct.pack("<I", shorter.index(b"PK\x01\x02"))
    return bytes(shorter)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_sizes_may_follow_the_member(method):
    data, place = streamed(method)
    assert stated(data).version == 20
    # The signature of a data descriptor is optional (APPNOTE 4.3.9.3).
    assert stated(moved(data, place, 4)).version == 20
    with pytest.raises(NotComparableError, match="bytes of no member"):
        stated(moved(data, place, 16))  # without the descriptor


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_sizes_that_follow_the_member_may_have_eight_bytes(method):
    data, place = streamed(method, zip64=True)
    other, _ = streamed(method, zip64=True, year=2025)
    found = compare(data, other)
    assert (found.format, found.nature) == ("zip", "date")
    assert stated(moved(data, place, 4)) == stated(data)
    with pytest.raises(NotComparableError, match="bytes of no member"):
        stated(moved(data, place, 24))  # without the descriptor


@pytest.mark.parametrize("place", [*range(35, 51), *range(60, 80)])
def test_a_size_of_eight_bytes_that_contradicts_the_directory_is_rejected(place):
    data = bytearray(streamed(zip64=True)[0])
    assert data[31:35] == struct.pack("<2H", 1, 16)  # the record with two sizes in the header
    assert data[56:60] == b"PK\x07\x08"
    data[place] ^= 1
    with pytest.raises(NotComparableError, match="contradicts the directory"):
        stated(bytes(data))


@pytest.mark.parametrize("place", range(4, 16))
def test_a_descriptor_that_contradicts_the_directory_is_rejected(place):
    data, start = streamed()
    bent = bytearray(data)
    bent[start + place] ^= 1
    with pytest.raises(NotComparableError, match="contradicts the directory"):
        stated(bytes(bent))


# The fields of a local file header by their places (APPNOTE 4.3.7).
FIELDS = {"flags": 6, "method": 8, "checksum": 14, "compressed size": 18, "size": 22}


@pytest.mark.parametrize("field", FIELDS)
def test_a_header_that_contradicts_the_directory_is_rejected(field):
    data = bytearray(zipped({"a": b"12345"}))
    stated(bytes(data))
    data[FIELDS[field]] ^= 2
    with pytest.raises(NotComparableError, match="contradicts the directory"):
        stated(bytes(data))


def test_a_stored_member_has_one_size():
    data = bytearray(zipped({"a": b"12345"}, method=zipfile.ZIP_STORED))
    start = data.index(b"PK\x01\x02")
    for place in (22, start + 24):  # the size in the header, and in the directory
        data[place : place + 4] = struct.pack("<I", 3)
    with pytest.raises(NotComparableError, match="contradicts the directory"):
        stated(bytes(data))


# --- the content of a member ----------------------------------------------------------------------

COMPRESSED = [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2]


def longer(data, hidden):
    """Return an archive of one member with further bytes in it, and with its size corrected."""
    start = data.index(b"PK\x01\x02")
    packed = int.from_bytes(data[start + 20 : start + 24], "little") + len(hidden)
    bent = bytearray(data[:start] + hidden + data[start:])
    for place in (18, start + len(hidden) + 20):
        bent[place : place + 4] = struct.pack("<I", packed)
    end = bent.index(b"PK\x05\x06")
    bent[end + 16 : end + 20] = struct.pack("<I", start + len(hidden))
    return bytes(bent)


@pytest.mark.parametrize("method", COMPRESSED)
@pytest.mark.parametrize("pieces", [1, 1 << 20])
def test_nothing_lies_between_the_end_of_a_stream_and_that_of_its_member(
    method, pieces, monkeypatch
):
    monkeypatch.setattr(zip_headers, "_PIECE_BYTES", pieces)
    plain = zipped({"a": b"12345" * 99}, method=method)
    bent = longer(plain, b"score 500")
    assert zipfile.ZipFile(io.BytesIO(bent)).read("a") == b"12345" * 99
    assert stated(plain).version == {zipfile.ZIP_DEFLATED: 20, zipfile.ZIP_BZIP2: 46}[method]
    with pytest.raises(NotComparableError, match="bytes behind its end"):
        stated(bent)
    assert compare(plain, bent).format == "bytes"


def test_a_stream_has_no_more_bytes_than_its_member():
    plain = zipped({"a": b"1"})
    bent = bytearray(zipped({"a": b"1" + b" score 500"}))
    start = bent.index(b"PK\x01\x02")
    for checksum, size in ((14, 22), (start + 16, start + 24)):
        bent[checksum : checksum + 4] = struct.pack("<I", zlib.crc32(b"1"))
        bent[size : size + 4] = struct.pack("<I", 1)
    assert zipfile.ZipFile(io.BytesIO(bytes(bent))).read("a") == b"1"
    assert compare(plain, bytes(bent)).format == "bytes"


def test_a_stream_without_an_end_is_rejected():
    data = zipped({"a": b"12345" * 99})
    size = data.index(b"PK\x01\x02") - 31
    for number in range(1, size + 1):
        cut = bytearray(moved(data, 31 + size - number, number))
        for place in (18, cut.index(b"PK\x01\x02") + 20):
            cut[place : place + 4] = struct.pack("<I", size - number)
        with pytest.raises(NotComparableError, match="cut off"):
            stated(bytes(cut))


@pytest.mark.parametrize("method", COMPRESSED)
def test_a_bomb_is_unpacked_in_pieces_up_to_the_budget(method, monkeypatch):
    monkeypatch.setattr(zip_headers, "_PIECE_BYTES", 1_000)
    data = zipped({"a": bytes(100_000)}, method=method)
    budget = Budget(10_500)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (info,) = archive.infolist()
    with pytest.raises(NotComparableError, match="are to be unpacked"):
        checked_header(data, info, data.index(b"PK\x01\x02"), budget)
    assert budget.left == -500
    whole = Budget(100_000)
    checked_header(data, info, data.index(b"PK\x01\x02"), whole)
    assert whole.left == 0


def test_a_member_of_another_compression_is_not_compared():
    with pytest.raises(NotComparableError, match="compression method 14"):
        stated(zipped({"a": b"1"}, method=zipfile.ZIP_LZMA))


def test_a_member_does_not_reach_into_what_follows():
    data = bytearray(zipped({"a": b"12345"}, method=zipfile.ZIP_STORED))
    start = data.index(b"PK\x01\x02")
    for place in (18, 22, start + 20, start + 24):
        data[place : place + 4] = struct.pack("<I", 2**31)
    with pytest.raises(NotComparableError, match="contradicts the directory"):
        stated(bytes(data))
