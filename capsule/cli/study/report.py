"""``capsule study report``: the tables and figures of a study."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from capsule.cli.common import guarded, no_effect
from capsule.cli.options import OUTPUT, option
from capsule.cli.study.arguments import ResultsArgument

if TYPE_CHECKING:
    from capsule.study.report import StudyReport


@guarded
def command(
    results: ResultsArgument,
    *,
    output: Annotated[Path | None, option("--output -o FILE", "File to write.", OUTPUT)] = None,
    form: Annotated[
        Literal["html", "csv", "latex"] | None,
        option(
            "--format FORMAT",
            "html (the default with --output): tables and figures. csv: every score with its claim "
            "id. latex: the table of groups. Printed if there is no --output.",
            OUTPUT,
        ),
    ] = None,
    starts: Annotated[
        str | None,
        option("--starts MEMBER", "Draw the returns of this member from each start state.", OUTPUT),
    ] = None,
    beside: Annotated[
        Path | None,
        option(
            "--beside RESULTS",
            "Results of the same study from another machine: compare the claim ids, and draw the "
            "curves of both.",
            OUTPUT,
        ),
    ] = None,
) -> None:
    """Summarise and compare groups, and draw their curves.

    Every number follows from the claims of the members, which are named by their claim ids.
    Signatures are not checked: 'capsule study verify' does that.

    Examples:
        # Print the mean and the standard deviation of each group.
        capsule study report studies/rates

        # Write the page with all tables and figures, from the bundle of a study.
        capsule study report rates.capsule-study.tar -o study.html

        # Compare two machines that ran the same study.
        capsule study report studies/rates --beside other.capsule-study.tar
    """
    from capsule.host.outputs import require_file, write_file
    from capsule.report.text import terminal_console
    from capsule.study.report import csv_report, latex_report, page_report, show_report

    _check_options(form if output is None else form or "html", starts, beside)
    if output is not None:
        require_file(output, (results, *([] if beside is None else [beside])))
    report = read_report(results)
    if beside is not None:
        report = report.compared(read_report(beside))
    if starts is not None:
        _check_member(report, starts)
    if output is None and form is None:
        show_report(report, terminal_console())
        return
    if report.missing:
        typer.echo(report.missing, err=True)
    if form == "csv":
        document = csv_report(report)
    elif form == "latex":
        document = latex_report(report)
    else:
        document = page_report(report, str(results), starts)
    if output is None:
        typer.echo(document, nl=False)
    else:
        write_file(output, document.encode())


def _check_options(form: str | None, starts: str | None, beside: Path | None) -> None:
    """Reject options that the format does not use; without a format, tables are printed."""
    what = "the printed tables" if form is None else f"--format {form}"
    page = "Or write the page, with --output FILE."
    if starts is not None and form != "html":
        raise no_effect("--starts", what, page)
    if beside is not None and form in ("csv", "latex"):
        raise no_effect("--beside", what, page)


def read_report(path: Path) -> StudyReport:
    """Read the results of a study from its folder, or from its bundle.

    Raises:
        CapsuleError: CAP-Y005, CAP-Y015 to CAP-Y018, CAP-B…: the results are not sound.
    """
    from capsule.bundle.trust import TrustPolicy
    from capsule.host.errors import CapsuleError
    from capsule.study.directory import StudyDirectory
    from capsule.study.report import StudyReport
    from capsule.study.results import StudyResults
    from capsule.study.study_bundle import open_study

    if path.is_dir():
        return StudyReport.of(StudyResults.of(StudyDirectory.open(path)))
    if not path.exists():
        raise CapsuleError(
            "CAP-Y005",
            f"{path} does not exist",
            fix="Name the folder that 'capsule study run' made, or the bundle of a study.",
        )
    with open_study(path, TrustPolicy.of([])) as (_, bundle):
        # open_study() has computed these tables from the claims again.
        return StudyReport(bundle.results, bundle.claims.tables, bundle.claim_id)


def _check_member(report: StudyReport, name: str) -> None:
    from capsule.host.errors import CapsuleError
    from capsule.study.directory import shown_members

    names = [member.identity.name for member in report.results.members]
    if name not in names:
        raise CapsuleError(
            "CAP-Y008",
            f"--starts {name!r}: no member of the study has this name and results",
            fix=shown_members(names),
        )
