"""Event files of TensorBoard: records framed as TFRecord does, each an ``Event`` of protobuf.

Field 1 of an event is ``wall_time``, 2 ``step``, 5 ``summary``; a summary has repeated field 1, a
value with ``tag`` (1) and ``simple_value`` (2) (event.proto and summary.proto of TensorFlow).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import zip_longest
from typing import NamedTuple

from capsule.verification.content.parts import (
    MAX_MEMBER_BYTES,
    Comparison,
    Context,
    Data,
    Findings,
    NotComparableError,
)

_HEAD_BYTES = 12  # length and its checksum
_CHECK_BYTES = 4
_MAX_FIELDS = 100_000  # of a message; each takes a hundred times the memory of its two bytes
_MASK = 0xA282EAD8  # added to a checksum after a rotation, by the format
_POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected
_WALL_TIME, _STEP, _SUMMARY = 1, 2, 5
_VALUE, _TAG, _SIMPLE = 1, 1, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class _Field(NamedTuple):
    number: int
    kind: int
    value: bytes | int


def compare_events(left: Data, right: Data, context: Context) -> Comparison:
    """Compare two event files record by record."""
    found = Findings("TensorBoard events")
    pairs = zip_longest(_records(left), _records(right))
    for number, (a, b) in enumerate(pairs, 1):
        if a is None or b is None:
            found.differs(f"record {number:,}", (_record(a, context), _record(b, context)))
        elif a != b:
            # Checksums are computed in Python, byte by byte, and so only of records that differ.
            pair = _event(a, context), _event(b, context)
            _compare_records(f"record {number:,}", *pair, found)
    return found.comparison()


def _compare_records(
    where: str, left: tuple[_Field, ...], right: tuple[_Field, ...], found: Findings
) -> None:
    rest = [tuple(each for each in side if not _is_time(each)) for side in (left, right)]
    if rest[0] != rest[1]:
        found.differs(where, (_described(left), _described(right)))
    else:
        found.differs(f"{where}, wall time", (_wall_time(left), _wall_time(right)), "date")


def _records(data: Data) -> Iterator[bytes]:
    """Yield each record with its checksum, which must be right.

    Raises:
        NotComparableError: The framing is broken, or a record is too large.
    """
    place = 0
    while place < len(data):
        head = data[place : place + _HEAD_BYTES]
        if len(head) < _HEAD_BYTES or record_checksum(head[:8]) != head[8:]:
            raise NotComparableError("not records")
        length = int.from_bytes(head[:8], "little")
        if length > MAX_MEMBER_BYTES:
            raise NotComparableError("a record is too large")
        end = place + _HEAD_BYTES + length + _CHECK_BYTES
        if end > len(data):
            raise NotComparableError("cut off")
        yield data[place + _HEAD_BYTES : end]
        place = end


def _event(record: bytes, context: Context) -> tuple[_Field, ...]:
    """Return the fields of a record whose checksum is right."""
    data = record[:-_CHECK_BYTES]
    context.budget.spend(len(data))
    if record_checksum(data) != record[-_CHECK_BYTES:]:
        raise NotComparableError("a record with a wrong checksum")
    return tuple(_fields(data))


def _fields(data: bytes) -> Iterator[_Field]:
    """Yield the fields of a message of protobuf.

    Raises:
        NotComparableError: It is not a message, or has too many fields.
    """
    place = count = 0
    while place < len(data):
        count += 1
        if count > _MAX_FIELDS:
            raise NotComparableError("a message with too many fields")
        key, place = _varint(data, place)
        kind, value = key & 7, b""
        if kind == _VARINT:
            number, place = _varint(data, place)
            yield _Field(key >> 3, kind, number)
            continue
        if kind == _BYTES:
            length, place = _varint(data, place)
        else:
            # Any other kind, such as a group, gets a length that no message has, and is rejected.
            length = {_FIXED64: 8, _FIXED32: 4}.get(kind, len(data) + 1)
        value, place = data[place : place + length], place + length
        if place > len(data):
            raise NotComparableError("not a message")
        yield _Field(key >> 3, kind, value)


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    # A number of 64 bits takes at most ten bytes.
    for shift in range(0, 70, 7):
        if place >= len(data):
            break
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise NotComparableError("not a message")


def _record(record: bytes | None, context: Context) -> str:
    return "end of file" if record is None else _described(_event(record, context))


def _described(event: tuple[_Field, ...]) -> str:
    """Describe an event by its step, tags and values."""
    # An event of step 0 has no such field: proto3 leaves default values out.
    step = next((each.value for each in event if (each.number, each.kind) == (_STEP, _VARINT)), 0)
    values = [_value(each.value) for each in event if each.number == _SUMMARY]
    return f"step {step!r}" + "".join(f", {value}" for value in values if value)


def _value(summary: bytes | int) -> str:
    if not isinstance(summary, bytes):
        return ""
    values = [each.value for each in _fields(summary) if each.number == _VALUE]
    return ", ".join(_tagged(value) for value in values if isinstance(value, bytes))


def _tagged(value: bytes) -> str:
    tag, number = "", ""
    for each in _fields(value):
        if each.number == _TAG and isinstance(each.value, bytes):
            tag = each.value.decode("utf-8", "replace")
        elif each.number == _SIMPLE and each.kind == _FIXED32:
            number = f" = {struct.unpack('<f', each.value)[0]!r}"  # type: ignore[arg-type]
    return tag + number


def _is_time(each: _Field) -> bool:
    return (each.number, each.kind) == (_WALL_TIME, _FIXED64)


def _wall_time(event: tuple[_Field, ...]) -> str:
    times = [each.value for each in event if _is_time(each)]
    return repr(struct.unpack("<d", times[-1])[0]) if times else "missing"  # type: ignore[arg-type]


def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _table()


def record_checksum(data: bytes) -> bytes:
    """Return the masked CRC-32C of TFRecord, little-endian."""
    value = 0xFFFFFFFF
    for byte in data:
        value = (value >> 8) ^ _TABLE[(value ^ byte) & 0xFF]
    value ^= 0xFFFFFFFF
    rotated = (value >> 15) | (value << 17)
    return ((rotated + _MASK) & 0xFFFFFFFF).to_bytes(4, "little")
