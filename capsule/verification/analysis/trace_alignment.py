"""The alignment of two traces, record by record, to their ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from capsule.experiment.spec import RecordingSpec
from capsule.experiment.trace import COMPONENTS, Difference, Record, compare_records, read_trace
from capsule.verification.verdict import DivergenceMap

# All that comes later follows from these. If they differ once, hardly anything but a coincidence of
# rounding makes them equal again.
STATES = ("streams", "parameters", "target", "optimizer")
# These mean the same whatever steps the records cover.
_AT_A_STEP = frozenset({"parameters", "target", "optimizer"})


@dataclass
class TraceAlignment:
    """The common part of two traces, and their differences.

    Attributes:
        first: The first difference, None if there is none.
        last_equal: Step of the last record before it.
        equal_until: Component to the step of the last record up to which it is equal.
        intervals: Component to first and last step of consecutive records that differ in it.
        losses: Step and both losses where they first differ.
        records: Pairs of records compared.
        steps: Step of the last.
        differing: How many of them differ in anything.
        reconverged: Whether all records after the last difference are equal, tensors included.
    """

    first: Difference | None = None
    last_equal: int = 0
    equal_until: dict[str, int | None] = field(default_factory=dict)
    intervals: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    losses: tuple[int, float, float] | None = None
    records: int = 0
    steps: int = 0
    differing: int = 0
    reconverged: bool = False
    _open: set[str] = field(default_factory=set)  # components that differ in their last record

    @property
    def at_once(self) -> bool:
        """Whether the first records differ already."""
        return self.first is not None and self.last_equal == 0

    @property
    def last_differing(self) -> int:
        """Step of the last record that differs in a component; 0 if none does."""
        return max((stop for each in self.intervals.values() for _, stop in each), default=0)

    @property
    def rejoined(self) -> int | None:
        """Step of the last differing record, if states differ and all are equal again later."""
        altered = self.reconverged and any(name in self.intervals for name in STATES)
        return self.last_differing if altered else None

    def map(self) -> DivergenceMap:
        """Return the intervals as reports have them."""
        components = {name: tuple(self.intervals.get(name, ())) for name in self.equal_until}
        return DivergenceMap(steps=self.steps, components=components)

    def take(self, left: Record, right: Record, names: list[str], *, heads: bool) -> None:
        """Take note of a pair of records.

        Args:
            left: A record.
            right: Its counterpart, at the same step.
            names: The components that can be compared.
            heads: Whether the heads can be compared, too. They cover the bytes of all lines so far,
                and so differ if the same facts are written otherwise.
        """
        differing = [name for name in names if left.values.get(name) != right.values.get(name)]
        for name in names:
            self._component(name, left.step, differs=name in differing)
        self.records += 1
        self.steps = left.step
        if differing:
            self.differing += 1
            self.reconverged = False
        elif self.first is None:
            self.last_equal = left.step
        else:
            # A record without tensors does not show that the parameters are equal again.
            self.reconverged = self.reconverged or "parameters" in names
        if "loss" in differing and self.losses is None:
            self.losses = _losses(left, right)
        if self.first is None and (differing or (heads and left.head != right.head)):
            self.first = compare_records(left, right, names)

    def _component(self, name: str, step: int, *, differs: bool) -> None:
        if not differs:
            self._open.discard(name)
            if name not in self.intervals:
                self.equal_until[name] = step
            return
        self.equal_until.setdefault(name, None)
        intervals = self.intervals.setdefault(name, [])
        if name in self._open:
            intervals[-1] = (intervals[-1][0], step)
        else:
            intervals.append((step, step))
        self._open.add(name)


def align_traces(
    first: Path, second: Path, recordings: tuple[RecordingSpec, RecordingSpec], *, prefix: bool
) -> TraceAlignment:
    """Compare two traces record by record.

    Of traces with different intervals, the components are compared that mean the same in both.

    Args:
        first: One trace.
        second: Another.
        recordings: How densely each was written.
        prefix: Accept that one trace ends before the other.

    Raises:
        CapsuleError: CAP-T141, a line is not what a trace holds.
    """
    alignment = TraceAlignment()
    alike = recordings[0] == recordings[1]
    same_interval = recordings[0].trace_interval == recordings[1].trace_interval
    for left, right in _pairs(read_trace(first), read_trace(second), skip=not same_interval):
        if left is None or right is None or left.step != right.step:
            alignment.first = alignment.first or _unpaired(
                left, right, prefix=prefix or not same_interval
            )
            break
        names = [
            name for name in record_names(left, right) if alike or _comparable(left, right, name)
        ]
        # Everything else is a digest of what flowed since the record before, and so of other steps.
        if not same_interval:
            names = [name for name in names if name in _AT_A_STEP]
        # The heads of traces with other intervals differ, too, where that means nothing.
        if names or alike:
            alignment.take(left, right, names, heads=alike)
    return alignment


def _pairs(
    lefts: Iterator[Record], rights: Iterator[Record], *, skip: bool
) -> Iterator[tuple[Record | None, Record | None]]:
    """Pair records in order; with ``skip`` only those of equal steps, until a trace ends."""
    left, right = next(lefts, None), next(rights, None)
    while left is not None or right is not None:
        # Whichever trace is behind is read on, until both are at the same step.
        while skip and left is not None and right is not None and left.step != right.step:
            if left.step < right.step:
                left = next(lefts, None)
            else:
                right = next(rights, None)
        yield left, right
        left, right = next(lefts, None), next(rights, None)


def _unpaired(left: Record | None, right: Record | None, *, prefix: bool) -> Difference | None:
    if left is not None and right is not None:
        return Difference(left.step, "step", None, str(left.step), str(right.step))
    present = left or right
    if prefix or present is None:
        return None
    more = ("more", None) if right is None else (None, "more")
    return Difference(present.step, "end", None, *more)


def record_names(left: Record, right: Record) -> list[str]:
    """Return the components of two records in data-flow order, unknown ones last."""
    present = left.values.keys() | right.values.keys()
    return [name for name in COMPONENTS if name in present] + sorted(present - set(COMPONENTS))


def _comparable(left: Record, right: Record, name: str) -> bool:
    """Tell whether a component has one form in both: streams may be folded into one digest."""
    return type(left.values.get(name)) is type(right.values.get(name))


def _losses(left: Record, right: Record) -> tuple[int, float, float] | None:
    values = [each.values.get("loss") for each in (left, right)]
    a, b = (each.get("last") if isinstance(each, dict) else None for each in values)
    if not (isinstance(a, str) and isinstance(b, str) and a != b):
        return None
    try:
        return left.step, float.fromhex(a), float.fromhex(b)
    except (ValueError, OverflowError):  # an untrusted trace
        return None
