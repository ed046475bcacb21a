"""Private keys with a passphrase: from a file, or typed at the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from capsule.bundle.keys import PrivateKey


def unlock(path: Path, passphrase_file: Path | None, *, ask: bool = True) -> PrivateKey:
    """Read a private key; ask for its passphrase if it has one and standard input is a terminal.

    Args:
        path: The key.
        passphrase_file: File whose first line is the passphrase.
        ask: Whether to ask; no, where other processes will read the key again.

    Raises:
        CapsuleError: As :func:`capsule.bundle.keys.load_private` and
            :func:`capsule.bundle.keys.read_passphrase` say.
    """
    from capsule.bundle.keys import ENCRYPTED, load_private, read_passphrase
    from capsule.host.errors import CapsuleError

    if passphrase_file is not None:
        return load_private(path, read_passphrase(passphrase_file))
    try:
        return load_private(path)
    except CapsuleError as error:
        if error.code == ENCRYPTED and not ask:
            fix = "Pass --passphrase-file FILE. This command does not ask for a passphrase."
            raise CapsuleError(error.code, error.message, fix=fix) from error
        # Of all reasons, a passphrase helps only against this one.
        if error.code != ENCRYPTED or not sys.stdin.isatty():
            raise
    # The prompt goes to standard error, since standard output may be a JSON document.
    return load_private(path, typer.prompt(f"Passphrase of {path}", hide_input=True, err=True))


def chosen_passphrase(passphrase_file: Path | None, *, ask: bool) -> str | None:
    """Return the passphrase for a new key; None if it is to have none.

    Raises:
        CapsuleError: As :func:`capsule.bundle.keys.read_passphrase` says.
    """
    from capsule.bundle.keys import read_passphrase

    if passphrase_file is not None:
        return read_passphrase(passphrase_file)
    if not ask:
        return None
    prompt = "Passphrase of the new key"
    return str(typer.prompt(prompt, hide_input=True, confirmation_prompt=True, err=True))
