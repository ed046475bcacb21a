"""The headers before the members of a zip archive, which must say what its directory says.

A reader that goes through an archive from its beginning believes the headers, another one the
directory. What both find must be the same (APPNOTE 6.3.10, sections 4.3 to 4.5).
"""

from __future__ import annotations

import struct
import zipfile
from typing import NamedTuple

from capsule.verification.content.parts import Data, NotComparableError

_FIXED = struct.Struct("<4s5H3I2H")
_DESCRIBED_LATER = 1 << 3  # flag: checksum and sizes follow the member, in a data descriptor
_DESCRIPTOR = b"PK\x07\x08"  # its signature, which may be missing
_IN_EXTRA = 0xFFFFFFFF  # in place of a size that is in the extra field
_RECORD = struct.Struct("<2H")  # of an extra field: kind and length
_ZIP64, _TIME, _PADDING = 0x0001, 0x5455, 0x4246  # kinds: sizes, Info-ZIP's dates, PyTorch's filler


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


class Extra(NamedTuple):
    """The contents of extra fields, except for sizes."""

    dates: tuple[bytes, ...]
    others: tuple[bytes, ...]


def checked_extra(data: Data, info: zipfile.ZipInfo, end: int) -> Extra:
    """Check the header of a member that lies between its offset and ``end``.

    Returns:
        What the extra fields of header and directory say.

    Raises:
        NotComparableError: The header says otherwise than the directory, or bytes are left over.
    """
    place = info.header_offset
    header = LocalFileHeader(*_FIXED.unpack(data[place : place + _FIXED.size]))
    start = place + _FIXED.size + header.name_bytes + header.extra_bytes
    extra = data[start - header.extra_bytes : start]
    behind = data[start + info.compress_size : end]
    if not (_agrees(header, info) and _is_descriptor(behind, header, info)):
        raise NotComparableError("a header that contradicts the directory, or bytes of no member")
    dates, others = zip(_said(extra), _said(info.extra), strict=True)
    return Extra(sum(dates, ()), sum(others, ()))


def _agrees(header: LocalFileHeader, info: zipfile.ZipInfo) -> bool:
    facts = (header.checksum, header.packed, header.size)
    # A writer that cannot go back leaves zeros in the header (APPNOTE 4.4.4, bit 3).
    later = header.flags & _DESCRIBED_LATER and not any(facts)
    sizes = ((header.packed, info.compress_size), (header.size, info.file_size))
    same = header.checksum == info.CRC and all(here in (there, _IN_EXTRA) for here, there in sizes)
    stored = info.compress_type == zipfile.ZIP_STORED
    return (
        (header.flags, header.method) == (info.flag_bits, info.compress_type)
        and (bool(later) or same)
        # A stored member has one size. With two, readers could disagree about its content.
        and (not stored or info.compress_size == info.file_size)
    )


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


def _said(extra: bytes) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """Return the records of an extra field that are dates, and all others but sizes and filler."""
    dates, others, place = [], [], 0
    while place + _RECORD.size <= len(extra):
        kind, length = _RECORD.unpack_from(extra, place)
        record = extra[place : (place := place + _RECORD.size + length)]
        filler = kind == _PADDING and not record[_RECORD.size :].strip(b"Z")
        if kind == _TIME:
            dates.append(record)
        elif kind != _ZIP64 and not filler:
            others.append(record)
    return tuple(dates), (*others, extra[place:])
