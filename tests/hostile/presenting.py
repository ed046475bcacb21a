"""How cases hand over their bundles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.hostile.case import Case, Presented
from tests.hostile.genuine import SIGNER, Change, Run, packed, training


def presented(folder: Path, write: Callable[[Path], object], *options: object) -> Presented:
    """Write a bundle and the signer's public key into a folder, with options that name the key."""
    key, bundle = folder / "signer.pub", folder / "bundle.capsule.tar"
    key.write_text(SIGNER.public.openssh())
    write(bundle)
    return Presented(bundle, ("--key", str(key), *map(str, options)))


def changed(
    number: int, name: str, code: str, change: Change, run: Callable[[], Run] = training
) -> Case:
    """Return a case of a bundle with changed files, signed as they are now."""

    def present(folder: Path, hostile: bool) -> Presented:
        return presented(folder, lambda path: packed(run(), path, change if hostile else None))

    return Case(number, name, code, present)


def rewritten(number: int, name: str, code: str, edit: Callable[[bytes], bytes]) -> Case:
    """Return a case of a bundle whose bytes were changed after it was signed."""

    def present(folder: Path, hostile: bool) -> Presented:
        shown = presented(folder, lambda path: packed(training(), path))
        if hostile:
            shown.bundle.write_bytes(edit(shown.bundle.read_bytes()))
        return shown

    return Case(number, name, code, present)
