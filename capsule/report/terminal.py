"""Verdicts on a terminal, in at most thirty lines of usual width."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capsule.report.divergence import show_divergence
from capsule.report.returns import returns_rows
from capsule.report.text import printable
from capsule.verification.verdict import (
    ComponentDifference,
    OutputDifference,
    Report,
    TraceDifference,
)

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {
    "reproduced-bitwise": "bold green",
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
_EFFECTS = ("gate", "may differ", "recorded-only")  # the gravest first; equal facts are counted
MAX_ROWS = 7
MAX_CELL = 28
MAX_DIFFERENCES = 2


def show_report(report: Report, console: Console) -> None:
    """Print a verification report: facts first, the verdict last."""
    if report.environment:
        _show_environment(report, console)
    for label, value in _facts(report):
        console.print(
            f"{label:<16} {printable(value)}", markup=False, highlight=False, soft_wrap=True
        )
    if report.divergence is not None:
        show_divergence(report.divergence, console)
    else:
        for difference in report.differences[:MAX_DIFFERENCES]:
            _show_difference(difference, console)
        _show_rest(len(report.differences) - MAX_DIFFERENCES, "differences, in the report", console)
    if report.error is not None:
        code, fix = report.error["code"], report.error["fix"]
        console.print(f"{code}: {printable(fix)}", markup=False, highlight=False)
    console.print()
    console.print(report.verdict, style=_STYLES[report.verdict], end="", markup=False)
    console.print(f"  {printable(report.summary)}", markup=False, highlight=False)


def _facts(report: Report) -> list[tuple[str, str]]:
    rows = [
        ("expected", report.expected),
        ("bundle", report.bundle),
        ("claim id", report.claim_id),
        ("integrity", _yes(report.integrity, "unchanged since it was signed", "NOT intact")),
        ("authenticity", _authenticity(report)),
        ("image", _image(report)),
        ("training code", _yes(report.own_code, "this Capsule's own", "NOT this Capsule's own")),
        ("relaxations", ", ".join(report.relaxations) or None),
        ("not controlled", _open_sources(report)),
    ]
    if report.reexecuted_steps is not None:
        rows.append(("re-executed", f"{report.reexecuted_steps:,} steps"))
    rows += _challenge(report)
    analysed = report.divergence is not None and report.divergence.first is not None
    if report.first_difference is not None and not analysed:
        first = report.first_difference
        rows.append(("first difference", place_of(first)))
        rows.append(("", f"claimed {first.claimed}"))
        rows.append(("", f"found   {first.found}"))
    if report.statistics is not None:
        rows += returns_rows(report.statistics)
    return [(label, value) for label, value in rows if value is not None]


def _challenge(report: Report) -> list[tuple[str, str]]:
    """Say which segments were chosen and what a fresh seed gave."""
    rows = []
    if report.fresh_seed is not None:
        fresh = report.fresh_seed
        rows.append(("fresh seed", f"{fresh.seed}, {fresh.steps:,} steps, executed twice"))
        rows += [("", contradiction) for contradiction in fresh.contradictions]
    if report.challenge is not None:
        asked = report.challenge
        chosen = f"{len(asked.segments)} of {asked.of}, {asked.chosen}"
        passed = f"one false segment would have passed with probability {asked.undetected:.3g}"
        rows.append(("segments", f"{chosen}; {passed}"))
        for segment in asked.segments[:MAX_ROWS]:
            same = "the same" if segment.equal else "DIFFERENT"
            rows.append(("", f"steps {segment.begins:,} to {segment.ends:,}: {same}"))
    return rows


def _open_sources(report: Report) -> str | None:
    """Name what the ledger does not call controlled; the whole of it is in the JSON report."""
    rows = () if report.ledger is None else report.ledger.rows
    left = [row for row in rows if row.treatment in ("assumed", "unsupported")]
    return ", ".join(f"{row.source} ({row.treatment})" for row in left) or None


def place_of(first: TraceDifference | OutputDifference) -> str:
    """Say where a first difference is."""
    if isinstance(first, OutputDifference):
        return first.path + (f", line {first.line:,}" if first.line is not None else "")
    return f"step {first.step}, {first.component}" + (f", {first.name}" if first.name else "")


def _yes(fact: bool | None, yes: str, no: str) -> str | None:
    if fact is None:
        return None
    return yes if fact else no


def _image(report: Report) -> str | None:
    if report.image_source == "embedded":
        return "the signer's own, from the bundle; NOT rebuilt from the lock"
    return _yes(report.image_rebuilt, "rebuilt from the lock, same identity", "none")


def _authenticity(report: Report) -> str | None:
    if report.authentic is None:
        return None
    if not report.authentic:
        return f"NOT trusted: {report.signer}"
    counted = [str(signer) for signer in report.signers if signer.objection is None]
    others = [f"not counted: {s} {s.objection}" for s in report.signers if s.objection is not None]
    named = ", ".join(dict.fromkeys(counted)) or report.signer
    return "; ".join([f"signed by a key you trust: {named}", *others])


def _show_environment(report: Report, console: Console) -> None:
    """Print the facts in which the machines differ, the gravest first, and count the equal ones."""
    from rich.table import Table

    differing = [row for row in report.environment if row.effect != "none"]
    differing.sort(key=lambda row: _EFFECTS.index(row.effect))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("machine", "recorded", "here", "effect"):
        table.add_column(name, overflow="ellipsis", no_wrap=True, max_width=MAX_CELL)
    for row in differing[:MAX_ROWS]:
        cells = (row.field, row.recorded, row.here, row.effect)
        table.add_row(*(printable(str(cell)) for cell in cells))
    if differing:
        console.print(table, markup=False)
    _show_rest(len(differing) - MAX_ROWS, "differing facts, in the report", console)
    equal = len(report.environment) - len(differing)
    console.print(f"{equal} facts of the machine are equal", markup=False, highlight=False)
    console.print()


def _show_rest(count: int, what: str, console: Console) -> None:
    if count > 0:
        console.print(f"… and {count} more {what}", markup=False, highlight=False)


def _show_difference(difference: ComponentDifference, console: Console) -> None:
    console.print(f"differs          {printable(difference.component)}", markup=False)
    console.print(f"                 claimed {printable(difference.claimed)}", markup=False)
    console.print(f"                 found   {printable(difference.found)}", markup=False)
