"""Capsule's own training code, as it goes into an image."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from capsule.experiment.canonical import canonical_json, sha256_hex
from capsule.native import Part, native_part

_PACKAGE = Path(__file__).resolve().parents[1]
_ROOMS = ("experiment", "native", "entropy", "training")


def training_code(package: Path = _PACKAGE) -> dict[str, bytes]:
    """Return the files of the package that run inside an image: path to content, sorted.

    Paths are relative to the folder that holds the package, e.g. ``capsule/training/dqn.py``.
    Python's compiled files and hidden ones stay out. The native parts come with their sources. A
    ``.pth`` file stands beside the package instead, where interpreters look for it.

    Raises:
        CapsuleError: CAP-N001, a native part is missing.
    """
    for part in get_args(Part):
        native_part(part)
    files = [package / "__init__.py", package / "py.typed"]
    for room in _ROOMS:
        files += (package / room).rglob("*")
    names = {
        path.name if path.suffix == ".pth" else path.relative_to(package.parent).as_posix(): path
        for path in files
        if path.is_file()
    }
    return {name: names[name].read_bytes() for name in sorted(names) if not _left_out(name)}


def is_program(name: str) -> bool:
    """Tell whether a file of the training code is to be executable."""
    return name.startswith("capsule/native/lib/") and not name.endswith(".so")


def training_code_digest(files: Mapping[str, bytes] | None = None) -> str:
    """Return the SHA-256 of the canonical ``{path: sha256}`` listing of the training code.

    Args:
        files: Path to content; the code of this installation by default.
    """
    listed = training_code() if files is None else files
    return sha256_hex(canonical_json({name: sha256_hex(data) for name, data in listed.items()}))


def _left_out(name: str) -> bool:
    return any(part == "__pycache__" or part.startswith(".") for part in name.split("/"))
