"""gzip (RFC 1952): the content, and what the header says beside it."""

from __future__ import annotations

import zlib

from capsule.verification.content.parts import (
    MAX_MEMBER_BYTES,
    Comparison,
    Context,
    Data,
    Findings,
    NotComparableError,
)

MAGIC = b"\x1f\x8b\x08"
_MTIME = slice(4, 8)
_EXTRA, _NAME, _COMMENT = 1 << 2, 1 << 3, 1 << 4  # flags of what a header has
_GZIP = 31  # window bits: the format of gzip alone


def compare_gzip(left: Data, right: Data, context: Context) -> Comparison:
    """Compare what two files unpack to, then their headers."""
    found = Findings("gzip")
    before, after = _unpacked(left, context), _unpacked(right, context)
    if before != after:
        found.include("content", context.inner("content", before, after))
    else:
        found.same("content")
    names = _names(left), _names(right)
    if names[0] != names[1]:
        found.differs("header", names)
    if left[_MTIME] != right[_MTIME]:
        found.differs("time in the header", (_time(left), _time(right)), "date")
    return found.comparison()


def _names(data: Data) -> tuple[int, bytes]:
    """Return the flags, and the extra field, name and comment of a header whose content is good."""
    # The level and the operating system are excluded: they are those of the library that compressed
    # the content, and other versions of Python or zlib write others.
    # RFC 1952, section 2.3: ten bytes are fixed, then come the fields of the flags, in this order.
    flags, place = data[3], 10
    if flags & _EXTRA:
        place += 2 + int.from_bytes(data[10:12], "little")
    for text in (_NAME, _COMMENT):
        if flags & text:
            place = data.find(b"\0", place) + 1
    return flags, data[10:place]


def _time(data: Data) -> int:
    return int.from_bytes(data[_MTIME], "little")


def _unpacked(data: Data, context: Context) -> bytes:
    """Unpack the one member that a file must consist of."""
    # Its header alone can be as large as a disk, and zlib copies what it does not unpack.
    if len(data) > MAX_MEMBER_BYTES:
        raise NotComparableError("too large")
    unpacking = zlib.decompressobj(_GZIP)
    unpacked = unpacking.decompress(data[:], MAX_MEMBER_BYTES)
    context.budget.spend(len(unpacked))
    # Other readers append what further members hold (RFC 1952, section 2.2), and zlib stops after
    # the first one. So a file with more is not compared as gzip.
    if not unpacking.eof or unpacking.unused_data:
        raise NotComparableError("too large, cut off, or more than one member")
    return unpacked
