"""``capsule lock``: resolve a spec to exact versions and digests."""

from __future__ import annotations

from typing import Annotated

import typer

from capsule.cli.common import guarded, locked, print_json
from capsule.cli.options import (
    DEFAULT_SPEC,
    JsonOption,
    QuietOption,
    SetOption,
    SpecArgument,
    option,
)
from capsule.host.cuda import cuda_versions
from capsule.host.wording import counted


@guarded
def command(
    spec: SpecArgument = DEFAULT_SPEC,
    *,
    overrides: SetOption = None,
    refresh: Annotated[
        bool,
        option("--refresh", "Resolve again even if the lock still satisfies the spec."),
    ] = False,
    refresh_base: Annotated[
        bool,
        option("--refresh-base", "Use the mirrors' current versions of the base packages."),
    ] = False,
    refresh_data: Annotated[
        bool,
        option("--refresh-data", "Pin data sets as they are now, even if they have changed."),
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Resolve a spec into a lock file, SPEC.lock.json.

    The lock names every wheel and every Debian package by its SHA-256 digest, and contains every
    setting of the experiment. Commit it beside the spec.

    Examples:
        # Lock ./capsule.yaml. A lock that still fits is kept.
        capsule lock

        # Resolve everything again, for newer versions.
        capsule lock capsule.yaml --refresh
    """
    from capsule.image.cache import Cache
    from capsule.image.data.listing import size_text
    from capsule.image.lockfile import lock_path
    from capsule.report.progress import open_reporter

    with open_reporter(quiet=quiet) as reporter:
        lock, _ = locked(
            spec,
            overrides,
            Cache(),
            refresh=refresh,
            refresh_base=refresh_base,
            refresh_data=refresh_data,
            progress=reporter.note,
        )
        if overrides:
            reporter.note(f"{lock_path(spec)} was not written: --set applies to this command alone")
    cuda = cuda_versions((wheel.name, wheel.version) for wheel in lock.image.wheels)
    if as_json:
        data = {name: pin.sha256 for name, pin in (lock.data or {}).items()}
        facts = {"lock": lock.digest(), "cuda": cuda, "data": data}
        print_json({"schema": "capsule/locked/v1", **facts})
        return
    typer.echo(f"lock      sha256:{lock.digest()}")
    typer.echo(f"wheels    {len(lock.image.wheels)}")
    typer.echo(f"debian    {counted(len(lock.image.debian), 'package')}")
    for name, pin in (lock.data or {}).items():
        typer.echo(f"data      {name}: {size_text(pin)}, sha256:{pin.sha256}")
    for name, version in cuda.items():
        typer.echo(f"{name:<9} {version}")
