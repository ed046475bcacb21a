"""``capsule report``: write a report page, a summary or a standard document about a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from capsule.cli.common import guarded
from capsule.cli.options import OUTPUT, KeysOption, option

if TYPE_CHECKING:
    from capsule.report.subject import ReportedRun

Format = Literal["html", "ro-crate", "neurips", "acm", "model-card"]


@guarded
def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle to report on.")],
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE", help="Verification reports and receipts of the bundle."),
    ] = None,
    *,
    output: Annotated[
        Path | None,
        option(
            "--output -o FILE",
            "File to write. Without --output and --format, a summary is printed.",
            OUTPUT,
        ),
    ] = None,
    form: Annotated[
        Format | None,
        option(
            "--format FORMAT",
            "html (the default with --output), ro-crate, neurips, acm or model-card. Printed "
            "if there is no --output.",
            OUTPUT,
        ),
    ] = None,
    keys: KeysOption = None,
) -> None:
    """Summarise a bundle and its verifications on one page.

    Nothing is executed.

    Examples:
        # Write a page with the verdict, the learning curves and the first difference.
        capsule report run.capsule.tar verify-report.json -o report.html

        # Print a model card in Markdown.
        capsule report run.capsule.tar --format model-card
    """
    from capsule.bundle.bundle import open_bundle
    from capsule.bundle.trust import load_trusted
    from capsule.host.outputs import require_file, write_file
    from capsule.report.subject import read_subject

    if output is not None:
        require_file(output, (bundle, *(files or ()), *(keys or ())))
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
        write_file(output, document.encode())


def _document(subject: ReportedRun, form: Format) -> str:
    """Return the document about a subject in one of the formats."""
    from capsule.report import checklists, model_card, page
    from capsule.report.subject import crate_of

    writers: dict[Format, Callable[[ReportedRun], str]] = {
        "html": page.report_page,
        "ro-crate": crate_of,
        "neurips": checklists.neurips,
        "acm": checklists.artifact_appendix,
        "model-card": model_card.model_card,
    }
    return writers[form](subject)
