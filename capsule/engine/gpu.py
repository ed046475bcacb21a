"""Asking a container engine for an NVIDIA GPU.

A request that the engine cannot meet is an error here, before anything starts: old Podman ignores
requests silently, and Docker notices only when the container starts.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capsule.engine.connection import component, engine_name
from capsule.host.errors import CapsuleError
from capsule.host.wording import counted
from capsule.machine.devices import VISIBLE, Device

if TYPE_CHECKING:
    from docker.types import DeviceRequest

_GPU = "nvidia.com/gpu"  # kind in the Container Device Interface (CDI)
RUNC, TOOLKIT = "runc", "nvidia-container-toolkit"
# First versions of each branch without a known way out of a container: of the toolkit
# CVE-2025-23266 and CVE-2025-23267; of runc CVE-2025-31133, CVE-2025-52565 and CVE-2025-52881.
# crun is not affected by the latter (containers/crun#1906).
_FIXED = {RUNC: ("1.2.8", "1.3.3", "1.4.0-rc.3"), TOOLKIT: ("1.17.8",)}
SEARCHED = "LD_LIBRARY_PATH"
# Where the driver's libraries lie on Fedora, Red Hat Enterprise Linux and their relatives, and
# where NVIDIA's toolkit mounts them. Debian's loader does not look there by itself, and images have
# no cache of the loader, without which the toolkit adds nothing to its search
# (NVIDIA/nvidia-container-toolkit#1326).
IN_CONTAINERS = {SEARCHED: "/usr/lib64"}
_DRIVER = "libcuda.so.1"
_CONTROL, _UNIFIED_MEMORY = "/dev/nvidiactl", "/dev/nvidia-uvm"
# Neither exists on WSL 2, whose driver is in a folder that containers do not search.
_LOADED = ("/proc/driver/nvidia/version", _CONTROL)
_FIX = (
    "Use a machine with the GPU, its driver and the NVIDIA container toolkit "
    "(nvidia-ctk cdi generate)."
)
_TOOLKIT_SECONDS = 10
_CDI_PODMAN = (5, 4)  # the first whose Docker API heeds device requests
# CDI's default folders. Podman's API does not report which ones it reads.
_PODMAN_FOLDERS = ("/etc/cdi", "/var/run/cdi")


def gpu_request(
    version: Mapping[str, Any], info: Mapping[str, Any], devices: Sequence[Device]
) -> DeviceRequest:
    """Return the request for GPUs, in the way that this engine understands.

    It names them by their UUIDs. Indices are NVML's, and a job of Slurm that is confined to its
    devices has others than the engine's daemon, which is outside of it (NVIDIA/nvidia-docker#1227).

    Args:
        version: Answer of ``GET /version``.
        info: Answer of ``GET /info``.
        devices: Those that are wanted.

    Raises:
        CapsuleError: CAP-E003, the engine has no way to give them.
    """
    from docker.types import DeviceRequest

    if names := _cdi_names(version, info):
        wanted = [f"{_GPU}={_cdi_name(device, names)}" for device in devices]
        return DeviceRequest(driver="cdi", device_ids=wanted)
    # Docker's own support of GPUs needs no runtime of NVIDIA's, only this hook on the daemon's
    # PATH.
    if "nvidia" in (info.get("Runtimes") or {}) or shutil.which("nvidia-container-runtime-hook"):
        uuids = [device.uuid for device in devices]
        return DeviceRequest(device_ids=uuids, capabilities=[["gpu"]])
    number = component(version)["Version"]
    raise no_gpu(f"Docker {number} has neither the CDI device {_GPU} nor an NVIDIA runtime")


def _cdi_names(version: Mapping[str, Any], info: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the engine's CDI devices; empty if Docker has none.

    Raises:
        CapsuleError: CAP-E003, of Podman, which has no other way.
    """
    name, number = engine_name(version), component(version)["Version"]
    if name == "podman":
        if tuple(map(int, re.findall(r"\d+", number)[:2])) < _CDI_PODMAN:
            raise no_gpu(f"Podman {number} ignores GPU requests; version 5.4 or later is required")
        if not (described := _described(_PODMAN_FOLDERS)):
            raise no_gpu("no CDI specification describes a GPU to Podman")
        return described
    return _discovered(info) or _described(info.get("CDISpecDirs") or ())


def _cdi_name(device: Device, names: frozenset[str]) -> str:
    """Return the CDI name of a device: its UUID, or else its index if that has one meaning.

    NVIDIA's toolkit names devices by both since version 1.15, and by the index before.

    Raises:
        CapsuleError: CAP-E003, there is no such name, or its index may be another device's.
    """
    # Also true of an engine elsewhere: capsule.machine.devices.FIRST has the index 0 as its UUID.
    if device.uuid in names:
        return device.uuid
    indices = {name.partition(":")[0] for name in names if re.fullmatch(r"\d+(:\d+)?", name)}
    if device.place in names and len(indices) == device.among:
        return device.place
    raise no_gpu(
        f"its CDI devices ({', '.join(sorted(names))}) do not include {device.uuid}, and an index "
        f"is not certain to name it, as {counted(device.among, 'GPU is', 'GPUs are')} visible here"
    )


def gpu_components(version: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of runc and of NVIDIA's toolkit; what is not said is left out.

    Args:
        version: Answer of ``GET /version``. Docker calls the component ``runc``, Podman ``OCI
            Runtime (runc)``.
    """
    found = {}
    for part in version.get("Components") or ():
        if RUNC in part["Name"].lower().strip("()").split("("):
            found[RUNC] = part["Version"].partition("\n")[0].removeprefix("runc version ")
    # No engine says it; the program comes with the toolkit, on the machine of the engine.
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(
            ["nvidia-ctk", "--version"],
            capture_output=True,
            text=True,
            timeout=_TOOLKIT_SECONDS,
            check=True,
        ).stdout
        if match := re.search(r"version (\S+)", said):
            found[TOOLKIT] = match[1]
    return found


def outdated(components: Mapping[str, str]) -> list[str]:
    """Name each component with a known escape from containers, and the versions without it.

    Distributions repair old versions without a new number, which nothing here can see.

    Args:
        components: Name to version; of :func:`gpu_components`. Without a version of the toolkit,
            that is said as well.
    """
    findings = []
    if TOOLKIT not in components:
        findings.append(f"{TOOLKIT} does not report its version")
    for name, number in components.items():
        if not _is_repaired(number, _FIXED[name]):
            repaired = " or ".join(_FIXED[name])
            findings.append(
                f"{name} {number} has a known container escape; use {repaired} or later"
            )
    return findings


def _is_repaired(number: str, fixed: Sequence[str]) -> bool:
    """Tell whether a version is the first repaired one of its branch, or later."""
    from packaging.version import Version

    # What distributions append to a release (1.3.3-0ubuntu1) comes after it. Candidates come
    # before it; Debian writes 1.1.12~rc3.
    match = re.match(r"v?(\d+(?:\.\d+)+)(?:[-~]?rc\.?(\d+))?", number)
    if match is None:
        return False
    found = Version(match[1] + (f"rc{match[2]}" if match[2] else ""))
    first = [Version(each) for each in fixed]
    branch = [each for each in first if each.release[:2] == found.release[:2]]
    return found >= (branch or first[-1:])[0]


def require_driver() -> None:
    """Check that this machine has a driver for NVIDIA's GPUs, which it gives to programs itself.

    Raises:
        CapsuleError: CAP-E003, none is loaded, or not the module that CUDA needs.
    """
    if not any(Path(path).exists() for path in _LOADED):
        raise no_gpu("no NVIDIA driver is loaded")
    # CUDA loads the module by a program with the permissions of root, which a run cannot gain
    # (no_new_privs). NVML does not need it, so the GPU is found nevertheless.
    if Path(_CONTROL).exists() and not Path(_UNIFIED_MEMORY).exists():
        raise no_gpu(
            f"the driver's module nvidia-uvm is not loaded ({_UNIFIED_MEMORY} does not exist)",
            fix="Run 'nvidia-modprobe -u -c=0' once after each start of the machine.",
        )


def visible_devices(gpus: Sequence[Device]) -> dict[str, str]:
    """Return the variable by which CUDA shows a program these devices and no others."""
    return {VISIBLE: ",".join(gpu.uuid for gpu in gpus)}


def driver_folder(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which a process finds NVIDIA's driver in a folder of its own.

    Clusters have such folders, and name them in ``LD_LIBRARY_PATH``. Nothing else of that variable
    reaches a run.

    Args:
        environment: Capsule's own variables.

    Returns:
        Empty where the variable leads to no driver; the loader may find it nevertheless.
    """
    folders = [folder for folder in environment.get(SEARCHED, "").split(":") if folder]
    found = [folder for folder in folders if (Path(folder) / _DRIVER).exists()]
    return {SEARCHED: str(Path(found[0]).absolute())} if found else {}


def no_gpu(cause: str, fix: str = _FIX) -> CapsuleError:
    """Return the error for a GPU that a run does not get. The run is inconclusive, not wrong."""
    return CapsuleError(
        "CAP-E003",
        f"the run needs an NVIDIA GPU but the engine cannot provide one: {cause}",
        fix=fix,
    )


def about_gpu(message: str) -> bool:
    """Tell whether an engine's refusal to start a container is about its GPU."""
    # Docker says "could not select device driver", NVIDIA's hook names itself, and CDI's errors
    # speak of "unresolvable CDI devices".
    return re.search(r"device driver|nvidia|\bcdi\b", message, re.IGNORECASE) is not None


def _discovered(info: Mapping[str, Any]) -> frozenset[str]:
    names = (str(device.get("ID", "")) for device in info.get("DiscoveredDevices") or ())
    return frozenset(name.removeprefix(f"{_GPU}=") for name in names if name.startswith(f"{_GPU}="))


def _described(folders: Iterable[str]) -> frozenset[str]:
    """Return the names of the GPUs that the CDI specifications in these folders describe.

    Docker 25 to 28.1 names its folders but not the devices in them.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    found: set[str] = set()
    for file in (file for folder in folders for file in Path(folder).glob("*.[jy]*")):
        # An engine ignores a file that it cannot read, and so does not give its devices.
        with suppress(OSError, YAMLError, UnicodeDecodeError):
            document = YAML(typ="safe").load(file.read_text("utf-8"))
            if isinstance(document, dict) and document.get("kind") == _GPU:
                found |= {str(device["name"]) for device in document.get("devices") or ()}
    return frozenset(found)
