"""What commands use where the user names no key: an own key that signs, and whom the user trusts.

The *configuration folder* is ``$CAPSULE_CONFIG``, else ``$XDG_CONFIG_HOME/capsule``, else
``~/.config/capsule``. Its file ``key`` signs, or the file that ``$CAPSULE_KEY`` names. Trusted are
the public half of that key and the lines of ``allowed_signers`` in the folder, or of the file that
``$CAPSULE_ALLOWED_SIGNERS`` names. Keys and trust files that a command line names replace all this.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from capsule.cli.passphrase import unlock
from capsule.host.folders import user_folder
from capsule.host.outputs import write_output

if TYPE_CHECKING:
    from capsule.bundle.keys import PrivateKey

KEY = "CAPSULE_KEY"
ALLOWED_SIGNERS = "CAPSULE_ALLOWED_SIGNERS"


def configuration_folder() -> Path:
    """Return the folder of the user's key and trust file, which need not exist."""
    return user_folder("CAPSULE_CONFIG", "XDG_CONFIG_HOME", ".config")


def own_key() -> Path:
    """Return the private key that signs if none is named; it need not exist."""
    return Path(os.environ.get(KEY) or configuration_folder() / "key")


def public_half(key: Path) -> Path:
    """Return the file of a key's public half."""
    return key.with_name(f"{key.name}.pub")


def signing_key(
    named: Path | None, passphrase_file: Path | None, *, ask: bool = True
) -> tuple[Path, PrivateKey]:
    """Return the key that signs: the one named, or the user's key, which is made at first use.

    Args:
        named: The private key that the command line names.
        passphrase_file: As for :func:`capsule.cli.passphrase.unlock`, as is ``ask``.
        ask: Whether to ask for a passphrase.

    Raises:
        CapsuleError: CAP-B135, the own key cannot be made; or what ``unlock`` raises.
    """
    if named is not None:
        return named, unlock(named, passphrase_file, ask=ask)
    path = own_key()
    # A key that the variable names is never made, so that a wrong name is an error.
    if not os.environ.get(KEY) and not path.exists():
        _make(path)
    key = unlock(path, passphrase_file, ask=ask)
    # As after a kill between the writing of the two files. The key signs without its public half,
    # which cannot be written into a read-only folder, and is not written beside another key.
    if not os.environ.get(KEY) and not public_half(path).exists():
        with suppress(OSError):
            write_output(public_half(path), key.public.openssh().encode())
    return path, key


def checked_key(
    named: Path | None, passphrase_file: Path | None, *, ask: bool = True
) -> Callable[[], tuple[Path, PrivateKey]]:
    """Check the key that :func:`signing_key` returns, and return a function that returns it.

    Only that function makes the default key, so that a command that fails before it needs the
    key leaves none behind.

    Raises:
        CapsuleError: What ``signing_key`` raises, now if there is a key and else when it is made.
    """
    if named is None and not os.environ.get(KEY) and not own_key().exists():
        return partial(signing_key, None, passphrase_file, ask=ask)
    found = signing_key(named, passphrase_file, ask=ask)
    return lambda: found


def _make(path: Path) -> None:
    """Make the user's key, unless another process did so since."""
    from capsule.bundle.keys import generate
    from capsule.host.errors import CapsuleError, coded

    fix = (
        f"Name a key with --key or {KEY}, or set CAPSULE_CONFIG to a folder that you may write to."
    )
    with coded("CAP-B135", f"cannot make a signing key in {path.parent}", fix=fix):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        made = generate(path)
    except CapsuleError:
        # Of first commands at the same time, which may be on several machines, one makes the key.
        if path.exists():
            return
        raise
    typer.echo(f"made a signing key: {path} ({made.fingerprint})", err=True)
    typer.echo(f"  Give its public half, {public_half(path)}, to verifiers.", err=True)


class Trusted(NamedTuple):
    """Files of trusted keys."""

    keys: Sequence[Path]
    allowed_signers: Sequence[Path]


def trusted_files(
    keys: Sequence[Path] | None, allowed_signers: Sequence[Path] | None, *, others: bool = False
) -> Trusted:
    """Return the trusted keys that a command line names, or else the user's.

    Args:
        keys: Public keys that it names.
        allowed_signers: Trust files that it names.
        others: Whether it names trusted signers in another way, such as by ``--keyless``.
    """
    if keys or allowed_signers or others:
        return Trusted(keys or (), allowed_signers or ())
    public, named = public_half(own_key()), os.environ.get(ALLOWED_SIGNERS)
    file = Path(named or configuration_folder() / "allowed_signers")
    found = Trusted(
        [public] if public.exists() else [],
        [file] if named or file.exists() else [],  # that the named one is missing is an error
    )
    for path in (*found.keys, *found.allowed_signers):
        typer.echo(f"trusting by default: {path}", err=True)
    return found
