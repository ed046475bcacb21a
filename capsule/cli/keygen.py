"""``capsule keygen``: a signing key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from capsule.cli.common import JsonOption, guarded, print_json
from capsule.cli.passphrase import PassphraseOption, chosen_passphrase


@guarded
def command(
    path: Annotated[
        Path, typer.Argument(help="Private key to write; the public key is written to NAME.pub.")
    ],
    *,
    kind: Annotated[
        Literal["ed25519", "ecdsa-p256"], typer.Option("--type", help="Signature algorithm.")
    ] = "ed25519",
    ask: Annotated[
        bool, typer.Option("--passphrase", help="Ask for a passphrase that encrypts the key.")
    ] = False,
    passphrase_file: PassphraseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key pair for signing bundles."""
    from capsule.bundle.keys import generate

    passphrase = chosen_passphrase(passphrase_file, ask=ask)
    public = generate(path, passphrase, algorithm=kind)
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
