"""The ledger and the findings of a diagnosis, on a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from capsule.diagnosis.diagnose import Diagnosis
from capsule.diagnosis.findings import Finding
from capsule.diagnosis.settings import described
from capsule.diagnosis.trial import Trial
from capsule.entropy.ledger import Ledger
from capsule.host.wording import counted
from capsule.report.text import print_line, printable

if TYPE_CHECKING:
    from rich.console import Console

_LEVEL_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "dim"}
_TREATMENT_STYLES = {
    "eliminated": "green",
    "seeded": "green",
    "ordered": "green",
    "recorded": "green",
    "assumed": "yellow",
    "unsupported": "bold red",
}


def show_ledger(ledger: Ledger, console: Console) -> None:
    """Print the ledger as a table: source, treatment, evidence."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("source of nondeterminism", "treatment", "evidence"):
        table.add_column(name, overflow="fold")
    for row in ledger.rows:
        table.add_row(
            Text(row.source),
            Text(row.treatment, style=_TREATMENT_STYLES[row.treatment]),
            Text(printable(row.evidence)),
        )
    console.print(table)


def show_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print every finding, then the comparison of the two runs."""
    for item in diagnosis.findings:
        _show_finding(item, console)
    census = diagnosis.operators
    seen = ", ".join(f"{count} {name}" for name, count in census.statuses.items() if count)
    print_line(console, f"operators  {counted(census.calls, 'call')}: {seen or 'none'}")
    repeated = counted(census.repeated, "call")
    print_line(console, f"repeated   {repeated}, {census.differing:,} of them gave other bits")
    length = "to the end" if diagnosis.steps is None else counted(diagnosis.steps, "step")
    outcome = "equal bits" if diagnosis.equal else "different results"
    print_line(console, f"runs       2, {length}: {outcome}")
    levels: list[str] = [item.level for item in diagnosis.findings]
    counts = [counted(levels.count(level), level) for level in _LEVEL_STYLES]
    print_line(console, f"findings   {', '.join(counts)}")


def show_trial(trial: Trial, spec: Path, console: Console) -> None:
    """Print whether the tried settings helped, and whether the spec was changed."""
    print_line(console, f"tried      {described(trial.settings)}")
    if trial.diagnosis.equal:
        change = "was changed, lock it again" if trial.applied else "was not changed"
        print_line(console, f"           two runs gave equal bits; {spec} {change}")
        return
    print_line(console, "           the two runs still differ; the spec was not changed")
    for item in trial.diagnosis.findings:
        _show_finding(item, console)


def _show_finding(item: Finding, console: Console) -> None:
    where = f"  {item.where}" if item.where else ""
    console.print(item.code, style=_LEVEL_STYLES[item.level], end="", markup=False, highlight=False)
    print_line(console, f"{where}  {printable(item.message)}")
    if item.text:
        print_line(console, f"    {printable(item.text)}")
    print_line(console, f"    fix: {item.mitigation}")
    if item.patch:
        print_line(console, f"    --apply tries {described(item.patch)}")
    console.print()
