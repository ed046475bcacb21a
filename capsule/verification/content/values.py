"""Comparing two values as JSON has them, leaf by leaf."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Decimal
from decimal import Context as Decimals
from typing import Any

from capsule.verification.content.parts import (
    Context,
    Findings,
    Nature,
    NotComparableError,
    shown,
    shown_name,
)
from capsule.verification.content.ulp import distance

MAX_JSON_BYTES = 32 << 20
_MIN_ENCODED = 32  # characters of a text in which Base64 is looked for
_PICKLE = b"\x80"
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,16}\b")  # as Python shows objects: <function f at 0x…>
# float() also takes underscores, digits of other scripts, infinity and NaN, which other readers
# take for texts. The bounds keep the work with a number small.
NUMBER = re.compile(r"[+-]?[0-9]{1,400}(\.[0-9]{0,400})?([eE][+-]?[0-9]{1,9})?")
_EXACT = Decimals(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)


class ExactFloat(float):
    """A number whose text has more digits than its float tells; its representation has all."""

    _digits: str

    def __new__(cls, text: str) -> ExactFloat:
        """Keep the digits of a number that matches :data:`NUMBER`."""
        number, digits = super().__new__(cls, text), str(Decimal(text).normalize(_EXACT))
        # An integer of JSON has no point, and is another value.
        number._digits = digits if {".", "E"} & set(digits) else f"{digits}.0"
        return number

    def __repr__(self) -> str:
        return self._digits


class MinusZero(int):
    """The integer -0, which is 0 to Python, but not to readers for which all numbers are floats."""

    def __repr__(self) -> str:
        return "-0"


def exact_float(text: str) -> float:
    """Return the number that a text matching :data:`NUMBER` is.

    Two such numbers have the same representation if they are equal also to a reader with more
    digits than a float has; -0 and 0 have different ones.
    """
    number = float(text)
    shortest = repr(number)
    # Nearly all numbers are written in this form, for which no decimals are needed.
    exact = shortest == text or Decimal(shortest) == Decimal(text)
    return number if exact else ExactFloat(text)


def parse(text: str) -> Any:
    """Parse JSON in which no name occurs twice and no number is too large for a float.

    Numbers are those of :func:`exact_float`, or integers.

    Raises:
        ValueError: It is not JSON of this form.
        RecursionError: It is too deep.
    """
    return json.loads(
        text, object_pairs_hook=_without_duplicates, parse_float=_finite, parse_int=_integer
    )


def compare_values(where: str, left: Any, right: Any, found: Findings, context: Context) -> bool:
    """Note every leaf in which two values differ, and which parts of the whole are equal.

    Returns:
        Whether they are equal, the order of names included.
    """
    named = len(found.equal)
    if isinstance(left, dict) and isinstance(right, dict):
        equal = [*left] == [*right]
        for key in dict.fromkeys([*left, *right]):
            place = shown_name(f"{where}.{shown(key)}" if where else shown(key))
            if key in left and key in right:
                equal &= compare_values(place, left[key], right[key], found, context)
            else:
                found.differs(place, (left.get(key, "missing"), right.get(key, "missing")))
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        equal = True
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            equal &= compare_values(shown_name(f"{where}[{index}]"), a, b, found, context)
    else:
        # The texts tell 1, 1.0 and true apart, and 0.0 from -0.0. Only leaves have them compared:
        # at every level, the work would grow with the square of the depth.
        equal = repr(left) == repr(right)
        if not equal:
            compare_leaves(where, (left, right), found, context)
    if equal and "." not in where:
        del found.equal[named:]  # the parts of an equal part are not named
        found.same(where)
    return equal


def compare_leaves(where: str, pair: tuple[Any, Any], found: Findings, context: Context) -> None:
    """Note two leaves that differ: dates as such, numbers with their distance."""
    left, right = pair
    # An encoded pickle comes first, since as a text it would differ as a whole, dates and numbers
    # in it included.
    before, after = _decoded(left), _decoded(right)
    if before is not None and after is not None:
        found.include(where, context.inner(where, before, after))
    elif isinstance(left, str) and isinstance(right, str):
        found.differs(where, pair, nature_of_texts(left, right, context))
    elif context.times.dates(left, right):
        found.differs(where, pair, "date")
    elif isinstance(left, float) and isinstance(right, float):
        apart = distance(left, right)
        far = "" if apart.nonfinite else f", {apart.ulp:,} ulp away"
        found.differs(where, (left, f"{right!r}{far}"))
    else:
        found.differs(where, pair)


def nature_of_texts(left: str, right: str, context: Context) -> Nature:
    """Return how two texts differ: in dates only, in addresses of memory too, or in content."""
    if context.times.dates(left, right):
        return "date"
    before, after = (_ADDRESS.sub("at 0x", text) for text in (left, right))
    return "address" if before == after or context.times.dates(before, after) else "content"


def _decoded(value: Any) -> bytes | None:
    """Return the pickle that a text encodes, as stable-baselines3 writes its settings."""
    if not isinstance(value, str) or len(value) < _MIN_ENCODED:
        return None
    try:
        data = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        return None
    return data if data.startswith(_PICKLE) else None


def _finite(text: str) -> float:
    if not NUMBER.fullmatch(text):
        raise NotComparableError("a number has too many digits")
    number = exact_float(text)
    if math.isinf(number):
        raise NotComparableError("a number is too large for a float")
    return number


def _integer(text: str) -> int:
    return MinusZero() if text == "-0" else int(text)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise NotComparableError("an object has a name twice")
    return values
