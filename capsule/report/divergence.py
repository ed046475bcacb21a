"""The first difference of two runs on a terminal, in about thirty lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from capsule.host.wording import agreeing, counted, shown_value
from capsule.report.outputs import output_rows
from capsule.report.text import print_line, printable
from capsule.verification.verdict import (
    Bisection,
    Divergence,
    NumberDifference,
    OperatorDivergence,
    OperatorInvocation,
    TensorDifference,
)

if TYPE_CHECKING:
    from rich.console import Console

MAX_EXPLANATIONS = 6
MAX_TENSORS = 3
MAX_RESULTS = 3


def show_divergence(found: Divergence, console: Console) -> None:
    """Print an analysis: the two runs, the first difference, its causes and its size."""
    verdict = "equal, bit for bit" if found.equal else "different"
    show_lines(
        [("a", found.a), ("b", found.b), *divergence_lines(found), ("result", verdict)], console
    )


def show_lines(lines: Iterable[tuple[str, str]], console: Console) -> None:
    """Print lines: a label, which may be empty, and a text."""
    for label, text in lines:
        print_line(console, f"{label:<16} {printable(text)}".rstrip())


def divergence_lines(found: Divergence) -> Iterator[tuple[str, str]]:
    """Yield the lines of an analysis, the most important ones first."""
    yield from _place(found)
    if found.outputs is not None:
        yield from output_rows(found.outputs)
    for cause in found.causes:
        yield "cause", cause.shown
        # Before the evidence, which is the first to go if there is no room for everything.
        if cause.fix is not None:
            yield "fix", cause.fix
        for position, sentence in enumerate(cause.evidence):
            yield "" if position else "evidence", f"- {sentence}"
    for number in found.numbers:
        yield "distance", _number(number)
    yield from _tensors(found.checkpoint, found.tensors)
    for item in found.differences[:MAX_RESULTS]:
        yield "differs", f"{item.component}: {item.claimed} / {item.found}"
    yield from _more(len(found.differences) - MAX_RESULTS, "result", "results")
    # Runs with equal results may have different pins, which then explain nothing.
    if not found.equal:
        for explanation in found.explanations[:MAX_EXPLANATIONS]:
            text = f"{explanation.what}: {explanation.a} / {explanation.b}; {explanation.why}"
            yield "possible reason" if explanation.matters else "not a reason", text
        left = len(found.explanations) - MAX_EXPLANATIONS
        yield from _more(left, "difference of pins or machines", "differences of pins or machines")


def _place(found: Divergence) -> Iterator[tuple[str, str]]:
    if found.first is None:
        if found.map is not None:
            yield "trace", f"equal, record by record, up to step {found.map.steps:,}"
        return
    first = found.first
    inside = f", {first.name}" if first.name else ""
    yield "first difference", f"step {first.step:,}, {first.component}{inside}"
    yield "", f"{first.claimed} / {first.found}"
    if first.also:
        yield "", f"and in the same record {', '.join(first.also)}"
    until = [
        f"{name} {'not at all' if step is None else format(step, ',')}"
        for name, step in found.equal_until.items()
    ]
    yield "equal until step", ", ".join(until)
    if found.bisection is not None:
        yield from _bisection(found.bisection)


def _bisection(found: Bisection) -> Iterator[tuple[str, str]]:
    inside = f", {found.name}" if found.name else ""
    yield (
        "exact place",
        f"in the update that ends at step {found.step:,}: {found.component}{inside}",
    )
    if found.operator is None:
        yield "", "no operator gave other bits before, so the difference comes from outside torch"
    else:
        yield from _operator(found.operator)


def _operator(found: OperatorDivergence) -> Iterator[tuple[str, str]]:
    inputs = "equal" if found.same_inputs else "different"
    yield "operator", f"call {found.call:,} in this update: {_called(found.a)}"
    if (found.a.operator, found.a.where) != (found.b.operator, found.b.where):
        yield "", f"b calls {_called(found.b)}"
    for name in dict.fromkeys([*found.a.arguments, *found.b.arguments]):
        values = found.a.arguments.get(name), found.b.arguments.get(name)
        if values[0] != values[1]:
            yield "", f"argument {name}: {' / '.join(map(shown_value, values))}"
    # The results of two operators have no distance.
    if found.a.operator != found.b.operator:
        yield "", "from here on the two runs execute different operators"
        return
    distance = "not comparable" if found.ulp is None else f"up to {found.ulp:,} ulp apart"
    differ = agreeing(found.differing, "differs", "differ")
    elements = f"{found.differing:,} of {counted(found.elements, 'element')} {differ}"
    yield "", f"{elements}, {distance}; {inputs} inputs"


def _called(call: OperatorInvocation) -> str:
    return f"{call.operator} at {call.where or 'an unknown line'}"


def _number(number: NumberDifference) -> str:
    a, b = float.fromhex(number.a), float.fromhex(number.b)
    size = "" if number.ulp is None else f", {number.ulp:,} ulp"
    size += "" if number.relative is None else f", relative {number.relative:.2g}"
    return f"{number.what}: {a!r} / {b!r}{size}"


def _tensors(step: int | None, found: Sequence[TensorDifference]) -> Iterator[tuple[str, str]]:
    if step is None:
        return
    if not found:
        yield "checkpoint", f"step {step:,}: every tensor is equal"
        return
    yield "checkpoint", f"step {step:,}: {counted(len(found), 'tensor differs', 'tensors differ')}"
    for item in found[:MAX_TENSORS]:
        size = "not comparable" if item.ulp is None else f"up to {item.ulp:,} ulp"
        size += f", {item.nonfinite:,} not finite" if item.nonfinite else ""
        share = 100 * item.differing / item.elements if item.elements else 0.0
        relative = "" if item.relative is None else f", relative {item.relative:.2g}"
        yield (
            "",
            f"{item.name}: {share:.3g} % of {counted(item.elements, 'element')}, {size}{relative}",
        )


def _more(count: int, one: str, many: str) -> Iterator[tuple[str, str]]:
    if count > 0:
        yield "", f"and {counted(count, f'more {one}', f'more {many}')}"
