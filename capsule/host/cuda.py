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
    "11": CudaNeeds(">=450", (3, 5)),
    "12": CudaNeeds(">=525", (5, 0)),
    "13": CudaNeeds(">=580", (7, 5)),
}


_VOLTA = ("sm_70",)
_TURING_TO_HOPPER = ("sm_75", "sm_80", "sm_86", "sm_90")
_BLACKWELL = ("sm_100", "sm_120")
_BEFORE_VOLTA = ("sm_50", "sm_60")
_CU126 = (*_BEFORE_VOLTA, *_VOLTA, *_TURING_TO_HOPPER)
_FROM_TURING = (*_TURING_TO_HOPPER, *_BLACKWELL)
_WITH_PTX = (*_FROM_TURING, "compute_120")
# What PyTorch's wheels for Linux on x86-64 have code for, by the version of torch and of CUDA. From
# the "PyTorch CUDA Support Matrix" of its RELEASE.md (pytorch#164471, #175253, #182849, #197555),
# but for PTX in the wheels for CUDA 13.0 since 2.11, those on PyPI: the matrix has it, and torch
# 2.13.0 from there names none (tests/end_to_end/test_cuda_image.py).
_BUILDS: dict[str, dict[str, tuple[str, ...]]] = {
    "2.9": {"12.6": _CU126, "12.8": (*_VOLTA, *_FROM_TURING), "13.0": _WITH_PTX},
    "2.10": {"12.6": _CU126, "12.8": (*_VOLTA, *_FROM_TURING), "13.0": _WITH_PTX},
    "2.11": {"12.6": _CU126, "12.8": _FROM_TURING, "13.0": _FROM_TURING},
    "2.12": {"12.6": _CU126, "13.0": _FROM_TURING, "13.2": _WITH_PTX},
    "2.13": {"12.6": _CU126, "13.0": _FROM_TURING, "13.2": _WITH_PTX},
    "2.14": {"12.6": _CU126, "13.0": _FROM_TURING, "13.2": _WITH_PTX},
}


def wheel_architectures(wheels: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return the architectures that the torch among some wheels has code for.

    Args:
        wheels: Name and version of each; the runtime of CUDA is one of them.

    Returns:
        Names such as ``sm_90``; empty if there is no torch, or nothing is known of it.
    """
    versions = dict(wheels)
    torch, cuda = (
        ".".join(version.split(".")[:2])
        for version in (versions.get("torch", ""), cuda_versions(versions.items()).get("CUDA", ""))
    )
    return _BUILDS.get(torch, {}).get(cuda, ())


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
