"""``capsule build``: lock a spec, assemble its image and load it into an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from capsule.engine.interface import Engine
    from capsule.engine.select import EngineChoice
    from capsule.image.assembly.assemble import Image

_WITHOUT_DAEMON = ("bwrap", "apptainer")  # an image for these is only unpacked


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
    """Build the image of a spec for an engine.

    The spec is locked first if it has no current lock. With '--engine bwrap' and '--engine
    apptainer', the engine need not be installed: a login node can build for compute nodes.

    Examples:
        # Build the image of ./capsule.yaml.
        capsule build

        # Also write the image to a file, for a machine without network access.
        capsule build specs/dqn-cartpole.yaml --archive image.tar
    """
    from capsule import execution
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
        chosen = _open(engine, reporter.note)
        name = engine if chosen is None else chosen.name
        if archive is not None and name == "process":
            raise CapsuleError(
                "CAP-E049",
                "--archive: the plain-process engine makes no image",
                fix="Add --engine bwrap, with which an image is built without an engine.",
            )
        image: Image | None
        if chosen is None:
            image = execution.unpack_image(lock, cache, sources=sources, reporter=reporter)
        else:
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
                "engine": name,
                "image": identity,
            }
        )
        return
    typer.echo(f"lock      sha256:{lock.digest()}")
    typer.echo(f"image     {image.config_digest if image else 'none (plain process)'}")
    if image is not None:
        typer.echo(f"name      {image.reference}")
    chosen_again = "" if engine == "auto" else f" --engine {engine}"
    where = ", on a machine that has this engine" if chosen is None else ""
    typer.echo(f"next: capsule run {shell_word(spec)}{chosen_again}{where}", err=True)


def _open(choice: EngineChoice, note: Callable[[str], None]) -> Engine | None:
    """Open the engine; None if this machine lacks it and can build for machines that have it."""
    from capsule.engine.select import open_engine
    from capsule.host.errors import CapsuleError

    try:
        return open_engine(choice, progress=note)
    except CapsuleError as error:
        if error.code != "CAP-E001" or choice not in _WITHOUT_DAEMON:
            raise
        note(f"warning: {error.message}. The image is built for machines that have this engine")
        return None
