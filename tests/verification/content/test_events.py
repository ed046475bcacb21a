"""Event files of TensorBoard are compared record by record, without their times."""

import struct

import pytest

from capsule.verification.content import events
from capsule.verification.content.events import compare_events, record_checksum
from capsule.verification.content.formats import compare_content
from capsule.verification.content.parts import Budget, Context, NotComparableError
from tests.verification.content.comparing import CONTEXT, TIMES, compare, event, framed


def test_the_checksum_of_records_is_crc32c():
    assert record_checksum(b"123456789") == (
        (((0xE3069283 >> 15) | (0xE3069283 << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    ).to_bytes(4, "little")  # RFC 3720 has the value before the mask


def test_event_files_are_compared_without_their_times():
    def events(time, loss):
        return framed(b"\x09" + struct.pack("<d", time) + b"\x1a\x0dbrain.Event:2") + event(
            time + 1, 5, "loss", loss
        )

    found = compare(events(1.0, 0.5), events(2.0, 0.5))
    assert (found.format, found.nature) == ("TensorBoard events", "date")
    found = compare(events(1.0, 0.5), events(2.0, 0.25))
    last = found.parts[-1]
    assert (last.where, last.claimed) == ("record 2", "step 5, loss = 0.5")
    assert last.found == "step 5, loss = 0.25"
    found = compare(events(1.0, 0.5), events(1.0, 0.5) + event(3.0, 6, "loss", 0.1))
    assert (found.parts[0].where, found.parts[0].claimed) == ("record 3", "end of file")
    broken = events(2.0, 0.5)[:-1] + b"\0"
    assert compare(events(1.0, 0.5), broken).format == "bytes"


def record_of(size, time):
    """Return a record with an event of so many bytes, whose last field is a text."""
    head = b"\x09" + struct.pack("<d", time) + b"\x1a"
    rest = size - len(head) - 1
    return framed(head + bytes([rest]) + b"x" * rest)


def test_a_record_that_is_too_large_is_not_copied(monkeypatch):
    monkeypatch.setattr(events, "MAX_MEMBER_BYTES", 100)
    pairs = {size: (record_of(size, 1.0), record_of(size, 2.0)) for size in (100, 101)}
    assert compare(*pairs[100]).format == "TensorBoard events"
    assert compare(*pairs[101]).format == "bytes"
    with pytest.raises(NotComparableError, match="a record is too large"):
        compare_events(*pairs[101], CONTEXT)


def test_the_records_that_differ_are_taken_from_the_budget():
    equal, pair = event(1.0, 5, "loss", 0.5), (record_of(50, 1.0), record_of(50, 2.0))
    left, right = (equal + each for each in pair)
    context = Context(TIMES, compare_content, Budget(100))
    assert compare_events(left, right, context).nature == "date"
    assert context.budget.left == 0
    with pytest.raises(NotComparableError, match="are to be unpacked"):
        compare_events(left, left + equal, context)


def test_an_event_with_too_many_fields_is_compared_as_bytes(monkeypatch):
    monkeypatch.setattr(events, "_MAX_FIELDS", 3)
    for fields, expected in ((3, "TensorBoard events"), (4, "bytes")):
        left, right = (
            framed(b"\x10\x01" * (fields - 1) + end) for end in (b"\x10\x01", b"\x10\x02")
        )
        assert compare(left, right).format == expected
