"""``capsule sign``: add a signature of one's own to somebody's bundle, beside it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from capsule.cli.common import JsonOption, guarded, print_json
from capsule.cli.passphrase import PassphraseOption, unlock


@guarded
def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle to sign; it is never changed.")],
    *,
    key: Annotated[
        Path | None, typer.Option("--key", help="Private key (capsule keygen, or OpenSSH's).")
    ] = None,
    ssh_key: Annotated[
        Path | None,
        typer.Option("--ssh-key", help="Key with which ssh-keygen signs: a file, or an agent's."),
    ] = None,
    passphrase_file: PassphraseOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Signature to write; by default BUNDLE.KEY.sshsig."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Sign a bundle that is intact: an SSH signature over its manifest, for verify --signature."""
    from capsule.bundle import sshsig
    from capsule.bundle.cosign import cosign
    from capsule.experiment.errors import CapsuleError, ExitCode

    chosen = key or ssh_key
    if chosen is None or (key and ssh_key):
        raise CapsuleError(
            "CAP-B156",
            "exactly one key signs",
            fix="Give --key or --ssh-key.",
            exit_code=ExitCode.USAGE,
        )
    path = output or bundle.with_name(f"{bundle.name}.{chosen.stem}.sshsig")
    if ssh_key is None:
        sign = partial(sshsig.sign, key=unlock(chosen, passphrase_file))
    else:
        sign = partial(sshsig.sign_by_ssh_keygen, key=ssh_key)
    signed = cosign(bundle, sign, path)
    if as_json:
        print_json(
            {
                "schema": "capsule/signed/v1",
                "signature": str(path),
                "fingerprint": signed.fingerprint,
                "claim_id": signed.claim_id,
            }
        )
        return
    typer.echo(f"claim id     {signed.claim_id}")
    typer.echo(f"signature    {path}")
    typer.echo(f"fingerprint  {signed.fingerprint}")
    typer.echo(f"next: capsule verify {bundle} --key … --signature {path}", err=True)
