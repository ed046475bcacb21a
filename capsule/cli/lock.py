"""``capsule lock``: resolve every pin of a spec."""

from __future__ import annotations

from typing import Annotated

import typer

from capsule.cli.common import (
    DEFAULT_SPEC,
    JsonOption,
    QuietOption,
    SetOption,
    SpecArgument,
    guarded,
    locked,
    print_json,
)


@guarded
def command(
    spec: SpecArgument = DEFAULT_SPEC,
    *,
    overrides: SetOption = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Resolve again even if the pins still fit.")
    ] = False,
    refresh_base: Annotated[
        bool,
        typer.Option("--refresh-base", help="Take the base packages from this machine's apt."),
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Resolve a spec into SPEC.lock.json: every wheel and Debian package by its SHA-256."""
    from capsule.image.cache import Cache
    from capsule.image.resolution.resolve import cuda_libraries
    from capsule.report.progress import open_reporter

    with open_reporter(quiet=quiet) as reporter:
        lock, _ = locked(
            spec,
            overrides,
            Cache(),
            refresh=refresh,
            refresh_base=refresh_base,
            progress=reporter.note,
        )
    cuda = cuda_libraries(lock)
    if as_json:
        print_json({"schema": "capsule/locked/v1", "lock": lock.digest(), "cuda": cuda})
        return
    typer.echo(f"lock      sha256:{lock.digest()}")
    typer.echo(f"wheels    {len(lock.image.wheels)}")
    typer.echo(f"debian    {len(lock.image.debian)} packages")
    for name, version in cuda.items():
        typer.echo(f"{name:<9} {version}")
