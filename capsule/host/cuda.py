"""NVIDIA's libraries among Python packages, and what CUDA requires of a machine."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

# Distributions of NVIDIA that carry each library; a suffix '-cu12' or '-cu13' may follow.
_DISTRIBUTIONS = {
    "CUDA": "nvidia-cuda-runtime",
    "cuDNN": "nvidia-cudnn",
    "cuBLAS": "nvidia-cublas",
}


class CudaNeeds(NamedTuple):
    """The requirements of a major version of CUDA.

    Attributes:
        driver: Constraint on the driver's version (NVIDIA, "CUDA Compatibility", minor version
            compatibility, table 1).
        capability: Least compute capability for which its compilers make code (release notes of
            CUDA 11.0, 12.0 and 13.0, the architectures that were removed).
    """

    driver: str
    capability: tuple[int, int]


NEEDS = {
    11: CudaNeeds(">=450", (3, 5)),
    12: CudaNeeds(">=525", (5, 0)),
    13: CudaNeeds(">=580", (7, 5)),
}


def cuda_versions(wheels: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the versions of CUDA (its runtime), cuDNN and cuBLAS that some wheels bring.

    Args:
        wheels: Name and version of each.
    """
    versions = dict(wheels)
    return {
        library: version
        for library, distribution in _DISTRIBUTIONS.items()
        for name, version in versions.items()
        if re.fullmatch(rf"{distribution}(-cu[0-9]+)?", name)
    }
