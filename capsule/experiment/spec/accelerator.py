"""The spec's section ``accelerator``: the hardware that trains."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from capsule.experiment.fields import Model, VersionConstraint, added

Numerics = Literal["portable-v3", "portable-v3-strict", "portable-v2", "native"]


class CpuAccelerator(Model):
    """Train on the CPU, under a numerics profile."""

    kind: Literal["cpu"] = "cpu"
    numerics: Numerics = Field(
        "portable-v3",
        description="'portable-v3' gives the same bits on every x86-64 CPU with AVX2 and FMA; "
        "'portable-v3-strict' does so without oneDNN, whose blocking depends on cache sizes; "
        "'portable-v2' requires SSE4.2 only; 'native' uses the widest instructions of the machine.",
    )
    cuda_build: bool = added(
        absent=False,
        description="Whether a build of torch for CUDA is accepted and run on the CPU, for package "
        "indexes without builds for CPUs. The image grows by several GB.",
    )


class CudaAccelerator(Model):
    """Train on one NVIDIA GPU. A machine that lacks it is an error, never a fall-back."""

    kind: Literal["cuda"]
    cuda: VersionConstraint = Field(
        description="CUDA runtime version that the wheels must contain, e.g. '13.0'."
    )
    cudnn: VersionConstraint = Field(
        description="cuDNN version that the wheels must contain, e.g. '>=9.10'."
    )
    driver: VersionConstraint = Field(
        description="Driver version that the machine must have, e.g. '>=580.65'."
    )
    gpu: str | None = Field(
        None, description="Exact name of the GPU, e.g. 'NVIDIA H200'; null: any GPU."
    )
    compute_capability: str | None = Field(
        None,
        pattern=r"^[0-9]+\.[0-9]$",
        description="Compute capability of the GPU, e.g. '9.0'; null: any.",
    )
    # In stored specs without this field, nothing is pinned on the CPU beside a GPU.
    numerics: Numerics = added(
        absent="native",
        default="portable-v3",
        description="Numerics profile of the computations on the CPU, such as those of the "
        "actors' networks. The values are those of accelerator.kind 'cpu'.",
    )
    cuda_graphs: bool = added(
        absent=False,
        description="Launch each update of dqn and r2d2 as CUDA graphs, which takes less time and "
        "changes no bit.",
    )
