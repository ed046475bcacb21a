"""What a run depends on, on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capsule.report.terminal import show_report
from capsule.report.text import print_line, printable
from capsule.verification.vary import VaryReport

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {
    "equal": "green",
    "differs": "bold red",
    "shielded": "green",
    "not-applicable": "dim",
    "undecided": "bold yellow",
}


def show_variations(report: VaryReport, console: Console) -> None:
    """Print the control, then a row for each variation, then the conclusion."""
    from rich.table import Table
    from rich.text import Text

    show_report(report.control, console)
    console.print()
    if report.variations:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("variation", "was", "became", "result", "verdict"):
            table.add_column(name, overflow="fold", no_wrap=name not in ("was", "became"))
        for each in report.variations:
            outcome = Text(each.outcome, style=_STYLES[each.outcome])
            judged = each.outcome in ("equal", "differs", "undecided") and each.report is not None
            verdict = each.report.verdict if judged and each.report is not None else "-"
            seen = (Text(printable(value or "-")) for value in (each.was, each.became))
            table.add_row(each.name, *seen, outcome, verdict)
        console.print(table)
        console.print()
        for each in report.variations:
            if each.reason is not None:
                print_line(console, f"{each.name}: {printable(each.reason)}")
    print_line(console, printable(report.conclusion))
