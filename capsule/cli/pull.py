"""``capsule pull``: download an image from a registry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capsule.cli.common import guarded, print_json
from capsule.cli.options import OUTPUT, JsonOption, QuietOption, option


@guarded
def command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="REFERENCE", help="The image: REGISTRY/NAME:TAG or REGISTRY/NAME@DIGEST."
        ),
    ],
    *,
    output: Annotated[
        Path, option("--output -o FILE", "File to write, for 'docker load'.", OUTPUT)
    ],
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Download an image from an OCI registry into a file.

    Every digest is checked. The file is the one that 'capsule build --archive' writes, with another
    name for the image. 'capsule verify --pull' takes an image from a registry without this file.

    Examples:
        # Download an image and load it into Docker with 'docker load -i image.tar'.
        capsule pull ghcr.io/alice/dqn-cartpole:paper -o image.tar
    """
    from capsule.host.outputs import require_file
    from capsule.host.owner import temporary_folder
    from capsule.image.assembly.assemble import save_archive
    from capsule.image.registry.images import pull_image
    from capsule.image.registry.reference import Reference
    from capsule.report.progress import open_reporter

    reference = Reference.parse(name)
    require_file(output)  # before the download
    with open_reporter(quiet=quiet) as reporter, temporary_folder("capsule-pull-") as folder:
        image = pull_image(reference, folder, reporter.note)
        save_archive(image, output)
    if as_json:
        print_json(
            {
                "schema": "capsule/pulled/v1",
                "image": image.config_digest,
                "manifest": image.manifest_digest,
                "file": str(output),
            }
        )
        return
    typer.echo(f"image     {image.config_digest}")
    typer.echo(f"archive   {output}")
