"""What the contenders on a GPU have in their specs (gpu.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from turns import median_ratio

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


def speed_table(speeds: Mapping[str, Sequence[float]], unit: str) -> str:
    """Return the speeds of contenders as Markdown, beside the one without determinism.

    Args:
        speeds: Name to a value a round. The name of one contender ends with :data:`OFF`.
        unit: What the values count.
    """
    (baseline,) = (values for name, values in speeds.items() if name.endswith(OFF))
    lines = [f"| {unit} | median | best | / determinism off |", "|---|---|---|---|"]
    for name, values in speeds.items():
        ratio = median_ratio(values, baseline)
        lines.append(f"| {name} | {median(values):.2f} | {max(values):.2f} | {ratio:.3f} |")
    return "\n".join(lines)
