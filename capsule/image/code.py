"""Capsule's own training code: the files of the package that run inside an image, and no others.

Their digest is part of every lock, so a file that never runs there must not be among them. A test
checks that the folders listed below are what the programs that are started in an image import.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from capsule.experiment.canonical import canonical_json, sha256_hex
from capsule.host.platform import require_execution
from capsule.native import Part, native_part

_PACKAGE = Path(__file__).resolve().parents[1]
_ROOMS = ("experiment", "training")
_PROGRAMS = "capsule/native/lib/"
_HOST_PARTS = {"capsule-enclose"}  # native parts that run outside of images


def training_code(package: Path = _PACKAGE) -> dict[str, bytes]:
    """Return the files of the package that run inside an image: path to content, sorted.

    Paths are relative to the folder that holds the package, e.g.
    ``capsule/training/dqn/learner.py``. Compiled and hidden files are left out. A ``.pth`` file
    lies beside the package instead, where interpreters look for it.

    Raises:
        CapsuleError: CAP-E019, this platform has no native parts; CAP-N001, one is missing.
    """
    require_execution()
    files = [package / "__init__.py", package / "native" / "__init__.py"]
    for room in _ROOMS:
        files += (package / room).rglob("*")
    names = {
        path.name if path.suffix == ".pth" else path.relative_to(package.parent).as_posix(): path
        for path in files
        if path.is_file()
    }
    for part in get_args(Part):
        if part not in _HOST_PARTS:
            names[f"{_PROGRAMS}{part}"] = native_part(part)
    return {name: names[name].read_bytes() for name in sorted(names) if not _left_out(name)}


def is_program(name: str) -> bool:
    """Tell whether a file of the training code is to be executable."""
    return name.startswith(_PROGRAMS) and not name.endswith(".so")


def training_code_digest(files: Mapping[str, bytes] | None = None) -> str:
    """Return the SHA-256 of the canonical ``{path: sha256}`` listing of the training code.

    Args:
        files: Path to content; the code of this installation by default.
    """
    listed = training_code() if files is None else files
    return sha256_hex(canonical_json({name: sha256_hex(data) for name, data in listed.items()}))


def _left_out(name: str) -> bool:
    # Interpreters of the host leave __pycache__ beside the sources. The digest of the code must not
    # depend on which modules they have imported.
    return any(part == "__pycache__" or part.startswith(".") for part in name.split("/"))
