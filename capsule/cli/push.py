"""``capsule push``: upload an image to a registry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capsule.cli.common import guarded, locked, print_json
from capsule.cli.options import (
    JsonOption,
    KeysOption,
    QuietOption,
    SetOption,
)


@guarded
def command(
    source: Annotated[
        Path, typer.Argument(metavar="SPEC", help="Spec, lock file (*.lock.json) or bundle.")
    ],
    name: Annotated[
        str,
        typer.Argument(metavar="REFERENCE", help="Name for the image: REGISTRY/NAME[:TAG]."),
    ],
    *,
    overrides: SetOption = None,
    keys: KeysOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Upload the image of a spec or a bundle to an OCI registry.

    The image is built if needed; no container engine is used. 'docker login' or 'podman login'
    gives access. Without a tag, the image gets the first digits of its identity.

    Examples:
        # Upload the image of a spec.
        capsule push capsule.yaml ghcr.io/alice/dqn-cartpole

        # Upload the image that a bundle claims.
        capsule push run.capsule.tar ghcr.io/alice/dqn-cartpole:paper
    """
    from contextlib import ExitStack

    from capsule import execution
    from capsule.bundle.trust import load_policy
    from capsule.export.images import image_of_bundle
    from capsule.image.cache import Cache
    from capsule.image.lockfile import pinned_already
    from capsule.image.registry.images import push_image
    from capsule.image.registry.reference import Reference
    from capsule.report.progress import open_reporter

    reference, cache = Reference.parse(name), Cache()
    with open_reporter(quiet=quiet) as reporter, ExitStack() as stack:
        if source.suffix in (".yaml", ".yml", ".json"):
            lock, sources = locked(source, overrides, cache, progress=reporter.note)
            image = execution.build_image(lock, cache, sources=sources, reporter=reporter)
        elif overrides:
            raise pinned_already(source, "bundle")
        else:
            policy = load_policy(keys=keys or ())
            # The files of this image are temporary, and are kept until it has been uploaded.
            image = stack.enter_context(image_of_bundle(source, policy, cache, reporter))
        pushed = push_image(image, reference, reporter.note)
    if as_json:
        print_json(
            {
                "schema": "capsule/pushed/v1",
                "image": image.config_digest,
                "manifest": image.manifest_digest,
                "reference": str(pushed),
            }
        )
        return
    typer.echo(f"image     {image.config_digest}")
    typer.echo(f"pushed    {pushed}")
