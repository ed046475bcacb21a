"""The identity of an installed Capsule, which a version alone does not give.

Two commits between releases have one version, and may word the documents that are made for people
differently.
"""

from __future__ import annotations

import functools
from pathlib import Path

from capsule.experiment.canonical import canonical_json, sha256_hex

_PACKAGE = Path(__file__).resolve().parents[1]


@functools.cache
def package_digest() -> str:
    """Return the SHA-256 of the canonical ``{path: sha256}`` listing of the package's modules."""
    modules = {path.relative_to(_PACKAGE).as_posix(): path for path in _PACKAGE.rglob("*.py")}
    listed = {name: sha256_hex(path.read_bytes()) for name, path in modules.items()}
    return sha256_hex(canonical_json(listed))
