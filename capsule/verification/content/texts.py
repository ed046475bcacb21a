"""Texts: the lines that differ; of JSON lines and CSV also the fields."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterator
from itertools import zip_longest

from capsule.verification.content.parts import (
    Comparison,
    Context,
    Data,
    Findings,
    Nature,
    NotComparableError,
    shown,
)
from capsule.verification.content.values import (
    MAX_JSON_BYTES,
    NUMBER,
    compare_leaves,
    compare_values,
    exact_float,
    nature_of_texts,
    parse,
)

MAX_TEXT_BYTES = 256 << 20
_END = "end of file"


def compare_json(left: Data, right: Data, context: Context) -> Comparison:
    """Compare two JSON documents, leaf by leaf."""
    if max(len(left), len(right)) > MAX_JSON_BYTES:
        raise NotComparableError("too large")
    found = Findings("JSON")
    before, after = (parse(data[:].decode("utf-8")) for data in (left, right))
    if not all(isinstance(value, dict | list) for value in (before, after)):
        raise NotComparableError("neither an object nor an array")
    compare_values("", before, after, found, context)
    return found.comparison()


def compare_json_lines(left: Data, right: Data, context: Context) -> Comparison:
    """Compare two texts whose every line is a JSON object, field by field."""
    found = Findings("JSON lines")
    for number, a, b in _pairs(left, right, MAX_JSON_BYTES):
        before, after = (parse(line) if line else {} for line in (a, b))
        if not all(isinstance(value, dict) for value in (before, after)):
            raise NotComparableError("a line is not an object")
        if a and b and a != b:
            inner = Findings("JSON")
            compare_values("", before, after, inner, context)
            found.include(f"line {number:,}", inner.comparison())
        elif a != b:
            found.differs(f"line {number:,}", (_shown(a), _shown(b)))
    return _reordered(left, right, found).comparison()


def compare_csv(left: Data, right: Data, context: Context) -> Comparison:
    """Compare two tables with a head, cell by cell."""
    found = Findings("CSV")
    heads: list[str] = []
    for number, (a, b) in enumerate(zip_longest(_rows(left), _rows(right)), 1):
        heads = heads or [shown(head) for head in a or b or ()]
        if len(heads) < 2 or any(row and len(row) != len(heads) for row in (a, b)):
            raise NotComparableError("not a table")
        if not a or not b:
            if a != b:
                pair = _END if a is None else a, _END if b is None else b
                found.differs(f"line {number:,}", pair)
            continue
        for head, x, y in zip(heads, a, b, strict=True):
            if x != y:
                _compare_cells(f"line {number:,}, column {head}", (x, y), found, context)
    return _reordered(left, right, found).comparison()


def compare_text(left: Data, right: Data, context: Context) -> Comparison:
    """Compare two texts line by line."""
    found = Findings("text")
    for number, a, b in _pairs(left, right):
        if a != b:
            nature: Nature = nature_of_texts(a, b, context) if a and b else "content"
            found.differs(f"line {number:,}", (_shown(a), _shown(b)), nature)
    return _reordered(left, right, found).comparison()


def _reordered(left: Data, right: Data, found: Findings) -> Findings:
    """Note that the same lines are in another order."""
    # Lines that differ in dates or packaging alone are not the same lines.
    if "content" not in found.natures:
        return found
    if _lines_in_any_order(left) != _lines_in_any_order(right):
        return found
    parts = [part.model_copy(update={"nature": "order"}) for part in found.parts]
    # There may be more parts than were kept.
    return Findings(found.format, parts=parts, count=found.count, natures={"order"})


def _lines_in_any_order(data: Data) -> tuple[int, int]:
    """Return the number of lines and a sum of their digests, the same in every order.

    This takes little memory, whatever the text. A program could construct other lines with the
    same sum, which would then be "order" instead of "content". Neither of these is harmless.
    """
    number = total = 0
    for line in _lines(data):
        number += 1
        total += int.from_bytes(hashlib.sha256(line.encode()).digest(), "little")
    return number, total % (1 << 256)


def _compare_cells(where: str, cells: tuple[str, str], found: Findings, context: Context) -> None:
    if not all(NUMBER.fullmatch(cell) for cell in cells):
        compare_leaves(where, cells, found, context)
        return
    before, after = (exact_float(cell) for cell in cells)
    if repr(before) == repr(after):
        found.differs(where, cells, "packaging")
    else:
        compare_leaves(where, (before, after), found, context)


def _shown(line: str) -> str:
    return line.rstrip("\r\n") if line else _END


def _pairs(
    left: Data, right: Data, longest: int = MAX_TEXT_BYTES
) -> Iterator[tuple[int, str, str]]:
    """Yield number and content of each line of both; a line that is missing is empty."""
    pairs = zip_longest(_lines(left, longest), _lines(right, longest), fillvalue="")
    return ((number, *pair) for number, pair in enumerate(pairs, 1))


def _lines(data: Data, longest: int = MAX_TEXT_BYTES) -> Iterator[str]:
    if len(data) > MAX_TEXT_BYTES:
        raise NotComparableError("too large")
    if data.find(b"\0") >= 0:
        raise NotComparableError("not text")
    start = 0
    while start < len(data):
        # Lines end at line feeds only. str.splitlines() would also end them at U+2028 and others.
        end = data.find(b"\n", start) + 1 or len(data)
        if end - start > longest:
            raise NotComparableError("a line is too long")
        yield data[start:end].decode("utf-8")
        start = end


def _rows(data: Data) -> Iterator[list[str]]:
    try:
        yield from csv.reader(_lines(data), strict=True)
    except csv.Error as error:
        raise NotComparableError(str(error)) from error
