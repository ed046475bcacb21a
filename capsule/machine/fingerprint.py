"""The fingerprint: the facts about this computer on which a result can depend.

It contains no host names, user names, paths or serial numbers. A fact that cannot be determined is
null, never an error.
"""

from __future__ import annotations

import os
import platform
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from capsule.experiment.fields import MAX_FACTS, Model
from capsule.experiment.mounts import file_system_of
from capsule.machine.devices import visible_gpus
from capsule.machine.gpu import Driver, Gpu, load_nvml, read_gpus

CPUINFO = Path("/proc/cpuinfo")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

# The instruction sets by which maths libraries choose their code, as /proc/cpuinfo spells them.
_NUMERIC_FLAG = re.compile(r"sse4_2|fma4?|f16c|avx\w*|amx_\w+")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Cpu(Model):
    """The processor, as its first logical core reports it. A null field could not be determined."""

    vendor: str | None = Field(default=None, description="Vendor by CPUID, e.g. 'GenuineIntel'.")
    name: str | None = Field(default=None, description="Model name of /proc/cpuinfo.")
    family: int | None = Field(default=None, description="Family by CPUID.")
    model: int | None = Field(default=None, description="Model by CPUID.")
    stepping: int | None = Field(default=None, description="Stepping by CPUID.")
    flags: tuple[str, ...] = Field(
        default=(), max_length=MAX_FACTS, description="Instruction sets on which numerics depend."
    )
    logical_cores: int | None = Field(
        default=None, description="Number of logical cores of the machine."
    )
    usable_cores: int | None = Field(
        default=None, description="Number of cores that this process may use, by its affinity."
    )
    caches: dict[str, int] = Field(
        default_factory=dict,
        description="Sizes of the caches 'L1d', 'L1i', 'L2' and 'L3' in bytes.",
    )


class OperatingSystem(Model):
    """The host's distribution. A null field could not be determined."""

    id: str | None = Field(default=None, description="ID of os-release, e.g. 'debian'.")
    version_id: str | None = Field(default=None, description="VERSION_ID of os-release, e.g. '12'.")

    @property
    def title(self) -> str:
        """Both in one text, e.g. ``debian 12``; empty if neither is known."""
        return " ".join(filter(None, (self.id, self.version_id)))


class Fingerprint(Model):
    """The description of a machine. A null field could not be determined."""

    schema_id: Literal["capsule/fingerprint/v1"] = Field(
        default="capsule/fingerprint/v1", alias="schema"
    )
    cpu: Cpu
    memory_bytes: int = Field(description="Memory of the machine in bytes.")
    kernel: str = Field(description="Kernel release.")
    os: OperatingSystem
    libc: str | None = Field(default=None, description="Host C library, e.g. 'glibc 2.36'.")
    scratch: str | None = Field(
        default=None, description="Type of the file system to which runs write, e.g. 'ext4'."
    )
    engine: dict[str, str] | None = Field(
        default=None,
        description="The engine in which runs execute, as it describes itself; null if there is "
        "none.",
    )
    driver: Driver
    gpus: tuple[Gpu, ...] = Field((), description="The GPUs that runs can use.")


def take_fingerprint(engine: Mapping[str, str] | None, scratch: Path | None = None) -> Fingerprint:
    """Take this machine's fingerprint, with the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves to runs.

    Args:
        engine: Facts that the engine reports: ``name`` and, if it has them, ``version``, ``api``,
            ``runtime``, ``storage-driver``, ``cgroup``. None if there is no engine.
        scratch: A folder in which run directories are made; by default, that for temporary files.

    Raises:
        CapsuleError: CAP-M008, the variable is ambiguous.
    """
    driver, gpus = read_gpus(nvml := load_nvml())
    libc = " ".join(part for part in platform.libc_ver() if part)
    return Fingerprint(
        cpu=read_cpu(),
        # The machine's memory, not the limit of the cgroup that this process happens to be in.
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=os.uname().release,
        os=_operating_system(),
        libc=libc or None,
        scratch=file_system_of((scratch or Path(tempfile.gettempdir())).resolve()),
        engine=None if engine is None else dict(engine),
        driver=driver,
        gpus=visible_gpus(gpus, nvml, os.environ),
    )


def read_cpu(cpuinfo: Path = CPUINFO, caches: Path = CACHES) -> Cpu:
    """Read the processor's facts from files in the form of Linux's ``/proc`` and ``/sys``."""
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.exists() else ""
    facts = _first_core(text)
    return Cpu(
        vendor=facts.get("vendor_id"),
        name=facts.get("model name"),
        family=_number(facts.get("cpu family")),
        model=_number(facts.get("model")),
        stepping=_number(facts.get("stepping")),
        flags=tuple(sorted(filter(_NUMERIC_FLAG.fullmatch, facts.get("flags", "").split()))),
        logical_cores=os.cpu_count(),
        usable_cores=len(os.sched_getaffinity(0)),
        caches=_cache_sizes(caches),
    )


def _first_core(cpuinfo: str) -> dict[str, str]:
    """Parse the first block of ``/proc/cpuinfo``."""
    block = cpuinfo.strip().split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in block.splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


def _number(text: str | None) -> int | None:
    """Return a number, or None: some virtual processors have the stepping 'unknown'."""
    return int(text) if text is not None and text.isdecimal() else None


def _cache_sizes(folder: Path) -> dict[str, int]:
    """Read cache sizes in bytes; containers and some virtual machines hide them."""
    sizes = {}
    for cache in sorted(folder.glob("index*")):
        kind = {"Data": "d", "Instruction": "i"}.get(_line(cache / "type"), "")
        size = re.fullmatch(r"([0-9]+)([KMG]?)", _line(cache / "size"))
        if size:
            sizes[f"L{_line(cache / 'level')}{kind}"] = int(size[1]) * _UNITS[size[2]]
    return sizes


def _line(path: Path) -> str:
    return path.read_text(encoding="ascii").strip() if path.exists() else ""


def _operating_system() -> OperatingSystem:
    try:
        release = platform.freedesktop_os_release()
    except OSError:  # the file is optional
        return OperatingSystem()
    return OperatingSystem(id=release.get("ID"), version_id=release.get("VERSION_ID"))
