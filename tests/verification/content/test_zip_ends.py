"""The records behind the directory of a zip archive state nothing but the archive's own facts."""

import io
import struct
import zipfile

import numpy as np
import pytest
import torch

from capsule.verification.content.parts import NotComparableError
from capsule.verification.content.zip_ends import checked_end
from tests.verification.content.comparing import compare, npz, saved, zipped

END = 22  # bytes of the last record of an archive without a comment (APPNOTE 4.3.16)
RECORD, LOCATOR = 56, 20  # bytes of the records of Zip64


def checked(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return checked_end(data, archive.start_dir, len(archive.infolist()))


def zip64(data, *, versions=(45, 45), elsewhere=False):
    """Return an archive with the records of Zip64, which may have the only numbers."""
    *_, members, size, start, _ = struct.unpack("<4s4H2LH", data[-END:])
    facts = (0xFFFF, 0xFFFF, 2**32 - 1, 2**32 - 1) if elsewhere else (members, members, size, start)
    record = struct.pack(
        "<4sQ2H2L4Q", b"PK\x06\x06", 44, *versions, 0, 0, members, members, size, start
    )
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, start + size, 1)
    return data[:-END] + record + locator + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, *facts, 0)


def test_the_archives_of_the_real_libraries_are_accepted():
    assert checked(zipped({"a": b"1", "b": b"2"})) == ()
    assert checked(npz(a=np.ones(3))) == ()
    assert len(checked(saved({"w": torch.ones(3)}))) == 2  # torch always writes Zip64


@pytest.mark.parametrize("elsewhere", [False, True])
def test_numbers_may_be_in_the_record_of_zip64_alone(elsewhere):
    plain = zipped({"a": b"1", "b": b"2"})
    large = zip64(plain, versions=(20, 45), elsewhere=elsewhere)
    assert checked(large) == (20, 45)
    assert compare(plain, large).nature == "packaging"


@pytest.mark.parametrize("place", range(4, END))
def test_no_field_of_the_last_record_is_ignored(place):
    plain = zipped({"a": b"1"})
    bent = bytearray(plain)
    bent[place - END] ^= 1
    assert compare(plain, bytes(bent)).format == "bytes"


@pytest.mark.parametrize(
    "place", [place for place in range(RECORD + LOCATOR) if place not in range(12, 16)]
)
def test_no_field_of_the_records_of_zip64_is_ignored(place):
    plain = zip64(zipped({"a": b"1"}))
    bent = bytearray(plain)
    bent[place - RECORD - LOCATOR - END] ^= 1
    assert compare(plain, bytes(bent)).format == "bytes"


@pytest.mark.parametrize("number", range(4))
def test_without_zip64_no_number_may_be_elsewhere(number):
    plain = zipped({"a": b"1"})
    places = ((8, 2), (10, 2), (12, 4), (16, 4))
    start, size = places[number]
    bent = bytearray(plain)
    bent[start - END : start - END + size] = b"\xff" * size
    with zipfile.ZipFile(io.BytesIO(plain)) as archive:
        directory = archive.start_dir
    with pytest.raises(NotComparableError, match="contradicts the archive"):
        checked_end(bytes(bent), directory, 1)


def test_the_records_of_zip64_are_no_part_of_the_directory():
    plain = zip64(zipped({"a": b"1"}))
    size = int.from_bytes(plain[-10:-6], "little")
    larger = plain[:-10] + struct.pack("<L", size + RECORD + LOCATOR) + plain[-6:]
    with pytest.raises(NotComparableError, match="contradicts the archive"):
        checked(larger)
