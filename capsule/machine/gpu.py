"""NVIDIA GPUs and their driver, as NVML reports them.

Absence is a fact: on a machine without the NVIDIA library there are no GPUs, and ``Driver.nvml``
states this. A field that a GPU does not support is null, and ``unavailable`` contains the name of
NVML's error. Source: NVIDIA Management Library API reference, device and system queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import Field

from capsule.experiment.contract import gpu_identity
from capsule.experiment.fields import Model, added

NOT_FOUND = "not found"
LOADED = "loaded"


class RemappedRows(Model):
    """Memory rows that the GPU replaced by spare ones."""

    correctable: int = Field(description="Number of rows replaced because of correctable errors.")
    uncorrectable: int = Field(
        description="Number of rows replaced because of uncorrectable errors."
    )
    pending: bool = Field(description="Whether rows will be replaced at the next reset only.")
    failed: bool = Field(description="Whether a row could not be replaced.")


class MigPart(Model):
    """A part of a GPU in MIG mode. A null field is not available."""

    slot: int = Field(description="Number of its slot on the GPU.")
    name: str = Field(description="Name of the GPU with the profile, e.g. '… MIG 1g.5gb'.")
    sm_count: int | None = Field(
        default=None, description="Number of streaming multiprocessors of the part."
    )
    memory_bytes: int | None = Field(default=None, description="Memory of the part in bytes.")


class Gpu(Model):
    """A GPU. A null field is not available; 'unavailable' lists the reasons that NVML gave."""

    index: int = Field(description="NVML index, in PCI bus order.")
    name: str | None = None
    architecture: str | None = Field(
        default=None, description="Architecture of the GPU, e.g. 'hopper'."
    )
    compute_capability: str | None = Field(
        default=None, description="Compute capability of the GPU, e.g. '9.0'."
    )
    cuda_cores: int | None = None
    sm_count: int | None = Field(
        default=None,
        description="Number of streaming multiprocessors, which NVML reports for few devices.",
    )
    mig_enabled: bool | None = None
    mig_devices: tuple[str, ...] | None = Field(
        default=None, description="Names of the MIG devices, with their profiles."
    )
    part: MigPart | None = added(
        absent=None,
        description="Part of the GPU that this entry describes; null for the whole GPU.",
    )
    memory_bytes: int | None = None
    memory_bus_bits: int | None = None
    part_number: str | None = None
    vbios: str | None = None
    gsp_firmware: str | None = None
    inforom: str | None = None
    ecc_enabled: bool | None = None
    uncorrected_errors: int | None = Field(
        default=None,
        description="Number of uncorrected memory errors over the lifetime of the GPU.",
    )
    remapped_rows: RemappedRows | None = None
    power_limit_milliwatts: int | None = None
    max_sm_clock_mhz: int | None = None
    max_memory_clock_mhz: int | None = None
    uuid_sha256: str | None = Field(
        default=None, description="SHA-256 of a fixed prefix and the UUID of the GPU."
    )
    unavailable: dict[str, str] = Field(
        default_factory=dict,
        description="Name of the NVML error that made each null field unavailable, by field.",
    )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the devices that runs can use: the parts in MIG mode, else the GPU."""
        if self.part is not None:
            return (self.part.name,)
        if self.mig_enabled:  # a document from the time before entries had a part
            return self.mig_devices or ()
        return () if self.name is None else (self.name,)

    @property
    def faults(self) -> tuple[str, ...]:
        """The faults of its memory (NVIDIA, "GPU Memory Error Management")."""
        rows = self.remapped_rows
        if rows is None:
            return ()
        pending = ("rows of its memory are remapped at its next reset only",) * rows.pending
        return pending + ("a row of its memory could not be remapped",) * rows.failed


class Driver(Model):
    """The NVIDIA driver. A null field is not available."""

    nvml: str = Field(
        description="State of NVML: 'loaded', 'not found', or the error that prevented its use."
    )
    version: str | None = None
    cuda: str | None = Field(
        default=None, description="Newest CUDA version that the driver supports."
    )
    unavailable: dict[str, str] = Field(
        default_factory=dict,
        description="Name of the NVML error that made each null field unavailable, by field.",
    )


def load_nvml() -> Any:
    """Return NVIDIA's binding of NVML. It loads the driver's library only when initialised."""
    import pynvml

    return pynvml


@contextmanager
def initialised(nvml: Any) -> Iterator[None]:
    """Initialise NVML, and shut it down at the end.

    NVML counts initialisations, so this does not close it for others in the process.
    """
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def read_gpus(nvml: Any) -> tuple[Driver, tuple[Gpu, ...]]:
    """Ask NVML about the driver and every GPU. Never fails for want of a GPU.

    Args:
        nvml: The binding, as :func:`load_nvml` returns it.
    """
    try:
        with initialised(nvml):
            facts, unavailable = _collect(DRIVER_FIELDS, nvml)
            driver = Driver(nvml=LOADED, **facts, unavailable=unavailable)
            return driver, tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    except nvml.NVMLError as error:
        return Driver(nvml=_state(nvml, error)), ()


def _gpu(nvml: Any, index: int) -> Gpu:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        # Each GPU has an entry, so that its place among them is its NVML index (visible_gpus).
        return Gpu(index=index, unavailable={"handle": _error_name(nvml, error)})
    facts, unavailable = _collect(GPU_FIELDS, nvml, handle)
    return Gpu(index=index, **facts, unavailable=unavailable)


def _collect(
    fields: Mapping[str, Callable[..., Any]], *arguments: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    """Call every getter; return the values, and the NVML error name of those that had none."""
    nvml = arguments[0]
    facts: dict[str, Any] = {}
    unavailable: dict[str, str] = {}
    for field, getter in fields.items():
        try:
            facts[field] = getter(*arguments)
        except nvml.NVMLError as error:
            unavailable[field] = _error_name(nvml, error)
    return facts, unavailable


def _state(nvml: Any, error: Any) -> str:
    missing = error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND
    return NOT_FOUND if missing else _error_name(nvml, error)


def _error_name(nvml: Any, error: Any) -> str:
    names = _constants(nvml, "NVML_ERROR_")
    return f"NVML_ERROR_{names.get(error.value, error.value)}"


def _constants(nvml: Any, prefix: str) -> dict[int, str]:
    """Map the values of NVML's constants to their names without ``prefix``."""
    return {
        getattr(nvml, name): name.removeprefix(prefix)
        for name in dir(nvml)
        if name.startswith(prefix)
    }


def text_of(value: str | bytes) -> str:
    """Return a value of the binding as text; some of its getters give bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _architecture(nvml: Any, gpu: Any) -> str:
    number = nvml.nvmlDeviceGetArchitecture(gpu)
    # A GPU that is newer than the binding has a number, but no name in it.
    return _constants(nvml, "NVML_DEVICE_ARCH_").get(number, f"number-{number}").lower()


def _compute_capability(nvml: Any, gpu: Any) -> str:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(gpu)
    return f"{major}.{minor}"


def mig_parts(nvml: Any, gpu: Any) -> Iterator[tuple[int, Any]]:
    """Yield slot and handle of each MIG device; the slots of a GPU need not be filled in order.

    NVML calls an empty slot "not found" or, on some drivers, an invalid argument, as in NVIDIA's
    own go-nvlib. A GPU that is not in MIG mode has no parts.
    """
    if not in_mig_mode(nvml, gpu):
        return
    empty = (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_ERROR_INVALID_ARGUMENT)
    for slot in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            yield slot, nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, slot)
        except nvml.NVMLError as error:
            if error.value not in empty:
                raise


def in_mig_mode(nvml: Any, gpu: Any) -> bool:
    """Tell whether a GPU is in MIG mode now; NVML also tells the mode after its next reset."""
    return bool(nvml.nvmlDeviceGetMigMode(gpu)[0])


def _mig_devices(nvml: Any, gpu: Any) -> tuple[str, ...]:
    return tuple(text_of(nvml.nvmlDeviceGetName(part)) for _, part in mig_parts(nvml, gpu))


def read_part(nvml: Any, gpu: Any, slot: int) -> MigPart:
    """Describe the part in a slot of a GPU.

    Args:
        nvml: See :func:`read_gpus`.
        gpu: NVML's handle of the GPU.
        slot: Of :func:`mig_parts`.
    """
    part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, slot)
    facts, _ = _collect(PART_FIELDS, nvml, part)
    return MigPart(slot=slot, name=text_of(nvml.nvmlDeviceGetName(part)), **facts)


def _remapped_rows(nvml: Any, gpu: Any) -> RemappedRows:
    correctable, uncorrectable, pending, failed = nvml.nvmlDeviceGetRemappedRows(gpu)
    return RemappedRows(
        correctable=correctable,
        uncorrectable=uncorrectable,
        pending=bool(pending),
        failed=bool(failed),
    )


def _uncorrected_errors(nvml: Any, gpu: Any) -> int:
    kind, counter = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_AGGREGATE_ECC
    return int(nvml.nvmlDeviceGetTotalEccErrors(gpu, kind, counter))


def _uuid_sha256(nvml: Any, gpu: Any) -> str:
    return gpu_identity(text_of(nvml.nvmlDeviceGetUUID(gpu)))


def _cuda_version(nvml: Any) -> str:
    """NVML packs the version as 1000 * major + 10 * minor."""
    packed = nvml.nvmlSystemGetCudaDriverVersion_v2()
    return f"{packed // 1000}.{packed % 1000 // 10}"


DRIVER_FIELDS: Mapping[str, Callable[[Any], Any]] = {
    "version": lambda nvml: text_of(nvml.nvmlSystemGetDriverVersion()),
    "cuda": _cuda_version,
}

PART_FIELDS: Mapping[str, Callable[[Any, Any], Any]] = {
    "sm_count": lambda nvml, part: nvml.nvmlDeviceGetAttributes_v2(part).multiprocessorCount,
    "memory_bytes": lambda nvml, part: nvml.nvmlDeviceGetMemoryInfo(part).total,
}

GPU_FIELDS: Mapping[str, Callable[[Any, Any], Any]] = {
    "name": lambda nvml, gpu: text_of(nvml.nvmlDeviceGetName(gpu)),
    "architecture": _architecture,
    "compute_capability": _compute_capability,
    "cuda_cores": lambda nvml, gpu: nvml.nvmlDeviceGetNumGpuCores(gpu),
    "sm_count": lambda nvml, gpu: nvml.nvmlDeviceGetAttributes_v2(gpu).multiprocessorCount,
    "mig_enabled": in_mig_mode,
    "mig_devices": _mig_devices,
    "memory_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total,
    "memory_bus_bits": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryBusWidth(gpu),
    "part_number": lambda nvml, gpu: text_of(nvml.nvmlDeviceGetBoardPartNumber(gpu)),
    "vbios": lambda nvml, gpu: text_of(nvml.nvmlDeviceGetVbiosVersion(gpu)),
    "gsp_firmware": lambda nvml, gpu: text_of(nvml.nvmlDeviceGetGspFirmwareVersion(gpu)),
    "inforom": lambda nvml, gpu: text_of(nvml.nvmlDeviceGetInforomImageVersion(gpu)),
    # The first of the two modes is the current one. The other holds after the next reset.
    "ecc_enabled": lambda nvml, gpu: bool(nvml.nvmlDeviceGetEccMode(gpu)[0]),
    "uncorrected_errors": _uncorrected_errors,
    "remapped_rows": _remapped_rows,
    "power_limit_milliwatts": lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu),
    "max_sm_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "max_memory_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(
        gpu, nvml.NVML_CLOCK_MEM
    ),
    "uuid_sha256": _uuid_sha256,
}
