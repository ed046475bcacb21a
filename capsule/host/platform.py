"""The one platform on which Capsule executes runs; every other one can still check bundles."""

from __future__ import annotations

import platform
import sys

from capsule.host.errors import CapsuleError


def require_execution() -> None:
    """Stop what builds images or executes runs where that is impossible.

    Images hold programs for x86-64 Linux, and runs are supervised by Linux' own means.

    Raises:
        CapsuleError: CAP-E019, this machine runs another system or has another processor.
    """
    if (sys.platform, platform.machine()) == ("linux", "x86_64"):
        return
    raise CapsuleError(
        "CAP-E019",
        f"nothing was executed: this machine has {platform.system()} on {platform.machine()}, and "
        "Capsule builds images and executes runs on Linux on x86_64 only",
        fix="Use a Linux machine or virtual machine with an x86-64 processor. Here, "
        "'capsule verify --mode integrity' checks a bundle's contents and signatures.",
    )
