"""``capsule keygen``: a signing key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capsule.cli.common import JsonOption, guarded, print_json


@guarded
def command(
    path: Annotated[Path, typer.Argument(help="Private key to write; NAME.pub goes beside it.")],
    *,
    as_json: JsonOption = False,
) -> None:
    """Make an Ed25519 key pair for signing bundles."""
    from capsule.bundle.keys import generate

    public = generate(path)
    if as_json:
        print_json(
            {
                "schema": "capsule/key/v1",
                "fingerprint": public.fingerprint,
                "private": str(path),
                "public": f"{path}.pub",
            }
        )
        return
    typer.echo(f"private key  {path}  (keep it secret)")
    typer.echo(f"public key   {path}.pub  (give it to those who verify)")
    typer.echo(f"fingerprint  {public.fingerprint}")
