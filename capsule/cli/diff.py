"""``capsule diff``: where two runs part, by how much, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from capsule.cli.common import (
    EngineOption,
    JsonOption,
    KeysOption,
    QuietOption,
    guarded,
    print_json,
)

SideArgument = Annotated[
    Path, typer.Argument(help="Bundle, run directory, or (with --bisect) a dense record.")
]


@guarded
def command(
    a: SideArgument,
    b: SideArgument,
    *,
    bisect: Annotated[
        bool,
        typer.Option("--bisect", help="Execute both up to their first difference, and pin it."),
    ] = False,
    dense: Annotated[
        Path | None,
        typer.Option(
            "--dense", help="Execute A only, and write its dense record here, for another machine."
        ),
    ] = None,
    keys: KeysOption = None,
    allow_untrusted: Annotated[
        bool, typer.Option("--allow-untrusted", help="Execute bundles of unknown signers.")
    ] = False,
    engine: EngineOption = "auto",
    report: Annotated[
        Path | None, typer.Option("--report", help="Write the analysis here, as JSON.")
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Say where two runs part, by how much, and what the cause is likely to be."""
    from capsule.bundle.keys import load_public
    from capsule.experiment.canonical import write_atomic
    from capsule.image.cache import Cache
    from capsule.report.divergence import show_divergence
    from capsule.report.progress import open_reporter
    from capsule.verification.diff import Request, diff

    request = Request(
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
        write_atomic(report, json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n")
    if as_json:
        print_json(document)
    else:
        from rich.console import Console

        show_divergence(found, Console())
    raise typer.Exit(found.exit_code)
