"""The identity of an installed Capsule, which a version alone does not give.

Two commits between releases have the same version, and may write other texts into the documents
that are made for people.
"""

from __future__ import annotations

import functools
from pathlib import Path

from capsule.experiment.canonical import canonical_json, sha256_hex

_PACKAGE = Path(__file__).resolve().parents[1]
_MEMBERS = ("image/seccomp.json",)  # of bundles: files that no module writes


@functools.cache
def package_digest() -> str:
    """Return the SHA-256 of the canonical ``{path: sha256}`` listing of what decides about bundles.

    These are the modules of the package, and its files that bundles contain unchanged.
    """
    paths = (*_PACKAGE.rglob("*.py"), *map(_PACKAGE.joinpath, _MEMBERS))
    listed = {
        path.relative_to(_PACKAGE).as_posix(): sha256_hex(path.read_bytes()) for path in paths
    }
    return sha256_hex(canonical_json(listed))
