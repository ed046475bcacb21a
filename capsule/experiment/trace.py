"""The trace file: how it is chained, how it is read, and where two traces first differ.

``trace.jsonl`` contains one JSON object per line. A *record* has a ``step`` and, in the order of
the data flow, one value per component: the XXH3-128 of its data since the record before, or a
mapping of names to such digests. The chain starts from 32 zero bytes, and each record's line
(without its line feed) extends it: ``head = SHA-256(head || SHA-256(line))``. After every 1024
records a *segment* line states the head, so that a segment can be checked alone; segment lines are
not chained.

Nothing here needs torch or numpy: hosts read traces with it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from capsule.experiment.errors import CapsuleError
from capsule.experiment.files import open_regular

GENESIS = bytes(32)
SEGMENT_RECORDS = 1024
# The longest records name unrolls: MAX_UNROLLS_OF_A_RECORD of the spec keeps them below this.
MAX_LINE_BYTES = 1 << 22

# An earlier component is the cause of a later one's difference, never the other way round.
COMPONENTS = (
    "streams",
    "schedule",
    "generations",
    "unrolls",
    "observations",
    "actions",
    "rewards",
    "terminals",
    "indices",
    "minibatch",
    "loss",
    "gradient",
    "parameters",
    "target",
    "optimizer",
)


@dataclass(frozen=True)
class Mark:
    """A place in a trace where a record begins.

    Attributes:
        offset: Number of bytes before the place.
        records: Number of records before it.
        step: Agent step of the last of these records; 0 before the first.
        head: Head of the chain there, hexadecimal.
    """

    offset: int = 0
    records: int = 0
    step: int = 0
    head: str = GENESIS.hex()


BEGINNING = Mark()


@dataclass(frozen=True)
class Record:
    """One trace record.

    Attributes:
        number: Position in the chain, from 0.
        step: Number of agent steps before it was written.
        values: Component to digest, or to a mapping of names to digests.
        head: Head of the chain after it, hexadecimal.
        end: Offset in bytes at which the next record of the trace begins; 0 outside a trace.
    """

    number: int
    step: int
    values: dict[str, Any]
    head: str
    end: int = 0

    @property
    def after(self) -> Mark:
        """The place after the record."""
        return Mark(self.end, self.number + 1, self.step, self.head)


class TraceHeads(NamedTuple):
    """The hash chain of a trace.

    Attributes:
        records: Number of records.
        step: The step of the last record; 0 without records.
        last: The head after the last record, hexadecimal.
        checkpoints: The head after the last record up to each checkpoint.
    """

    records: int
    step: int
    last: str
    checkpoints: list[str]


@dataclass(frozen=True)
class Difference:
    """The first difference between two traces.

    Attributes:
        step: Step of the first differing record.
        component: First differing component in data-flow order; "step" if the records have
            different steps, "end" if one trace ends first, "format" if only the spelling of the
            records differs.
        name: Stream or tensor within the component, if the record names it.
        a: Value in the first trace; None if it has no such value.
        b: Value in the second trace; None if it has no such value.
        also: Further components that differ in the same record.
    """

    step: int
    component: str
    name: str | None
    a: str | None
    b: str | None
    also: tuple[str, ...] = ()


def extend(head: bytes, line: bytes) -> bytes:
    """Return the head of a chain after the record in ``line``."""
    return hashlib.sha256(head + hashlib.sha256(line).digest()).digest()


def segment_line(head: bytes, records: int) -> bytes:
    """Return the line that closes a segment after ``records`` records in all."""
    # read_trace() compares the whole line, so its form is a part of the format.
    return json.dumps({"head": head.hex(), "records": records}, separators=(",", ":")).encode()


def read_trace(path: Path, since: Mark = BEGINNING) -> Iterator[Record]:
    """Yield the records of a trace, checking its segment heads on the way.

    Args:
        path: The trace.
        since: Place from which to read.

    Raises:
        CapsuleError: CAP-T141, a line is not one of a trace.
    """
    head, number, step = bytes.fromhex(since.head), since.records, since.step
    due = False  # whether a segment line must follow, unless the trace ends here
    with open_regular(path, follow=False) as stream:
        stream.seek(since.offset)
        # Counts lines, from 1, for messages: there is a segment line after every 1024 records.
        for position in range(number + number // SEGMENT_RECORDS + 1, 1 << 62):
            line = stream.readline(MAX_LINE_BYTES)
            if not line:
                return
            if not line.endswith(b"\n"):
                _reject(path, position, "is cut off or too long")
            fields = _parse(line, path, position)
            is_segment = "records" in fields
            # Otherwise a mark after a record could be the place of another line (see below).
            if is_segment != due:
                kind = "is not a segment line" if due else "is a segment line"
                _reject(path, position, f"{kind}, which follows every {SEGMENT_RECORDS} records")
            if is_segment:
                if line[:-1] != segment_line(head, number):
                    _reject(path, position, "states a segment head that its records do not give")
                due = False
                continue
            head = extend(head, line[:-1])
            previous, step = step, fields.pop("step", None)
            # isinstance would accept true and false.
            if type(step) is not int or step <= previous:
                _reject(path, position, "has no step after that of the record before")
            number += 1
            due = number % SEGMENT_RECORDS == 0
            # A segment line that follows has not been read yet, but reading from here on skips it.
            closing = len(segment_line(head, number)) + 1 if due else 0
            yield Record(number - 1, step, fields, head.hex(), stream.tell() + closing)


def trace_heads(path: Path, steps: Sequence[int] = ()) -> TraceHeads:
    """Return the hash chain of a trace at its end, and at increasing steps.

    Args:
        path: The trace.
        steps: The steps of the checkpoints, in increasing order.

    Raises:
        CapsuleError: CAP-T141, a line is not one of a trace.
    """
    heads: list[str] = []
    records, step, head = 0, 0, GENESIS.hex()
    for record in read_trace(path):
        while len(heads) < len(steps) and steps[len(heads)] < record.step:
            heads.append(head)
        records, step, head = record.number + 1, record.step, record.head
    heads += [head] * (len(steps) - len(heads))
    return TraceHeads(records, step, head, heads)


def first_difference(
    a: Path,
    b: Path,
    *,
    since: Mark = BEGINNING,
    until: int | None = None,
) -> Difference | None:
    """Compare two traces record by record.

    Args:
        a: One trace.
        b: Another.
        since: Place in both traces from which to compare.
        until: Compare the records up to this step of ``a`` only; None: all records.

    Raises:
        CapsuleError: CAP-T141, a line is not one of a trace.
    """
    wanted = takewhile(lambda record: until is None or record.step <= until, read_trace(a, since))
    for left, right in zip_longest(wanted, read_trace(b, since)):
        if left is None or right is None:
            present = left or right
            if present is None:
                return None
            more = ("more", None) if right is None else (None, "more")
            return Difference(present.step, "end", None, *more)
        # Heads cover the bytes of the lines, so the same facts in another spelling differ as well.
        if left.head != right.head:
            names = sorted(left.values.keys() | right.values.keys())
            return compare_records(left, right, [*COMPONENTS, *names])
    return None


def compare_records(left: Record, right: Record, names: Sequence[str]) -> Difference:
    """Return the difference between two records that are not equal.

    Args:
        left: A record.
        right: The record at the same position of the other trace.
        names: Components to compare, causes before effects.
    """
    if left.step != right.step:
        return Difference(left.step, "step", None, str(left.step), str(right.step))
    differing = [n for n in dict.fromkeys(names) if left.values.get(n) != right.values.get(n)]
    if not differing:  # the same facts, written otherwise
        return Difference(left.step, "format", None, None, None)
    component, *also = differing
    name, value_a, value_b = _innermost(left.values.get(component), right.values.get(component))
    return Difference(left.step, component, name, value_a, value_b, tuple(also))


def _innermost(a: Any, b: Any) -> tuple[str | None, str | None, str | None]:
    """Return the name and values of the first entry in which two component values differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        for name in [*a, *(name for name in b if name not in a)]:
            if a.get(name) != b.get(name):
                return name, _text(a.get(name)), _text(b.get(name))
    return None, _text(a), _text(b)


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _parse(line: bytes, path: Path, position: int) -> dict[str, Any]:
    try:
        fields = json.loads(line, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        _reject(path, position, "is not JSON, or has a key twice")
    if not isinstance(fields, dict):
        _reject(path, position, "is not a JSON object")
    return fields


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object without duplicate keys, of which readers may take different values."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a key occurs twice")
    return fields


def _reject(path: Path, position: int, what: str) -> NoReturn:
    raise CapsuleError(
        "CAP-T141",
        f"{path.name} line {position} {what}",
        fix="The trace was damaged or is not Capsule's; take it from the run directory again.",
    )
