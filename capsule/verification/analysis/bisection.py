"""The first update in which two runs differ, and the first operator in it.

Each side is executed again with a dense record (:mod:`capsule.experiment.dense`) of the updates
between the last equal and the first differing record of the two traces: from the last checkpoint
before them whose state its bundle kept, or else from its start. An execution counts only if it
repeats its side's own trace.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path

from capsule.bundle.claims import open_run_file
from capsule.experiment import contract
from capsule.experiment.dense import (
    OperatorCall,
    OperatorResult,
    Update,
    read_header,
    read_updates,
)
from capsule.experiment.trace import Mark, compare_records
from capsule.host.errors import CapsuleError
from capsule.verification.analysis.causes import COMPUTED
from capsule.verification.analysis.comparison import compare_traces
from capsule.verification.analysis.runs import ComparedRun
from capsule.verification.analysis.trace_alignment import record_names
from capsule.verification.content.ulp import Distance, Width
from capsule.verification.verdict import (
    Bisection,
    Divergence,
    OperatorDivergence,
    OperatorInvocation,
)

NOTHING = (0, Distance(), True)  # is comparable of the results of two operators
_WIDTHS: dict[str, Width] = {"float32": 32, "float64": 64}
Source = ComparedRun | Path
"""A run that can be executed, or the dense record of one."""
Execute = Callable[[ComparedRun, contract.DenseWindow, Path], Mark]
"""Executes a side up to the end of a window, in a new run directory; says from where."""


def window_of(found: Divergence, a: ComparedRun) -> contract.DenseWindow:
    """Return the updates among which the first difference is.

    Raises:
        CapsuleError: CAP-V076, the traces do not diverge in data or in trained tensors.
    """
    training = a.spec.trainer
    if found.first is None or found.first.component in ("step", "end", "format"):
        where = "nowhere" if found.first is None else f"in the {found.first.component} of a record"
        raise CapsuleError(
            "CAP-V076",
            f"the traces of {found.a} and {found.b} diverge {where}, so there is nothing to bisect",
            fix="Remove --bisect. The analysis without it reports what differs.",
        )
    unit: int = getattr(training, "interval_steps")  # noqa: B009 - programs have no trace
    # The window begins with the first update after the last equal record.
    return contract.DenseWindow(first=found.last_equal + unit, last=found.first.step)


def bisect(
    a: Source, b: Source, window: contract.DenseWindow, execute: Execute, scratch: Path
) -> Bisection:
    """Find the first update, and operator, that differ.

    Args:
        a: One side.
        b: The other.
        window: The updates to look at.
        execute: Executes a side.
        scratch: An empty folder, for run directories.

    Raises:
        CapsuleError: CAP-V074, a dense record is malformed or of other updates; CAP-V075, a side
            does not give its own trace here; CAP-V077, no update in the window differs.
    """
    found, measured = compare_dense(*_records(a, b, window, execute, scratch / "window"))
    # A dense record that was given as a file cannot be made again for one update.
    if measured or isinstance(a, Path) or isinstance(b, Path) or window.first == window.last:
        return found
    # The results of the operators had no room in so large a window.
    exact = contract.DenseWindow(first=found.step, last=found.step)
    return compare_dense(*_records(a, b, exact, execute, scratch / "update"))[0]


def dense_record(
    side: ComparedRun, window: contract.DenseWindow, execute: Execute, directory: Path
) -> Path:
    """Execute a side again and return its dense record.

    Raises:
        CapsuleError: CAP-V075, it does not give its own trace; CAP-B090, it left no dense record.
    """
    mark = execute(side, window, directory)
    if side.training is not None:
        again = directory / contract.TRACE
        first = compare_traces(side.training.trace, again, mark, window.last)
        if first is not None:
            raise CapsuleError(
                "CAP-V075",
                f"{side.name} does not repeat its own trace here: step {first.step}, "
                f"{first.component}",
                fix="Run 'capsule diff A B --dense FILE' where it does, with this side as A, and "
                "name FILE in its place.",
            )
    # An image may leave none, or a link to a file of this machine, which must not be copied.
    open_run_file(directory, contract.DENSE).close()
    return directory / contract.DENSE


def compare_dense(a: Path, b: Path) -> tuple[Bisection, bool]:
    """Compare two dense records.

    Returns:
        The first update and operator that differ, and whether the operator's results could be
        compared, or no operator differs.

    Raises:
        CapsuleError: CAP-V074, CAP-V077.
    """
    steps = 0
    for left, right in zip_longest(read_updates(a), read_updates(b)):
        if left is None or right is None or left.record.step != right.record.step:
            raise CapsuleError(
                "CAP-V074",
                f"{a.name} and {b.name} are dense records of other updates",
                fix="Make both around the same step, with the same version of Capsule.",
            )
        steps = left.record.step
        # The values are compared, and not heads as in traces: dense records are in no chain.
        if left.record.values != right.record.values:
            return _parting(left, right)
    raise CapsuleError(
        "CAP-V077",
        f"all updates of the dense records are equal, up to step {steps}",
        fix="Compare the traces again: the difference is elsewhere, or does not repeat; 'capsule "
        "diagnose' finds what does not repeat.",
    )


def _records(
    a: Source, b: Source, window: contract.DenseWindow, execute: Execute, folder: Path
) -> tuple[Path, Path]:
    folder.mkdir(mode=0o700)  # runs in it may have another user id (CAP-E042)
    paths = [
        source
        if isinstance(source, Path)
        else dense_record(source, window, execute, folder / place)
        for source, place in ((a, "a"), (b, "b"))
    ]
    return paths[0], paths[1]


def _parting(left: Update, right: Update) -> tuple[Bisection, bool]:
    difference = compare_records(left.record, right.record, record_names(left.record, right.record))
    operator, measured = _operator(left, right)
    if operator is not None and difference.component not in COMPUTED and not operator.same_inputs:
        operator = None  # it was given what differed before
    found = Bisection(
        step=difference.step,
        component=difference.component,
        name=difference.name,
        also=difference.also,
        operator=operator,
    )
    return found, measured or operator is None


def _operator(left: Update, right: Update) -> tuple[OperatorDivergence | None, bool]:
    """Return the first operator call that differs, and whether its results could be compared."""
    calls = _first_calls(left.calls, right.calls)
    if calls is None:
        return None, True
    number, a, b = calls
    comparable = a.operator == b.operator
    elements, total, measured = _results(_computed(a), _computed(b)) if comparable else NOTHING
    found = OperatorDivergence(
        step=left.record.step,
        call=number,
        a=OperatorInvocation(operator=a.operator, where=a.where, arguments=a.arguments),
        b=OperatorInvocation(operator=b.operator, where=b.where, arguments=b.arguments),
        same_inputs=sorted(a.inputs) == sorted(b.inputs),
        elements=elements,
        differing=total.differing,
        ulp=total.ulp if elements else None,
    )
    return found, measured


def _first_calls(
    left: Sequence[OperatorCall], right: Sequence[OperatorCall]
) -> tuple[int, OperatorCall, OperatorCall] | None:
    """Return number and both sides of the first call whose results differ.

    Where the sides begin to call other operators, those that only copy are left out.
    """
    for number, (a, b) in enumerate(zip(left, right, strict=False)):
        if a.operator != b.operator:
            # The call that computes something is the one to name, and not a copy in front of it.
            own = next((each for each in left[number:] if _computed(each)), a)
            other = next((each for each in right[number:] if _computed(each)), b)
            return left.index(own, number), own, other
        if _digests(a) != _digests(b):
            return number, a, b
    return None


def _digests(call: OperatorCall) -> list[str]:
    return [result.digest for result in call.results]


def _computed(call: OperatorCall) -> list[OperatorResult]:
    """Return the results that are not what the call was given."""
    return [result for result in call.results if result.digest not in call.inputs]


def _results(
    lefts: Sequence[OperatorResult], rights: Sequence[OperatorResult]
) -> tuple[int, Distance, bool]:
    """Compare the results of two calls as far as they were kept.

    Returns:
        Elements compared, how far apart they are, and whether any result was kept.
    """
    total = Distance()
    kept = False
    for left, right in zip(lefts, rights, strict=False):
        if left.data is None or right.data is None:
            continue
        kept = True
        first, second = _data(left), _data(right)
        if left.dtype == right.dtype and len(first) == len(second) and left.dtype in _WIDTHS:
            total.add(first, second, _WIDTHS[left.dtype])
    return total.elements, total, kept


def _data(result: OperatorResult) -> bytes:
    try:
        data = base64.b64decode(result.data or "", validate=True)
    except ValueError as error:  # binascii.Error, or characters beyond ASCII
        raise _malformed(f"results that are not base64: {error}") from error
    if result.dtype in _WIDTHS and len(data) * 8 % _WIDTHS[result.dtype]:
        raise _malformed(f"a result of type {result.dtype} with {len(data)} bytes")
    return data


def _malformed(what: str) -> CapsuleError:
    return CapsuleError(
        "CAP-V074",
        f"a dense record contains {what}",
        fix="Make it again with 'capsule diff … --dense FILE', with the same version of Capsule.",
    )


def window_of_dense(path: Path) -> contract.DenseWindow:
    """Return the updates that a dense record is of.

    Raises:
        CapsuleError: CAP-V074.
    """
    header = read_header(path)
    return contract.DenseWindow(first=header.first, last=header.last)
