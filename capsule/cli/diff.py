"""``capsule diff``: compare two runs, and explain their first difference."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capsule.cli.common import guarded, print_json
from capsule.cli.options import (
    OUTPUT,
    EngineOption,
    JsonOption,
    KeysOption,
    QuietOption,
    UntrustedOption,
    option,
)
from capsule.cli.reports import require_writable, write_report

SideArgument = Annotated[
    Path, typer.Argument(help="Bundle, run directory or, with --bisect, a dense record.")
]


@guarded
def command(
    a: SideArgument,
    b: SideArgument,
    *,
    bisect: Annotated[
        bool,
        option(
            "--bisect",
            "Execute both runs again up to their first difference, and find the operator "
            "that causes it.",
        ),
    ] = False,
    dense: Annotated[
        Path | None,
        option(
            "--dense FILE",
            "Execute only A again, and write a dense record of it to compare on another machine.",
        ),
    ] = None,
    keys: KeysOption = None,
    allow_untrusted: UntrustedOption = False,
    engine: EngineOption = "auto",
    report: Annotated[
        Path | None,
        option("--report FILE", "Also write the comparison to a file, as JSON.", OUTPUT),
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Compare two runs, and explain their first difference.

    Nothing is executed unless --bisect or --dense is given.

    Examples:
        # Compare two bundles.
        capsule diff a.capsule.tar b.capsule.tar

        # Execute both again to find the operator that first gives another result.
        capsule diff a.capsule.tar b.capsule.tar --bisect --key alice.pub
    """
    from capsule.bundle.keys import load_public
    from capsule.host.outputs import require_file
    from capsule.image.cache import Cache
    from capsule.report.divergence import show_divergence
    from capsule.report.progress import open_reporter
    from capsule.verification.diff import DiffRequest, diff

    inputs = (a, b, *(keys or ()))
    if report is not None:
        require_writable(report, inputs)
    if dense is not None:
        require_file(dense, inputs)
    request = DiffRequest(
        a=a,
        b=b,
        bisect=bisect,
        dense=dense,
        keys=[load_public(path) for path in keys or []],
        allow_untrusted=allow_untrusted,
        engine=engine,
    )
    with open_reporter(quiet=quiet) as reporter:
        found = diff(request, Cache(), reporter)
    document = found.model_dump(mode="json", by_alias=True)
    if report is not None:
        write_report(report, document)
    if as_json:
        print_json(document)
    else:
        from rich.console import Console

        show_divergence(found, Console())
    raise typer.Exit(found.exit_code)
