"""Trust: whose signatures count. For now, exactly the public keys the reader names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from capsule.bundle.archive import tampered
from capsule.bundle.keys import PublicKey, load_public
from capsule.experiment.errors import CapsuleError


def load_trusted(paths: Iterable[Path]) -> tuple[PublicKey, ...]:
    """Read the keys to trust, each once, in the order given.

    Raises:
        CapsuleError: A file is not an acceptable public key (see :func:`keys.load_public`).
    """
    return tuple(dict.fromkeys(load_public(path) for path in paths))


def untrusted(fingerprint: str) -> CapsuleError:
    """Return the error for an intact bundle that no trusted key signed (exit status 3)."""
    return tampered(
        "CAP-B125",
        f"the bundle is intact but untrusted: it says that {fingerprint} signed it, and none of "
        "the keys you gave did",
        fix="Get the signer's public key from the signer (not from where the bundle came from), "
        f"check that `ssh-keygen -lf KEY.pub` prints {fingerprint}, and pass `--key KEY.pub`.",
    )
