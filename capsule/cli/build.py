"""``capsule build``: lock a spec, assemble its image and load it into an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capsule.cli.common import guarded, locked, print_json, shell_word
from capsule.cli.options import (
    DEFAULT_SPEC,
    OUTPUT,
    EngineOption,
    JsonOption,
    QuietOption,
    SetOption,
    SpecArgument,
    option,
)


@guarded
def command(
    spec: SpecArgument = DEFAULT_SPEC,
    *,
    overrides: SetOption = None,
    engine: EngineOption = "auto",
    archive: Annotated[
        Path | None,
        option("--archive FILE", "Also write the image to a file for 'docker load'.", OUTPUT),
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Build the image of a spec for a container engine.

    The spec is locked first if it has no current lock.

    Examples:
        # Build the image of ./capsule.yaml.
        capsule build

        # Also write the image to a file, for a machine without network access.
        capsule build specs/dqn-cartpole.yaml --archive image.tar
    """
    from capsule import execution
    from capsule.engine.select import open_engine
    from capsule.host.errors import CapsuleError
    from capsule.host.outputs import require_file
    from capsule.image.assembly.assemble import save_archive
    from capsule.image.cache import Cache
    from capsule.report.progress import open_reporter

    if archive is not None:
        require_file(archive, (spec,))
    cache = Cache()
    with open_reporter(quiet=quiet) as reporter:
        lock, sources = locked(spec, overrides, cache, progress=reporter.note)
        chosen = open_engine(engine, progress=reporter.note)
        if archive is not None and chosen.name == "process":
            raise CapsuleError(
                "CAP-E049",
                "--archive: the plain-process engine makes no image",
                fix="Add --engine bwrap, which needs bubblewrap but no daemon, or use a container "
                "engine.",
            )
        image = execution.prepare(
            lock, chosen, cache, sources=sources, to_run=False, reporter=reporter
        )
        if archive is not None and image is not None:
            save_archive(image, archive)
    if as_json:
        identity = (
            {
                "config": image.config_digest,
                "manifest": image.manifest_digest,
                "reference": image.reference,
            }
            if image
            else None
        )
        print_json(
            {
                "schema": "capsule/built/v1",
                "lock": lock.digest(),
                "engine": chosen.name,
                "image": identity,
            }
        )
        return
    typer.echo(f"lock      sha256:{lock.digest()}")
    typer.echo(f"image     {image.config_digest if image else 'none (plain process)'}")
    if image is not None:
        typer.echo(f"name      {image.reference}")
    typer.echo(f"next: capsule run {shell_word(spec)}", err=True)
