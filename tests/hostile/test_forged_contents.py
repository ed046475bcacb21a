"""Outputs that hold something else, forged so that they pass for the same content.

Each forgery has a twin by the same writer that differs in a date or in packaging alone, which is
what the verdict ``reproduced-content`` accepts. The others must be told as other content.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import pickle
import struct
import zipfile
import zlib

import numpy as np
import pytest

from capsule.verification.content.events import record_checksum
from capsule.verification.content.formats import compare_content
from capsule.verification.content.parts import Context
from capsule.verification.content.times import Span, Times, stated_span

STARTED = "2026-11-22T08:00:00+00:00"
FOUND = 1_795_341_600.0
TRUTHFUL = stated_span(STARTED, "2026-11-22T08:10:00+00:00", FOUND)
CLOCK = TRUTHFUL.start


def nature(claimed, found, name="output", span=TRUTHFUL):
    context = Context(Times(span, Span(FOUND, FOUND + 600)), compare_content)
    return compare_content(name, claimed, found, context).nature


# Archives


def zipped(year=2024, data=b"3", **facts):
    info = zipfile.ZipInfo("score.npy", (year, 1, 1, 0, 0, 0))
    for name, value in facts.items():
        setattr(info, name, value)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(info, data)
    return stream.getvalue()


def streamed(year=2024, descriptor=None):
    """Return an archive whose writer could not go back: a descriptor follows the member."""

    class Pipe(io.RawIOBase):
        def __init__(self):
            self.data = bytearray()

        def writable(self):
            return True

        def write(self, data):
            self.data += data
            return len(data)

    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w") as archive:
        archive.writestr(zipfile.ZipInfo("a", (year, 1, 1, 0, 0, 0)), b"3")
    data, start = bytes(pipe.data), bytes(pipe.data).index(b"PK\x07\x08")
    return data if descriptor is None else data[:start] + descriptor + data[start + 16 :]


def header(place, value, form="<H"):
    """Change a number in the header before the member, and leave the directory as it is."""
    data = bytearray(zipped())
    struct.pack_into(form, data, place, value)
    return bytes(data)


def twice():
    """Return an archive with two members of one name, of which readers choose either."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive, pytest.warns(UserWarning, match="Duplicate"):
        for data in (b"500", b"3"):
            archive.writestr(zipfile.ZipInfo("score.npy"), data)
    return stream.getvalue()


def renamed():
    """Let the name go on behind a NUL, at which some readers end it and others do not."""
    data = zipped().replace(b"score.npy", b"s\0ore.npy")
    return data, zipped().replace(b"score.npy", b"s\0xre.npy")


def deflated(data=b"3", hidden=b""):
    """Return an archive of a compressed member, with bytes behind the end of its stream."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("a"), data, zipfile.ZIP_DEFLATED)
    plain = stream.getvalue()
    start = plain.index(b"PK\x01\x02")
    bent = bytearray(plain[:start] + hidden + plain[start:])
    start += len(hidden)
    for place, number in ((18, start - 31), (start + 20, start - 31), (len(bent) - 6, start)):
        struct.pack_into("<I", bent, place, number)
    return bytes(bent)


def shortened(data):
    """Let header and directory state that a member has one byte, after which readers stop."""
    bent = bytearray(deflated(data))
    start = bent.index(b"PK\x01\x02")
    for place in (14, start + 16):
        struct.pack_into("<I", bent, place, zlib.crc32(data[:1]))
    for place in (22, start + 24):
        struct.pack_into("<I", bent, place, 1)
    return bytes(bent)


def ended(place, value):
    """Change a number in the record at the end of an archive."""
    data = bytearray(zipped())
    struct.pack_into("<H", data, len(data) - 22 + place, value)
    return bytes(data)


LINK = (0o120777 << 16) | 0x20
UNKNOWN = struct.pack("<2H", 0x9901, 4) + b"500!"
DATED = struct.pack("<2HBI", 0x5455, 5, 1, int(CLOCK))

ARCHIVES = {
    "a-comment-of-a-member": (zipped(), zipped(comment=b"score 500")),
    "an-extra-field-of-a-member": (zipped(), zipped(extra=UNKNOWN)),
    "a-link-in-place-of-a-file": (zipped(), zipped(external_attr=LINK)),
    "two-members-of-one-name": (zipped(), twice()),
    "a-name-behind-the-name": renamed(),
    "a-header-with-another-size": (zipped(), header(22, 500, "<I")),
    "a-header-with-another-method": (zipped(), header(8, 8)),
    "a-header-with-a-flag": (zipped(), header(6, 1 << 11)),
    "a-header-with-another-checksum": (zipped(), header(14, 500, "<I")),
    "data-in-place-of-a-descriptor": (streamed(), streamed(descriptor=b"score of run: 50")),
    "data-behind-the-end-of-a-stream": (deflated(), deflated(hidden=b"score 500")),
    "data-behind-the-size-of-a-member": (deflated(), shortened(b"3 but also 500")),
    "a-number-of-a-disk": (zipped(), ended(4, 500)),
    "a-first-disk": (zipped(), ended(6, 500)),
    "two-numbers-of-members": (zipped(), ended(8, 500)),
    "data-behind-a-descriptor": (streamed(), streamed(descriptor=b"PK\x07\x08" + b"5" * 20)),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_what_an_archive_says_twice_or_beside_its_members_is_content(name):
    claimed, found = ARCHIVES[name]
    assert nature(claimed, found) == nature(found, claimed) == "content"


def test_the_dates_of_archives_of_the_same_writers_are_dates():
    assert nature(zipped(), zipped(2025)) == "date"
    assert nature(streamed(), streamed(2025)) == "date"
    assert nature(zipped(), zipped(extra=DATED)) == "date"


def compressed(extra=b"", name=b"", comment=b"", mtime=0):
    """Return a gzip file with the fields of its header that Python does not write."""
    flags = (4 if extra else 0) | (8 if name else 0) | (16 if comment else 0)
    fields = struct.pack("<H", len(extra)) + extra if extra else b""
    fields += b"".join(text + b"\0" for text in (name, comment) if text)
    data = gzip.compress(b"3", mtime=mtime)
    return data[:3] + bytes([flags]) + data[4:10] + fields + data[10:]


@pytest.mark.parametrize("field", ["extra", "name", "comment"])
def test_what_the_header_of_a_gzip_file_says_is_content(field):
    claimed = compressed(**{field: b"500"})
    assert gzip.decompress(claimed) == b"3"
    assert nature(claimed, compressed(**{field: b"3"})) == "content"
    assert nature(claimed, compressed()) == "content"
    assert nature(claimed, compressed(**{field: b"500"}, mtime=9)) == "date"


def test_a_date_in_the_content_of_a_gzip_file_hides_no_name():
    claimed, found = (compressed(name=name) for name in (b"500", b"3"))
    left, right = (json.dumps({"saved": moment + 1}).encode() for moment in (CLOCK, FOUND))
    packed = gzip.compress(left, mtime=0)[10:], gzip.compress(right, mtime=0)[10:]
    assert nature(gzip.compress(left, mtime=0), gzip.compress(right, mtime=0)) == "date"
    assert nature(claimed[:14] + packed[0], found[:12] + packed[1]) == "content"


def test_more_than_one_member_of_gzip_is_content():
    assert nature(gzip.compress(b"3") + gzip.compress(b"00"), gzip.compress(b"3")) == "content"


# Pickles, arrays, event files


def numbered(keys):
    """Return a pickle that keeps 200 and 3 under these numbers, and returns that of the lower."""
    kept = (
        b"K" + bytes([score]) + b"r" + struct.pack("<I", key)
        for score, key in zip((200, 3), keys, strict=True)
    )
    return b"\x80\x02(" + b"".join(kept) + b"1j" + struct.pack("<I", min(keys)) + b"."


def test_a_reference_within_a_pickle_is_no_date():
    """A program that numbers its values by the clock, so that references look like dates."""
    claimed = numbered((int(CLOCK), int(CLOCK) + 1))
    found = numbered((int(FOUND) + 1, int(FOUND)))
    # The faster reader would make room for every number up to these.
    assert [pickle._loads(each) for each in (claimed, found)] == [200, 3]
    assert nature(claimed, found) == "content"
    saved = (pickle.dumps({"saved": moment + 1}, 2) for moment in (CLOCK, FOUND))
    assert nature(*saved) == "date"


def test_an_array_of_pickled_objects_is_never_taken_for_equal():
    stored = []
    for score in (500, 3):
        stream = io.BytesIO()
        np.savez(stream, scores=np.array([score, None], dtype=object))
        stored.append(stream.getvalue())
    assert nature(*stored) == "content"
    bent = (data.replace(b"'|O'", b"'O8'", 1) for data in stored)
    assert nature(*bent) == "content"


def events(*fields):
    """Return an event file of one event with the given fields, encoded."""
    event = b"".join(fields)
    head = struct.pack("<Q", len(event))
    return head + record_checksum(head) + event + record_checksum(event)


def test_only_a_double_is_the_time_of_an_event():
    def wall(moment):
        return b"\x09" + struct.pack("<d", moment)

    def hidden(text):
        return b"\x0a" + bytes([len(text)]) + text

    assert nature(events(wall(CLOCK)), events(wall(FOUND))) == "date"
    claimed, found = (events(wall(CLOCK), hidden(text)) for text in (b"score 500", b"score 3"))
    assert nature(claimed, found) == "content"


def test_an_event_with_a_wrong_checksum_makes_its_file_incomparable():
    data = bytearray(events(b"\x09" + struct.pack("<d", CLOCK)))
    data[-1] ^= 1
    assert nature(bytes(data), events(b"\x09" + struct.pack("<d", FOUND))) == "content"


def test_metadata_twice_makes_safetensors_incomparable():
    def saved(*scores, spaces=""):
        head = ",".join(f'"__metadata__":{{"score":"{score}"}}' for score in scores)
        data = f"{{{head}{spaces}}}".encode()
        return struct.pack("<Q", len(data)) + data

    assert nature(saved("500", "3"), saved("3")) == "content"
    assert nature(saved("500"), saved("3")) == "content"
    assert nature(saved("3", spaces=" "), saved("3")) == "packaging"


# Texts


@pytest.mark.parametrize(
    ("claimed", "found", "expected"),
    [
        ("0.50", "0.5", "packaging"),
        ("1e3", "1000", "packaging"),
        ("9007199254740993", "9007199254740992", "content"),  # one float, two integers
        ("1_000", "1000", "content"),  # a number to Python alone
        ("\u0661", "1", "content"),
        ("1e500", "1e400", "content"),  # infinite as floats
        ("-0.0", "0.0", "content"),
        ("12345678901234567.1", "12345678901234567.2", "content"),
    ],
)
def test_cells_of_a_table_are_compared_as_the_numbers_that_they_are(claimed, found, expected):
    left, right = (f"step,score\n1,{cell}\n".encode() for cell in (claimed, found))
    assert nature(left, right, "scores.csv") == expected


@pytest.mark.parametrize(
    ("claimed", "found"),
    [
        ('{"score": 3, "score": 500}', '{"score": 500}'),
        ('{"score": 1e500}', '{"score": 1e400}'),
        ('{"score": true}', '{"score": 1}'),
        ('{"score": 9007199254740993.0}', '{"score": 9007199254740992.0}'),  # one float
        ('{"score": 1e-400}', '{"score": 5e-500}'),
        ('{"score": "\\u0000"}', f'{{"score": "{int(FOUND) + 1}"}}'),  # the sign of a date
    ],
)
def test_json_that_can_be_read_in_two_ways_is_content(claimed, found):
    assert nature(claimed.encode(), found.encode()) == "content"
    assert nature(b'{"score": 5.0e1}', b'{"score": 50.0}') == "packaging"


# Dates


@pytest.mark.parametrize(
    ("started", "finished"),
    [
        ("yesterday", "today"),  # no times: everything below 2e9 was a date
        (STARTED, "never"),
        ("1970-01-01T00:00:00+00:00", STARTED),
        ("0001-01-01T00:00:00+00:00", "9999-12-31T00:00:00+00:00"),
        (STARTED, "9000-01-01T00:00:00+00:00"),
        ("2026-11-22T09:00:00+00:00", STARTED),
    ],
)
def test_a_score_is_no_date_of_whatever_time_the_signer_names(started, finished):
    """The program writes the clock where its score belongs, and its signer puts a score there."""
    span = stated_span(started, finished, FOUND)
    for score in (1.0, 500.0, 9000.0):
        left, right = (json.dumps({"score": value}).encode() for value in (score, FOUND + 1))
        assert nature(left, right, span=span) == "content"


def test_dates_of_the_time_that_the_signer_names_are_dates():
    left, right = (json.dumps({"saved": moment}).encode() for moment in (CLOCK + 1, FOUND + 1))
    assert nature(left, right) == "date"
    assert nature(left, right, span=Span(math.nan, math.nan)) == "content"
