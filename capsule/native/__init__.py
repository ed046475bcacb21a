"""The native parts: built by ``hatch_build.py``, shipped in the wheel and in every image."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from capsule.experiment.errors import CapsuleError

FOLDER = Path(__file__).resolve().parent / "lib"
Part = Literal[
    "libcapsule-kernels.so",  # fused loops of the trainers
    "libcapsule-math.so",  # preloaded: what of the maths libraries cannot be pinned
    "libcapsule-entropy.so",  # preloaded: record, replay or derive operating-system entropy
    "capsule-launch",  # starts a program under all of that
    "capsule-enclose",  # starts a program in namespaces of its own, without a container engine
]


def native_part(name: Part) -> Path:
    """Return the path of a native part.

    Raises:
        CapsuleError: CAP-N001, it is not there.
    """
    path = FOLDER / name
    if not path.is_file():
        raise CapsuleError(
            "CAP-N001",
            f"the native part {name} is missing from {FOLDER}",
            fix="Install Capsule from its wheel, or run 'bash scripts/setup.sh' in a checkout.",
        )
    return path
