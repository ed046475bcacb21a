"""The kind of a machine: enough to tell architectures apart, but not owners."""

from __future__ import annotations

from pydantic import Field

from capsule.experiment.fields import Model
from capsule.experiment.spec import CudaAccelerator, Spec
from capsule.machine.fingerprint import Fingerprint
from capsule.machine.requirements import select_gpu


class MachineKind(Model):
    """The facts on which numerics may depend, and the engine, without identifying the machine."""

    processor: str = Field(
        description="Vendor, family and model by CPUID, e.g. 'GenuineIntel 6/85'."
    )
    processor_name: str = Field(description="Name of the processor as it reports it, or 'unknown'.")
    instructions: tuple[str, ...] = Field(description="Instruction sets on which numerics depend.")
    gpu: str | None = Field(
        description="Name and compute capability of the GPU that trains; null for a run on the CPU."
    )
    system: str = Field(description="Distribution and version, e.g. 'debian 12', or 'unknown'.")
    engine: str = Field(description="'docker', 'podman', 'bwrap', 'apptainer' or 'process'.")

    @property
    def key(self) -> tuple[str, tuple[str, ...], str | None]:
        """The processor and the GPU, which make two machines one kind."""
        return self.processor, self.instructions, self.gpu


def machine_kind(machine: Fingerprint, spec: Spec) -> MachineKind:
    """Return the kind of a machine that runs ``spec``; without a GPU if the run needs none."""
    cpu = machine.cpu
    return MachineKind(
        processor=f"{cpu.vendor or 'unknown'} {_shown(cpu.family)}/{_shown(cpu.model)}",
        processor_name=cpu.name or "unknown",
        instructions=cpu.flags,
        gpu=_gpu(machine, spec),
        system=machine.os.title or "unknown",
        engine=(machine.engine or {}).get("name", "process"),
    )


def _gpu(machine: Fingerprint, spec: Spec) -> str | None:
    if not isinstance(spec.accelerator, CudaAccelerator):
        return None
    gpu = select_gpu(machine.gpus, spec.accelerator)
    if gpu is None:
        return None
    # The name of a part ends in its profile, on which its number of multiprocessors depends.
    name = gpu.name if gpu.part is None else gpu.part.name
    return f"{name or 'unknown'} ({_shown(gpu.compute_capability)})"


def _shown(fact: int | str | None) -> str:
    return "?" if fact is None else str(fact)
