"""What an experiment requires of a machine, and the GPU that a run gets there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from capsule.experiment.architectures import runs_on
from capsule.experiment.lock import Lock
from capsule.experiment.spec import CudaAccelerator, Numerics, Spec
from capsule.experiment.versions import satisfies
from capsule.host.cuda import NEEDS, cuda_versions, wheel_architectures
from capsule.host.errors import CapsuleError
from capsule.machine.devices import VISIBLE
from capsule.machine.fingerprint import Fingerprint
from capsule.machine.gpu import NOT_FOUND, Gpu

NEEDED_FLAGS: dict[Numerics, frozenset[str]] = {
    "portable-v3": frozenset({"avx2", "fma"}),
    "portable-v3-strict": frozenset({"avx2", "fma"}),
    "portable-v2": frozenset({"sse4_2"}),
    "native": frozenset(),
}
MEBIBYTE = 1 << 20
# Firmware and kernel keep some memory to themselves: a 16 GiB machine shows about 15.5 GiB.
USABLE_MEMORY = 0.9


def check_requirements(lock: Lock, here: Fingerprint) -> list[CapsuleError]:
    """Find what a locked experiment requires and this machine lacks. Empty if it can run.

    Returns:
        CAP-M001 no usable GPU, CAP-M002 not the GPU asked for, CAP-M003 driver outside the
        constraint, CAP-M004 processor without AVX2 or FMA, CAP-M005 too little memory, CAP-M010 and
        CAP-M011 driver or GPU too old for the CUDA of the lock. Not raised, so that all of them can
        be shown; each has exit code 4.
    """
    unmet = [error for _, error in unmet_requirements(lock.spec, here)]
    if isinstance(lock.spec.accelerator, CudaAccelerator):
        # The CUDA of the lock is no fact of a machine, so compare() has no row for it.
        unmet += _unmet_by_cuda(lock, here, lock.spec.accelerator)
    return unmet


def unmet_requirements(spec: Spec, here: Fingerprint) -> Iterator[tuple[str, CapsuleError]]:
    """Yield each requirement that ``here`` fails: the row it belongs to, and the error."""
    needed = spec.limits.memory_mb * MEBIBYTE
    if here.memory_bytes < needed * USABLE_MEMORY:
        yield (
            "memory_bytes",
            CapsuleError(
                "CAP-M005",
                f"limits.memory_mb is {spec.limits.memory_mb} and this machine has "
                f"{here.memory_bytes // MEBIBYTE} MiB",
                fix="Use a machine with more memory.",
            ),
        )
    if isinstance(spec.accelerator, CudaAccelerator):
        yield from _unmet_cuda(spec.accelerator, here)
    numerics = spec.cpu_numerics
    if lacking := NEEDED_FLAGS[numerics] - set(here.cpu.flags):
        yield (
            "cpu.flags",
            CapsuleError(
                "CAP-M004",
                f"accelerator.numerics is {numerics} and this processor ({here.cpu.name}) lacks "
                f"{' and '.join(sorted(lacking))}",
                fix="Use an x86-64 processor that has them; portable-v3 requires Intel since "
                "Haswell or AMD since Zen.",
            ),
        )


def _unmet_cuda(
    accelerator: CudaAccelerator, here: Fingerprint
) -> Iterator[tuple[str, CapsuleError]]:
    asked = accelerator.gpu or "any NVIDIA GPU"
    if accelerator.compute_capability:
        asked += f" with compute capability {accelerator.compute_capability}"
    if not here.gpus:
        yield "gpu.name", _no_gpu(asked, here.driver.nvml)
        return
    if select_gpu(here.gpus, accelerator) is None:
        found = ", ".join(
            f"{name} ({gpu.compute_capability})"
            for gpu in here.gpus
            for name in gpu.names or (f"{gpu.name or 'a GPU'} that runs cannot use",)
        )
        yield (
            "gpu.name",
            CapsuleError(
                "CAP-M002",
                f"the spec requires {asked}, and this machine has {found}",
                fix="Use a machine with that GPU. A run on another one is another experiment.",
            ),
        )
    if not satisfies(here.driver.version or "", accelerator.driver):
        yield (
            "driver.version",
            CapsuleError(
                "CAP-M003",
                f"accelerator.driver is {accelerator.driver!r} and this machine's NVIDIA driver "
                f"is {here.driver.version or 'unknown'}",
                fix="Install a driver that meets the constraint.",
            ),
        )


def _unmet_by_cuda(
    lock: Lock, here: Fingerprint, accelerator: CudaAccelerator
) -> Iterator[CapsuleError]:
    """Yield why the driver, or the GPU that a run would get, cannot do with the locked CUDA."""
    wheels = [(wheel.name, wheel.version) for wheel in lock.image.wheels]
    version = cuda_versions(wheels).get("CUDA", "")
    # The version comes from the lock, so it need not begin with a number.
    needs = NEEDS.get(version.partition(".")[0])
    gpu = select_gpu(here.gpus, accelerator)
    if needs is None or gpu is None:
        return
    if not satisfies(here.driver.version or "", needs.driver):
        yield CapsuleError(
            "CAP-M010",
            f"the lock brings CUDA {version}, which requires an NVIDIA driver {needs.driver}, and "
            f"this machine has {here.driver.version or 'an unknown one'}",
            fix="Update the driver, or pin a torch in image.packages that is built for an older "
            "CUDA, and lock again.",
        )
    if gpu.compute_capability is None:
        return
    # The list for the locked torch is exact. It is known for some builds only, and for others the
    # least capability of their CUDA version counts.
    built = wheel_architectures(wheels)
    least = ".".join(map(str, needs.capability))
    if built and not runs_on(built, gpu.compute_capability):
        has = f"a torch {dict(wheels)['torch']} for CUDA {version} with code for {', '.join(built)}"
    elif not built and not satisfies(gpu.compute_capability, f">={least}"):
        has = f"CUDA {version} with code for {least} and later"
    else:
        return
    yield CapsuleError(
        "CAP-M011",
        f"the lock brings {has}, and none for {gpu.name}, whose compute capability is "
        f"{gpu.compute_capability}",
        fix="Use a GPU of one of these, or pin a torch in image.packages that is built for this "
        "one (wheels for CUDA 12.6 have code for older GPUs), and lock again.",
    )


def _no_gpu(asked: str, nvml: str) -> CapsuleError:
    lacking = (
        "this machine has none (there is no NVIDIA driver library)"
        if nvml == NOT_FOUND
        else f"this process sees none (NVML: {nvml})"
    )
    return CapsuleError(
        "CAP-M001",
        f"the spec requires {asked}, and {lacking}",
        fix="Use a machine with an NVIDIA GPU and its driver; Capsule never falls back to the CPU. "
        f"{VISIBLE} hides GPUs that it does not name by an index or a UUID.",
    )


def select_gpu(gpus: Iterable[Gpu], accelerator: CudaAccelerator) -> Gpu | None:
    """Return the first GPU that is, or has as a MIG device, the one ``accelerator`` asks for.

    One that does not answer is no GPU, and one in MIG mode gives nothing but its MIG devices.
    """
    for gpu in gpus:
        # None is in each of these tuples, so what the spec leaves open is met by every GPU.
        named = any(accelerator.gpu in (None, name) for name in gpu.names)
        capable = accelerator.compute_capability in (None, gpu.compute_capability)
        if named and capable:
            return gpu
    return None


def gpu_warning(spec: Spec, here: Fingerprint) -> str | None:
    """Say what is wrong with the GPU that a run would get; None if nothing is known to be."""
    if not isinstance(spec.accelerator, CudaAccelerator):
        return None
    gpu = select_gpu(here.gpus, spec.accelerator)
    if gpu is None or not gpu.faults:
        return None
    return f"GPU {gpu.index} ({gpu.name}) may give wrong results: {'; '.join(gpu.faults)}"
