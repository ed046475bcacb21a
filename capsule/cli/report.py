"""``capsule report``: one page about a run, its story on the terminal, or a standard's document."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from capsule.cli.common import KeysOption, guarded

if TYPE_CHECKING:
    from capsule.report.subject import Subject

Format = Literal["html", "ro-crate", "neurips", "acm", "model-card"]


@guarded
def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle to report on; nothing is executed.")],
    files: Annotated[list[Path] | None, typer.Argument(help="Reports and receipts on it.")] = None,
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write; without one, a summary is printed."),
    ] = None,
    form: Annotated[
        Format | None,
        typer.Option("--format", help="What to write, or to print without -o; html by default."),
    ] = None,
    keys: KeysOption = None,
) -> None:
    """Say on one page what a bundle holds and what was found by running it again."""
    from capsule.bundle.bundle import open_bundle
    from capsule.bundle.trust import load_trusted
    from capsule.report.subject import read_subject

    trusted = load_trusted(keys or [])
    with open_bundle(bundle, trusted) as opened:
        subject = read_subject(opened, bundle.name, files or [], trusted)
    if output is None and form is None:
        from rich.console import Console

        from capsule.report.summary import show_subject

        show_subject(subject, Console())
        return
    document = _document(subject, form or "html")
    if output is None:
        typer.echo(document, nl=False)
    else:
        _write(output, document)


def _document(subject: Subject, form: Format) -> str:
    """Write a subject in one of the forms."""
    from capsule.report import checklists, model_card, page
    from capsule.report.subject import crate_of

    writers: dict[Format, Callable[[Subject], str]] = {
        "html": page.report_page,
        "ro-crate": crate_of,
        "neurips": checklists.neurips,
        "acm": checklists.artifact_appendix,
        "model-card": model_card.model_card,
    }
    return writers[form](subject)


def _write(path: Path, document: str) -> None:
    from capsule.experiment.canonical import write_output
    from capsule.experiment.errors import CapsuleError, ExitCode

    try:
        write_output(path, document.encode())
    except OSError as error:
        raise CapsuleError(
            "CAP-P104",
            f"cannot write {str(path)!a}: {error.strerror}",
            fix="Choose a file in a folder you may write to.",
            exit_code=ExitCode.USAGE,
        ) from error
