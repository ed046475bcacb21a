"""How far apart two floating-point numbers are, in units in the last place, without numpy.

The bits of an IEEE 754 number, read as sign and magnitude, are in the order of the numbers. The
distance of two numbers is the number of steps between them in that order: 0 for equal numbers and
for +0 and -0, 1 for neighbours, across zero as anywhere else. NaN and infinities have no distance;
a pair with one in it, of other bits, is counted apart.
"""

from __future__ import annotations

import math
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from operator import and_, ne, sub, truediv
from typing import Literal, TypeVar

Width = Literal[32, 64]
Number = TypeVar("Number", int, float)
_INTEGER: dict[Width, Literal["i", "q"]] = {32: "i", 64: "q"}
_REAL: dict[Width, Literal["f", "d"]] = {32: "f", 64: "d"}
_EXPONENT: dict[Width, int] = {32: 0x7F80_0000, 64: 0x7FF << 52}  # all ones: NaN or infinite


@dataclass
class Distance:
    """How far apart two sequences of numbers are; :meth:`add` takes one more piece of them.

    Attributes:
        elements: Pairs seen.
        differing: Pairs with other bits.
        nonfinite: Pairs with other bits, one of which is NaN or infinite.
        ulp: Largest distance of the others.
        relative: Largest ``|a - b| / max(|a|, |b|)`` of the others.
    """

    elements: int = 0
    differing: int = 0
    nonfinite: int = 0
    ulp: int = 0
    relative: float = 0.0

    def add(self, left: bytes | memoryview, right: bytes | memoryview, width: Width = 32) -> None:
        """Compare two pieces of little-endian numbers, of the same size.

        Args:
            left: Bytes of ``[elements]`` floats of ``width`` bits.
            right: As many.
            width: Bits of a number.
        """
        self.elements += len(left) * 8 // width
        if left == right:
            return
        a, b = (_filled(array(_INTEGER[width]), data) for data in (left, right))
        u, v = (_filled(array(_REAL[width]), data) for data in (left, right))
        # The loops are those of map, max and sum in C: a checkpoint has millions of numbers, and
        # the host side has no numpy.
        differing = list(map(ne, a, b))
        self.differing += sum(differing)
        if not (_finite(a, width) and _finite(b, width)):
            kept = [math.isfinite(x) and math.isfinite(y) for x, y in zip(u, v, strict=True)]
            self.nonfinite += sum(d and not k for d, k in zip(differing, kept, strict=True))
            a, b = (array(_INTEGER[width], compress(bits, kept)) for bits in (a, b))
            u, v = (array(_REAL[width], compress(numbers, kept)) for numbers in (u, v))
        if len(a):
            steps = list(map(sub, _ordered(a, width), _ordered(b, width)))
            highest, lowest = max(steps), min(steps)
            self.ulp = max(self.ulp, highest, -lowest)
            self.relative = max(self.relative, _relative(u, v))


def distance(a: float, b: float, width: Width = 64) -> Distance:
    """Return the distance of two numbers, after rounding to ``width`` bits."""
    found = Distance()
    found.add(_packed(a, width), _packed(b, width), width)
    return found


def _packed(number: float, width: Width) -> bytes:
    form = "<f" if width == 32 else "<d"
    try:
        return struct.pack(form, number)
    except OverflowError:  # beyond float32
        return struct.pack(form, math.copysign(math.inf, number))


def _filled(values: array[Number], data: bytes | memoryview) -> array[Number]:
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _finite(bits: Sequence[int], width: Width) -> bool:
    exponent = _EXPONENT[width]
    masked: Iterator[int] = map(and_, bits, repeat(exponent))
    return max(masked) < exponent


def _ordered(bits: Sequence[int], width: Width) -> list[int]:
    """Map sign and magnitude to integers that are in the order of the numbers."""
    # The bits of -0 are the lowest integer, which becomes 0, as those of +0 are.
    lowest = -(1 << (width - 1))
    return [value if value >= 0 else lowest - value for value in bits]


def _relative(u: Sequence[float], v: Sequence[float]) -> float:
    scales = list(map(max, map(abs, u), map(abs, v)))
    differences = map(abs, map(sub, u, v))
    # A pair of +0 and -0 has no ratio.
    if 0.0 in scales:
        pairs = zip(differences, scales, strict=True)
        return max((d / s for d, s in pairs if s), default=0.0)
    ratios: Iterator[float] = map(truediv, differences, scales)
    return max(ratios)
