"""Reports that a command writes to a file that the user named, beside what it shows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import typer

from capsule.host.errors import CapsuleError, coded


def require_writable(report: Path, inputs: Iterable[Path] = ()) -> None:
    """Check before anything runs that the report can be written afterwards.

    Raises:
        CapsuleError: CAP-V082; CAP-X004, it is one of the inputs.
    """
    from capsule.host.outputs import check_output, require_other

    require_other(report, inputs)
    with _writing(report):
        check_output(report)


def write_report(report: Path, document: dict[str, Any]) -> None:
    """Write the report. If that fails now, say so on standard error: the result is still shown."""
    from capsule.host.outputs import write_output

    try:
        with _writing(report):
            write_output(report, json.dumps(document, indent=2).encode() + b"\n")
    except CapsuleError as error:
        tell(error)


def tell(error: CapsuleError) -> None:
    """Show an error on standard error that does not end the command."""
    from capsule.report.text import printable

    typer.echo(f"{error.code}: {printable(error.message)}\nfix: {printable(error.fix)}", err=True)


def _writing(report: Path) -> AbstractContextManager[None]:
    fix = "Use --report to name a file in a folder that you may write to, or /dev/null."
    return coded("CAP-V082", f"the report {str(report)!a} cannot be written", fix=fix)
