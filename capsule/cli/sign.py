"""``capsule sign``: write an additional signature of a bundle to a file beside it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from capsule.cli.common import guarded, print_json, shell_word
from capsule.cli.defaults import checked_key, own_key
from capsule.cli.options import OUTPUT, JsonOption, PassphraseOption, option


@guarded
def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle to sign. It is never changed.")],
    *,
    key: Annotated[
        Path | None,
        option(
            "--key KEY",
            "Private key, made by 'capsule keygen' or OpenSSH. By default it is your own.",
        ),
    ] = None,
    ssh_key: Annotated[
        Path | None,
        option(
            "--ssh-key KEY",
            "Key with which ssh-keygen signs: a private key, or the public half of a key in an "
            "SSH agent.",
        ),
    ] = None,
    passphrase_file: PassphraseOption = None,
    output: Annotated[
        Path | None,
        option(
            "--output -o FILE",
            "File for the signature. By default it is BUNDLE.KEY.sshsig.",
            OUTPUT,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Add your signature to a bundle, in a file beside it.

    The bundle of a run or a study is checked first, but nothing is executed. The signature is an
    SSH signature of the bundle's manifest. Pass it to 'capsule verify --signature' or 'capsule
    study verify --signature'.

    Examples:
        # Write run.capsule.tar.bob.sshsig.
        capsule sign run.capsule.tar --key bob

        # Sign with a key in an SSH agent.
        capsule sign run.capsule.tar --ssh-key bob.pub
    """
    from capsule.bundle import sshsig
    from capsule.bundle.cosign import SUFFIX, cosign
    from capsule.host.errors import CapsuleError

    if key and ssh_key:
        raise CapsuleError(
            "CAP-B156",
            "--key contradicts --ssh-key: each run of 'capsule sign' writes one signature",
            fix="Use either --key or --ssh-key.",
        )
    if ssh_key is None:
        signing_key, chosen = checked_key(key, passphrase_file), key or own_key()

        # cosign() calls this when it has checked the bundle, so a command that fails before that
        # leaves no new key behind.
        def sign(manifest: bytes) -> bytes:
            return sshsig.sign(manifest, key=signing_key()[1])

    else:
        chosen, sign = ssh_key, partial(sshsig.sign_by_ssh_keygen, key=ssh_key)
    # An agent's key is named by its public half: BOB.pub gives BUNDLE.BOB.sshsig.
    path = output or bundle.with_name(f"{bundle.name}.{chosen.stem}{SUFFIX}")
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
    given = f"--key … --signature {shell_word(path)}"
    command = "study verify" if signed.kind == "study" else "verify"
    typer.echo(f"next: capsule {command} {shell_word(bundle)} {given}", err=True)
