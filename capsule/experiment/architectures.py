"""The GPUs on which the code in a build of CUDA kernels runs.

The rules are those of the CUDA C++ Programming Guide, section "Compute Capabilities", and of
``nvcc``'s documentation, "GPU Feature List": binary code runs on GPUs of its major version and not
a lower minor one; PTX is compiled for any GPU that is not below it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_NAME = re.compile(r"(sm|compute)_([0-9]+)([0-9])([af]?)")


def runs_on(architectures: Iterable[str], capability: str) -> bool:
    """Return whether code for some architectures runs on a GPU.

    Args:
        architectures: As ``torch.cuda.get_arch_list`` names them: ``sm_90`` is binary code and
            ``compute_90`` PTX. Those with the suffix ``a`` run on this very architecture only.
        capability: The GPU's compute capability, such as ``9.0``.
    """
    gpu = tuple(map(int, capability.split(".")))
    return any(_runs_on(match, gpu) for name in architectures if (match := _NAME.fullmatch(name)))


def _runs_on(name: re.Match[str], gpu: tuple[int, ...]) -> bool:
    kind, suffix, built = name[1], name[4], (int(name[2]), int(name[3]))
    if suffix == "a":
        return built == gpu
    same_family = built[0] == gpu[0]
    # With the suffix f (one family), PTX is not compiled for later families either.
    return built <= gpu and (same_family or (kind == "compute" and not suffix))
