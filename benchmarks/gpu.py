"""The sections in the specs of the contenders on a GPU (gpu.md)."""

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
    """Return the section ``determinism``: the default, or no determinism (TF32 is always off)."""
    if kind != OFF:
        return {}
    return {"algorithms": "off", "fill_uninitialized_memory": False, "cublas_workspace": None}


def speed_table(speeds: Mapping[str, Sequence[float]], unit: str) -> str:
    """Return the speeds of contenders as Markdown, with ratios to the one without determinism.

    Args:
        speeds: Name to values, one per round. The name of one contender ends with :data:`OFF`.
        unit: Unit of the values.
    """
    (baseline,) = (values for name, values in speeds.items() if name.endswith(OFF))
    lines = [f"| {unit} | median | best | / determinism off |", "|---|---|---|---|"]
    for name, values in speeds.items():
        ratio = median_ratio(values, baseline)
        lines.append(f"| {name} | {median(values):.2f} | {max(values):.2f} | {ratio:.3f} |")
    return "\n".join(lines)
