"""The headers before the members of a zip archive, which must say what its directory says.

A reader that goes through an archive from its beginning believes the headers, another one the
directory. What both find must be the same (APPNOTE 6.3.10, sections 4.3 to 4.5).
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from bz2 import BZ2Decompressor
from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple, Protocol

from capsule.verification.content.parts import Budget, Data, NotComparableError

_FIXED = struct.Struct("<4s5H3I2H")
_DESCRIBED_LATER = 1 << 3  # flag: checksum and sizes follow the member, in a data descriptor
_DESCRIPTOR = b"PK\x07\x08"  # its signature, which may be missing
_IN_EXTRA = 0xFFFFFFFF  # in place of a size that is in the extra field
_RECORD = struct.Struct("<2H")  # of an extra field: kind and length
_ZIP64, _TIME, _PADDING = 0x0001, 0x5455, 0x4246  # kinds: sizes, Info-ZIP's dates, PyTorch's filler
_DATES = 0b111  # flags of the dates that there are: of modification, access and creation
_RAW_DEFLATE = -15  # window bits: a stream without header and checksum
_PIECE_BYTES = 1 << 20


class LocalFileHeader(NamedTuple):
    """A header before a member."""

    magic: bytes
    version: int
    flags: int
    method: int
    time: int
    date: int
    checksum: int
    packed: int
    size: int
    name_bytes: int
    extra_bytes: int


class Stated(NamedTuple):
    """What the header of a member and the extra fields of header and directory state.

    Attributes:
        date: The date of the header: year, month, day, hour, minute and second.
        version: The version of the format that the header requires.
        extra_dates: The dates in extra fields.
        extra: What else is in extra fields, except for sizes.
    """

    date: tuple[int, ...]
    version: int
    extra_dates: tuple[bytes, ...]
    extra: tuple[bytes, ...]


class _Decompressor(Protocol):
    """The common part of the decompressors of the standard library."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _Records(NamedTuple):
    """The records of one extra field: bodies of those with sizes; dates and all others as a whole.

    Filler is left out.
    """

    sizes: tuple[bytes, ...]
    dates: tuple[bytes, ...]
    others: tuple[bytes, ...]


def checked_header(data: Data, info: zipfile.ZipInfo, end: int, budget: Budget) -> Stated:
    """Check the header of a member that lies between its offset and ``end``, and its extent.

    Returns:
        What it states that :mod:`zipfile` does not read.

    Raises:
        NotComparableError: The header says otherwise than the directory, bytes are left over, or
            the budget does not suffice for the content.
    """
    place = info.header_offset
    header = LocalFileHeader(*_FIXED.unpack(data[place : place + _FIXED.size]))
    start = place + _FIXED.size + header.name_bytes + header.extra_bytes
    here, there = _records(data[start - header.extra_bytes : start]), _records(info.extra)
    behind = data[start + info.compress_size : end]
    sound = (
        start + info.compress_size <= end
        and _agrees(header, info)
        and _sizes_agree(header, info, here.sizes)
        and _are_facts(there.sizes, info.file_size, info.compress_size, info.header_offset)
        and _is_descriptor(behind, header, info)
    )
    if not sound:
        raise NotComparableError("a header that contradicts the directory, or bytes of no member")
    if info.compress_type != zipfile.ZIP_STORED:
        _check_stream(data, info, start, budget)
    return Stated(
        _date(header), header.version, here.dates + there.dates, here.others + there.others
    )


def _check_stream(data: Data, info: zipfile.ZipInfo, start: int, budget: Budget) -> None:
    """Check that a compressed member is one stream, which ends with it and has its size unpacked.

    A reader stops at the end of the stream, or once it has as many bytes as the directory states.
    What follows could be anything.
    """
    unpacking, end, size = _decompressor(info), start + info.compress_size, 0
    while start < end and not unpacking.eof:
        packed = data[start : min(start + _PIECE_BYTES, end)]
        start += len(packed)
        for piece in _unpacked(unpacking, packed):
            budget.spend(len(piece))
            size += len(piece)
    if start < end or not unpacking.eof or unpacking.unused_data or size != info.file_size:
        raise NotComparableError("a member that is cut off, or has bytes behind its end")


def _unpacked(unpacking: _Decompressor, packed: bytes) -> Iterator[bytes]:
    """Yield what some bytes unpack to, in pieces, as they may be a bomb."""
    while not unpacking.eof and (piece := unpacking.decompress(packed, _PIECE_BYTES)):
        yield piece
        # BZ2Decompressor itself keeps the bytes that it has not unpacked.
        packed = getattr(unpacking, "unconsumed_tail", b"")


def _decompressor(info: zipfile.ZipInfo) -> _Decompressor:
    if info.compress_type == zipfile.ZIP_DEFLATED:
        return zlib.decompressobj(_RAW_DEFLATE)
    if info.compress_type == zipfile.ZIP_BZIP2:
        return BZ2Decompressor()
    raise NotComparableError(f"a member of compression method {info.compress_type}")


def _date(header: LocalFileHeader) -> tuple[int, ...]:
    """Return a header's date, which has two seconds' precision (APPNOTE 4.4.6)."""
    day, time = header.date, header.time
    date = (day >> 9) + 1980, (day >> 5) & 0xF, day & 0x1F
    return *date, time >> 11, (time >> 5) & 0x3F, (time & 0x1F) * 2


def _agrees(header: LocalFileHeader, info: zipfile.ZipInfo) -> bool:
    sizes = ((header.packed, info.compress_size), (header.size, info.file_size))
    same = header.checksum == info.CRC and all(here in (there, _IN_EXTRA) for here, there in sizes)
    stored = info.compress_type == zipfile.ZIP_STORED
    return (
        (header.flags, header.method) == (info.flag_bits, info.compress_type)
        and (_comes_later(header) or same)
        # A stored member has one size. With two, readers could disagree about its content.
        and (not stored or info.compress_size == info.file_size)
    )


def _comes_later(header: LocalFileHeader) -> bool:
    """Tell whether a writer that cannot go back left zeros in a header (APPNOTE 4.4.4, bit 3).

    With Zip64, the zeros in place of the sizes are in the extra field (4.3.9.2).
    """
    sizes_are_left = {header.packed, header.size} <= {0, _IN_EXTRA}
    return bool(header.flags & _DESCRIBED_LATER) and not header.checksum and sizes_are_left


def _sizes_agree(
    header: LocalFileHeader, info: zipfile.ZipInfo, records: tuple[bytes, ...]
) -> bool:
    """Tell whether Zip64 records have the sizes of a header: both, or those that it leaves out."""
    size, packed = (0, 0) if _comes_later(header) else (info.file_size, info.compress_size)
    facts = ((header.size, size), (header.packed, packed))
    lacking = tuple(fact for stated, fact in facts if stated == _IN_EXTRA)
    forms = {_packed(size, packed), _packed(*lacking)}
    return forms.issuperset(records) and (bool(records) or not lacking)


def _are_facts(records: tuple[bytes, ...], *facts: int) -> bool:
    """Tell whether Zip64 records consist of some facts about a member, in their order."""
    # Which of them a directory needs there, zipfile does not keep.
    forms = {_packed(*chosen) for n in range(4) for chosen in combinations(facts, n)}
    return forms.issuperset(records)


def _packed(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def _is_descriptor(data: bytes, header: LocalFileHeader, info: zipfile.ZipInfo) -> bool:
    """Tell whether the bytes behind a member are its data descriptor, or none if it has none."""
    if not header.flags & _DESCRIBED_LATER:
        return not data
    facts = info.CRC, info.compress_size, info.file_size
    # APPNOTE 4.3.9: sizes of eight bytes with Zip64, else of four, and a signature that is
    # optional.
    forms = [struct.pack("<I2Q", *facts)]
    if max(facts) <= _IN_EXTRA:
        forms.append(struct.pack("<3I", *facts))
    return data.removeprefix(_DESCRIPTOR) in forms


def _records(extra: bytes) -> _Records:
    sizes: list[bytes] = []
    dates: list[bytes] = []
    others: list[bytes] = []
    place = 0
    while place + _RECORD.size <= len(extra):
        kind, length = _RECORD.unpack_from(extra, place)
        record = extra[place : (place := place + _RECORD.size + length)]
        body = record[_RECORD.size :]
        if len(body) < length:
            others.append(record)
        elif kind == _ZIP64:
            sizes.append(body)
        elif kind == _TIME and not dates and _is_dates(body):
            dates.append(record)
        elif kind != _PADDING or body.strip(b"Z"):
            others.append(record)
    return _Records(tuple(sizes), tuple(dates), (*others, extra[place:]))


def _is_dates(body: bytes) -> bool:
    """Tell whether a record has the form of dates: flags, and four bytes for each that is set."""
    flags = body[0] if body else _DATES + 1
    # A directory has the flags of the header, and only the first date.
    return flags <= _DATES and len(body) in (1 + 4 * flags.bit_count(), 1 + 4 * (flags & 1))
