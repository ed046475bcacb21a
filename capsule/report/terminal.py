"""Verification reports on a terminal, in at most thirty lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from capsule.host.wording import counted
from capsule.outcome import PROGRAM_FAILED, SHOWN_LINES
from capsule.report.divergence import divergence_lines, show_lines
from capsule.report.outputs import listed_paths, output_rows
from capsule.report.returns import returns_rows
from capsule.report.text import (
    MAX_SENTENCE,
    listed,
    listed_relaxations,
    print_line,
    printable,
)
from capsule.verification.verdict import (
    OutputDifference,
    Report,
    TraceDifference,
)

if TYPE_CHECKING:
    from rich.console import Console

_IN_REPORT = ", which the report lists"
_STYLES = {
    "reproduced-bitwise": "bold green",
    "reproduced-content": "bold yellow",
    "reproduced-prefix": "bold green",
    "reproduced-statistical": "bold green",
    "reproduced-segments": "bold green",
    "answers-fresh-seed": "bold green",
    "intact": "bold green",
    "environment-matches": "bold green",
    "not-reproduced": "bold red",
    "tampered": "bold red",
    "untrusted": "bold yellow",
    "inconclusive": "bold yellow",
}
EFFECTS = ("gate", "may differ", "recorded-only", "none")  # the gravest first
MAX_LINES = 30
TAIL = 3  # of them: an error, a blank one, the verdict
MAX_ROWS = 7
FEW_ROWS = 3  # where there is an analysis to be read
MAX_CELL = 28
GAPS = 6  # characters between the four columns
MAX_DIFFERENCES = 2
MAX_DATA = 3  # data sets


def show_report(report: Report, console: Console) -> None:
    """Print a verification report: facts first, then the verdict and what to do about it."""
    # Lines are counted, so each takes one: cells of the table are cut, and no line is wrapped.
    summary, output = _summary(report)
    room = MAX_LINES - TAIL - len(output)
    if report.environment:
        room -= _show_environment(report, console)
    lines = [*_facts(report), *_differences(report)]
    if len(lines) > room:
        rest = len(lines) - room + 1
        # One line of the room is for this remark.
        lines[room - 1 :] = [("", f"… and {counted(rest, 'more line')} in the report")]
    show_lines(lines, console)
    console.print()
    console.print(report.verdict, style=_STYLES[report.verdict], end="", markup=False)
    cause = "" if report.error is None else f"{report.error['code']}: "
    print_line(console, f"  {cause}{printable(summary, MAX_SENTENCE)}")
    for line in output:
        print_line(console, f"  {printable(line)}")
    if report.error is not None:
        print_line(console, f"fix: {printable(report.error['fix'])}")


def _summary(report: Report) -> tuple[str, list[str]]:
    """Return the verdict's reason, and the output of a program that failed, line by line."""
    if report.error is None or report.error["code"] != PROGRAM_FAILED:
        return report.summary, []
    summary, *output = report.summary.split("\n")
    # The program is not trusted, so its lines must stay apart from those of the report.
    return summary, [line.strip() for line in output[:SHOWN_LINES]]


def _facts(report: Report) -> list[tuple[str, str]]:
    rows = [
        ("expected", report.expected),
        ("bundle", report.bundle),
        ("claim id", report.claim_id),
        ("integrity", _yes(report.integrity, _intact(report), "NOT intact")),
        ("authenticity", _authenticity(report)),
        ("image", _image(report)),
        *_packages(report),
        ("source tree", _source_tree(report)),
        *_data(report),
        ("records", _records(report)),
        ("training code", _yes(report.own_code, "Capsule's", "NOT Capsule's")),
        ("not checked", listed_paths(report.unchecked)),
        ("claims", report.claimed),
        ("relaxations", listed_relaxations(report.relaxations, _IN_REPORT) or None),
        ("not controlled", _open_sources(report)),
        *_ledger_differences(report),
    ]
    if report.reexecuted_steps is not None:
        rows.append(("re-executed", counted(report.reexecuted_steps, "step")))
    rows += _challenge(report)
    # An analysis shows the first difference itself.
    analysed = report.divergence is not None and report.divergence.first is not None
    if report.first_difference is not None and not analysed and report.outputs is None:
        first = report.first_difference
        rows.append(("first difference", place_of(first)))
        rows.append(("", f"claimed {first.claimed}"))
        rows.append(("", f"found   {first.found}"))
    if report.outputs is not None:
        rows += output_rows(report.outputs)
    if report.statistics is not None:
        rows += returns_rows(report.statistics)
    return [(label, value) for label, value in rows if value is not None]


def _differences(report: Report) -> Iterator[tuple[str, str]]:
    """List what differs and, if it was analysed, why."""
    if report.divergence is not None:
        yield from divergence_lines(report.divergence)
        return
    for difference in report.differences[:MAX_DIFFERENCES]:
        yield "differs", difference.component
        yield "", f"claimed {difference.claimed}"
        yield "", f"found   {difference.found}"
    more = len(report.differences) - MAX_DIFFERENCES
    if more > 0:
        yield "", f"… and {counted(more, 'more difference')} in the report"


def _challenge(report: Report) -> list[tuple[str, str]]:
    """List the chosen segments and the result of the fresh seed."""
    rows = []
    if report.fresh_seed is not None:
        fresh = report.fresh_seed
        rows.append(("fresh seed", f"{fresh.seed}, {counted(fresh.steps, 'step')}, executed twice"))
        rows += [("", each) for each in (*fresh.contradictions, *fresh.unrepeated)]
    if report.challenge is not None:
        asked = report.challenge
        chosen = f"{len(asked.segments)} of {asked.of}, {asked.chosen}"
        passed = f"a single false segment would be missed with probability {asked.undetected:.3g}"
        rows.append(("segments", f"{chosen}; {passed}"))
        for segment in asked.segments[:MAX_ROWS]:
            same = "the same" if segment.equal else "DIFFERENT"
            rows.append(("", f"steps {segment.begins:,} to {segment.ends:,}: {same}"))
    return rows


def _open_sources(report: Report) -> str | None:
    """Name the sources that are not controlled. The JSON report has the whole ledger."""
    ledger = report.ledger or report.recorded_ledger
    left = () if ledger is None else ledger.uncontrolled
    named = listed([f"{row.source} ({row.treatment})" for row in left])
    if not named:
        return None
    return named if report.ledger is not None else f"{named}, as the signer recorded"


def _ledger_differences(report: Report) -> Iterator[tuple[str, str]]:
    """List the rows in which the recorded ledger and that of the re-execution differ."""
    for number, row in enumerate(report.ledger_differences[:MAX_DIFFERENCES]):
        treatments = f"recorded {row.recorded or 'nowhere'}, here {row.here or 'no such row'}"
        yield "ledger differs" if number == 0 else "", f"{row.source}: {treatments}"
    more = len(report.ledger_differences) - MAX_DIFFERENCES
    if more > 0:
        yield "", f"… and {counted(more, 'more source')} in the report"


def place_of(first: TraceDifference | OutputDifference) -> str:
    """Describe the place of a first difference."""
    if isinstance(first, OutputDifference):
        return first.path + (f", {first.where}" if first.where is not None else "")
    return f"step {first.step}, {first.component}" + (f", {first.name}" if first.name else "")


def _yes(fact: bool | None, yes: str, no: str) -> str | None:
    if fact is None:
        return None
    return yes if fact else no


def _packages(report: Report) -> Iterator[tuple[str, str]]:
    """Name the packages beyond the usual ones, and what runs at every start, in a line each."""
    facts = (
        ("added to Capsule's recipe", report.besides),
        ("executed at every start of Python", report.startup),
    )
    label = "packages"
    for what, names in facts:
        if names:
            yield label, f"{what}: {listed(names, _IN_REPORT)}"
            label = ""


def _source_tree(report: Report) -> str | None:
    if report.source_tree is None:
        return None
    # A program has no trace, and its run is described by what it claims.
    use = "the program" if report.claimed else "executed in the trainer's process"
    return f"the SIGNER'S code, {use}: {report.source_tree}"


def _data(report: Report) -> Iterator[tuple[str, str]]:
    """Name the data sets, which no spec contains, in a line each."""
    data = report.data or ()
    yield from zip(("data", *[""] * MAX_DATA), data[:MAX_DATA], strict=False)
    if (more := len(data) - MAX_DATA) > 0:
        yield "", f"and {more} more{_IN_REPORT}"


def _records(report: Report) -> str | None:
    if report.records is None:
        return None
    return f"followed as the SIGNER wrote them: {', '.join(report.records)}"


def _image(report: Report) -> str | None:
    if report.image_source == "embedded":
        return "the signer's, from the bundle; NOT rebuilt from the lock"
    if report.image_source == "registry":
        return "the claimed one, from a registry; NOT rebuilt from the lock"
    if report.image_source == "supplied-base":
        return "rebuilt from the lock except for the base layer, which is the SIGNER'S"
    return _yes(report.image_rebuilt, "rebuilt from the lock, with the same identity", "none")


def _intact(report: Report) -> str:
    """Describe the files of an intact bundle. Only a trusted signature shows who listed them."""
    if report.authentic:
        return "unchanged since it was signed"
    return "the files are those that the bundle lists"


def _authenticity(report: Report) -> str | None:
    if report.authentic is None:
        return None
    trusted = [str(signer) for signer in report.signers if signer.rejection_reason is None]
    if not report.authentic and trusted:
        return f"NOT enough trusted keys: {', '.join(dict.fromkeys(trusted))}"
    if not report.authentic:
        return f"NOT trusted: {report.signer}"
    others = [
        f"not counted: {s} {s.rejection_reason}"
        for s in report.signers
        if s.rejection_reason is not None
    ]
    # A key may have signed both the envelope and the manifest, and is named once.
    named = ", ".join(dict.fromkeys(trusted)) or report.signer
    return "; ".join([f"signed by a trusted key: {named}", *others])


def _show_environment(report: Report, console: Console) -> int:
    """Print the facts in which the machines differ, the gravest first, and count the equal ones.

    Returns:
        Lines printed.
    """
    from rich.table import Table

    differing = [row for row in report.environment if row.effect != "none"]
    differing.sort(key=lambda row: EFFECTS.index(row.effect))
    shown = differing[: MAX_ROWS if report.divergence is None else FEW_ROWS]
    table = Table(box=None, pad_edge=False, header_style="bold")
    # On a narrow terminal, values are cut, and no names.
    names = max((len(row.field) for row in shown), default=0) + max(map(len, EFFECTS))
    left = (console.width - names - GAPS) // 2
    widths = {"recorded": left, "here": left}
    for name in ("machine", "recorded", "here", "effect"):
        width = max(1, min(MAX_CELL, widths.get(name, MAX_CELL)))
        table.add_column(name, overflow="ellipsis", no_wrap=True, max_width=width)
    for row in shown:
        cells = (row.field, row.recorded, row.here, row.effect)
        table.add_row(*(printable(str(cell)) for cell in cells))
    if differing:
        console.print(table, markup=False)
    more = len(differing) - len(shown)
    if more:
        rest = counted(more, "more differing fact")
        console.print(f"… and {rest} in the report", highlight=False)
    equal = len(report.environment) - len(differing)
    facts = counted(equal, "fact of the machine is", "facts of the machine are")
    console.print(f"{facts} equal", markup=False, highlight=False)
    console.print()
    # The head of the table, the remark, the count and the blank line.
    return len(shown) + bool(differing) + bool(more) + 2
