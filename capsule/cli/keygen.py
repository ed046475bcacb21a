"""``capsule keygen``: make a signing key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from capsule.cli.common import guarded, print_json
from capsule.cli.defaults import own_key, public_half
from capsule.cli.options import JsonOption, PassphraseFileOption, option
from capsule.cli.passphrase import chosen_passphrase


@guarded
def command(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="Private key to write. The public key goes to FILE.pub. By default, it is your "
            "own key, with which commands sign if no other is named.",
        ),
    ] = None,
    *,
    kind: Annotated[
        Literal["ed25519", "ecdsa-p256"],
        option("--type TYPE", "Signature algorithm: ed25519 or ecdsa-p256."),
    ] = "ed25519",
    ask: Annotated[
        bool,
        option("--passphrase", "Ask for a passphrase, and encrypt the private key with it."),
    ] = False,
    passphrase_file: PassphraseFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key pair for signing bundles and receipts.

    Examples:
        # Write the private key to ./alice and the public key to ./alice.pub.
        capsule keygen alice

        # Make your own key, protected with a passphrase.
        capsule keygen --passphrase
    """
    from capsule.bundle.keys import generate

    passphrase = chosen_passphrase(passphrase_file, ask=ask)
    file = path or own_key()
    public = generate(file, passphrase, algorithm=kind)
    if as_json:
        print_json(
            {
                "schema": "capsule/key/v1",
                "type": kind,
                "fingerprint": public.fingerprint,
                "private": str(file),
                "public": str(public_half(file)),
            }
        )
        return
    typer.echo(f"private key  {file}  (keep it secret)")
    typer.echo(f"public key   {public_half(file)}  (give it to verifiers)")
    typer.echo(f"fingerprint  {public.fingerprint}")
