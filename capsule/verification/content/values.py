"""Comparing two values as JSON has them, leaf by leaf."""

from __future__ import annotations

import base64
import binascii
import json
import math
from typing import Any

from capsule.verification.content.parts import Context, Findings, NotComparableError
from capsule.verification.content.ulp import distance

MAX_JSON_BYTES = 32 << 20
_MIN_ENCODED = 32  # characters of a text in which Base64 is looked for
_PICKLE = b"\x80"


def parse(text: str) -> Any:
    """Parse JSON in which no name occurs twice and no number is too large for a float.

    Raises:
        ValueError: It is not JSON of this form.
        RecursionError: It is too deep.
    """
    return json.loads(text, object_pairs_hook=_without_duplicates, parse_float=_finite)


def compare_values(where: str, left: Any, right: Any, found: Findings, context: Context) -> None:
    """Note every leaf in which two values differ, and which parts of the whole are equal."""
    if repr(left) == repr(right):  # tells 1, 1.0 and true apart, and 0.0 from -0.0
        if "." not in where:
            found.same(where)
    elif isinstance(left, dict) and isinstance(right, dict):
        for key in dict.fromkeys([*left, *right]):
            place = f"{where}.{key}" if where else str(key)
            if key in left and key in right:
                compare_values(place, left[key], right[key], found, context)
            else:
                found.differs(place, (left.get(key, "missing"), right.get(key, "missing")))
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            compare_values(f"{where}[{index}]", a, b, found, context)
    else:
        compare_leaves(where, (left, right), found, context)


def compare_leaves(where: str, pair: tuple[Any, Any], found: Findings, context: Context) -> None:
    """Note two leaves that differ: dates as such, numbers with their distance."""
    left, right = pair
    # An encoded pickle comes first, since as a text it would differ as a whole, dates and numbers
    # in it included.
    before, after = _decoded(left), _decoded(right)
    if before is not None and after is not None:
        found.include(where, context.inner(where, before, after))
    elif context.times.dates(left, right):
        found.differs(where, pair, "date")
    elif isinstance(left, float) and isinstance(right, float):
        apart = distance(left, right)
        far = "" if apart.nonfinite else f", {apart.ulp:,} ulp away"
        found.differs(where, (left, f"{right!r}{far}"))
    else:
        found.differs(where, pair)


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
    number = float(text)
    if math.isinf(number):
        raise NotComparableError("a number is too large for a float")
    return number


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise NotComparableError("an object has a name twice")
    return values
