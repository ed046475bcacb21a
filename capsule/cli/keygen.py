"""``capsule keygen``: a signing key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from capsule.cli.common import JsonOption, guarded, print_json


@guarded
def command(
    path: Annotated[Path, typer.Argument(help="Private key to write; NAME.pub goes beside it.")],
    *,
    kind: Annotated[
        Literal["ed25519", "ecdsa-p256"], typer.Option("--type", help="Signature algorithm.")
    ] = "ed25519",
    as_json: JsonOption = False,
) -> None:
    """Make a key pair for signing bundles."""
    from capsule.bundle.keys import generate

    public = generate(path, algorithm=kind)
    if as_json:
        print_json(
            {
                "schema": "capsule/key/v1",
                "type": kind,
                "fingerprint": public.fingerprint,
                "private": str(path),
                "public": f"{path}.pub",
            }
        )
        return
    typer.echo(f"private key  {path}  (keep it secret)")
    typer.echo(f"public key   {path}.pub  (give it to those who verify)")
    typer.echo(f"fingerprint  {public.fingerprint}")
