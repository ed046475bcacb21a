"""Files of no known format: how long they are, and where their bytes first differ."""

from __future__ import annotations

from capsule.host.wording import counted
from capsule.verification.content.parts import Comparison, Context, Data, Findings

_PIECE_BYTES = 1 << 20


def compare_binary(left: Data, right: Data, _context: Context) -> Comparison:
    """Compare two files byte by byte."""
    found = Findings("bytes")
    place = _first_difference(left, right)
    found.differs(f"byte {place:,}", (_described(left, place), _described(right, place)))
    return found.comparison()


def _first_difference(left: Data, right: Data) -> int:
    shorter = min(len(left), len(right))
    # The files are compared in pieces, since a slice of a mapped file is a copy.
    for start in range(0, shorter, _PIECE_BYTES):
        a, b = left[start : start + _PIECE_BYTES], right[start : start + _PIECE_BYTES]
        if a != b:
            pairs = enumerate(zip(a, b, strict=False))
            return start + next((at for at, (x, y) in pairs if x != y), min(len(a), len(b)))
    return shorter


def _described(data: Data, place: int) -> str:
    """Describe the byte at a place, and the size."""
    byte = f"0x{data[place]:02x}" if place < len(data) else "end of file"
    return f"{byte} of {counted(len(data), 'byte')}"
