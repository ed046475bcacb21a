"""The records behind the directory of a zip archive, which must say how much is in it, and where.

:mod:`zipfile` uses some of their fields, and does not read the others (APPNOTE 6.3.10, sections
4.3.14 to 4.3.16). In these, an archive could state anything.
"""

from __future__ import annotations

import struct

from capsule.verification.content.parts import Data, NotComparableError

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_END_MAGIC, _END64_MAGIC, _LOCATOR_MAGIC = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_END64_BYTES = _END64.size - 12  # the record's own statement, without its signature and itself
# What stands in place of the numbers of members, the size and the place that Zip64 states.
_ELSEWHERE = (0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)


def checked_end(data: Data, start: int, members: int) -> tuple[int, ...]:
    """Check the records behind a directory that begins at ``start``, in an archive without comment.

    Returns:
        The versions of the writer and of the reader that the Zip64 record states; none without it.

    Raises:
        NotComparableError: One of them contradicts the archive.
    """
    place = len(data) - _END.size
    zip64 = data[place - _LOCATOR.size : place].startswith(_LOCATOR_MAGIC)
    size = place - start - zip64 * (_END64.size + _LOCATOR.size)
    facts = (members, members, size, start)
    magic, disk, first, *stated, comment_bytes = _END.unpack(data[place:])
    allowed = zip(stated, facts, _ELSEWHERE if zip64 else facts, strict=True)
    sound = (
        (magic, disk, first, comment_bytes) == (_END_MAGIC, 0, 0, 0)
        and all(each in (fact, elsewhere) for each, fact, elsewhere in allowed)
        and (not zip64 or _agrees(data[start + size : place], start + size, facts))
    )
    if not sound:
        raise NotComparableError("a record behind the directory that contradicts the archive")
    return _versions(data[start + size : place]) if zip64 else ()


def _agrees(records: bytes, place: int, facts: tuple[int, ...]) -> bool:
    """Tell whether Zip64 records, which begin at ``place``, state ``facts`` and one disk only."""
    versions = _versions(records)
    record = _END64.pack(_END64_MAGIC, _END64_BYTES, *versions, 0, 0, *facts)
    return records == record + _LOCATOR.pack(_LOCATOR_MAGIC, 0, place, 1)


def _versions(records: bytes) -> tuple[int, ...]:
    _magic, _bytes, written, required, *_ = _END64.unpack_from(records)
    return written, required
