"""What the contenders on a GPU have in their specs (gpu.md)."""

from __future__ import annotations

from typing import Any

DETERMINISTIC, GRAPHS, OFF = "GPU", "GPU, graphs", "GPU, determinism off"
GPU_KINDS = (DETERMINISTIC, GRAPHS, OFF)


def accelerator_of(kind: str) -> dict[str, Any]:
    """Return the section ``accelerator`` of one of :data:`GPU_KINDS`, for any torch with CUDA."""
    versions = {"cuda": ">=12", "cudnn": ">=9", "driver": ">=1"}
    return {"kind": "cuda", **versions, **({"cuda_graphs": True} if kind == GRAPHS else {})}


def determinism_of(kind: str) -> dict[str, Any]:
    """Return the section ``determinism``: as by default, or off but for TF32, which stays off."""
    if kind != OFF:
        return {}
    return {"algorithms": "off", "fill_uninitialized_memory": False, "cublas_workspace": None}
