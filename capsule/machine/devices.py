"""The NVIDIA devices that a run may get: whole GPUs, and the parts of those that are in MIG mode.

``CUDA_VISIBLE_DEVICES`` is how people and schedulers (Slurm among them) say which devices are
theirs. It is followed as in the CUDA C++ Programming Guide, section "CUDA Environment Variables":
indices, or beginnings of UUIDs of one kind, of which the first invalid one hides itself and all
after it. A device that is named twice hides all of them, as in ``torch.cuda``
(``_parse_visible_devices``), which follows the driver.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import takewhile
from typing import Any, NamedTuple

from capsule.experiment.spec import CpuAccelerator, CudaAccelerator
from capsule.host.errors import CapsuleError
from capsule.machine.gpu import (
    Gpu,
    in_mig_mode,
    initialised,
    load_nvml,
    mig_parts,
    read_part,
    text_of,
)

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
_UUIDS = ("GPU-", "MIG-")


class Device(NamedTuple):
    """A device on which a run can train.

    Attributes:
        gpu: NVML index of the GPU. In a job of a scheduler that hides devices from it, NVML numbers
            the remaining ones from 0, so an engine outside the job has other indices.
        place: The name of the device by its index: ``0`` the GPU with that index, ``0:1`` its part
            in slot 1 (the NVIDIA container toolkit's device names by index).
        uuid: NVML's identifier, such as ``GPU-2c1d…`` or ``MIG-7f0e…``.
        name: NVML's name, which for a part ends in its profile.
        compute_capability: Compute capability of the GPU, such as ``9.0``.
        among: Number of GPUs that NVML numbers here; 0 if there is no NVML to ask.
    """

    gpu: int
    place: str
    uuid: str
    name: str
    compute_capability: str
    among: int


FIRST = Device(0, "0", "0", "", "", 0)  # of an engine whose GPUs this machine cannot ask about


def read_devices(nvml: Any) -> tuple[Device, ...]:
    """Return every device of this machine, in the order of the PCI bus.

    A GPU that does not answer is no device, and one in MIG mode is as many as it has parts.

    Args:
        nvml: The binding, as :func:`capsule.machine.gpu.load_nvml` returns it.
    """
    found: list[Device] = []
    with suppress(nvml.NVMLError), initialised(nvml):
        count = nvml.nvmlDeviceGetCount()
        for index in range(count):
            with suppress(nvml.NVMLError):
                found += _devices_of(nvml, index, count)
    return tuple(found)


def _devices_of(nvml: Any, index: int, count: int) -> list[Device]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)

    def device(place: str, handle: Any) -> Device:
        uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
        return Device(index, place, text_of(uuid), text_of(name), f"{major}.{minor}", count)

    if not _in_mig_mode(nvml, handle):
        return [device(str(index), handle)]
    return [device(f"{index}:{slot}", part) for slot, part in mig_parts(nvml, handle)]


def _in_mig_mode(nvml: Any, handle: Any) -> bool:
    try:
        return in_mig_mode(nvml, handle)
    except nvml.NVMLError as error:
        # This is the answer of GPUs that cannot be divided.
        if error.value != nvml.NVML_ERROR_NOT_SUPPORTED:
            raise
        return False


def visible_devices(
    devices: tuple[Device, ...], variables: Mapping[str, str]
) -> tuple[Device, ...]:
    """Return the devices that programs with these environment variables see, in their order.

    Raises:
        CapsuleError: CAP-M008, an index could mean several devices.
    """
    chosen = variables.get(VISIBLE)
    if chosen is None:
        return devices
    words = _words(chosen)
    visible: list[Device] = []
    for word in words:
        device = _named(devices, word, variables)
        if device is None:
            break
        visible.append(device)
    if len(set(words)) < len(words) or len(set(visible)) < len(visible):
        return ()
    return tuple(visible)


def _words(chosen: str) -> list[str]:
    """Return the words of the variable up to the first of another kind than the first one."""
    words = [word.strip() for word in chosen.split(",")]
    prefix = next((each for each in _UUIDS if words[0].startswith(each)), None)
    alike = str.isdecimal if prefix is None else lambda word: word.startswith(prefix)
    return list(takewhile(alike, words))


def _named(devices: tuple[Device, ...], word: str, variables: Mapping[str, str]) -> Device | None:
    """Return the device that one word of the variable names, None if it names none or several."""
    if not word.isdecimal():
        return _one(device for device in devices if device.uuid.startswith(word))
    # In CUDA, an index names a whole GPU, and the parts of one in MIG mode are named by their UUIDs
    # only.
    whole = [device for device in devices if ":" not in device.place]
    # The devices are in the order of the PCI bus. CUDA's default order is by speed, and the two are
    # known to agree only for GPUs of one model.
    by_bus = variables.get(ORDER) == "PCI_BUS_ID"
    if not by_bus and len({device.name for device in whole}) > 1:
        raise CapsuleError(
            "CAP-M008",
            f"{VISIBLE} has the index {word}, but this machine has GPUs of several models, which "
            "CUDA numbers by their speed",
            fix=f"Name the GPU by its UUID (nvidia-smi -L), or set {ORDER}=PCI_BUS_ID.",
        )
    return _one(device for device in whole if device.place == word)


def _one(found: Iterable[Device]) -> Device | None:
    devices = tuple(found)
    return devices[0] if len(devices) == 1 else None


def find_device(devices: tuple[Device, ...], wanted: str) -> Device:
    """Return the device that a user names by its place (``1``, ``0:2``) or by its UUID.

    Args:
        devices: Those of the machine that are visible.
        wanted: The name; of a UUID, enough characters to tell it from the others.

    Raises:
        CapsuleError: CAP-M009, it names no visible device, or several.
    """
    found = _one(device for device in devices if device.place == wanted) or _one(
        device for device in devices if wanted and device.uuid.startswith(wanted)
    )
    if found is None:
        seen = ", ".join(f"{device.place} ({device.name}, {device.uuid})" for device in devices)
        raise CapsuleError(
            "CAP-M009",
            f"--gpu {wanted!a} is not one of the GPUs that this process sees: {seen or 'none'}",
            fix=f"Give one of these indices or UUIDs; {VISIBLE} hides the others.",
        )
    return found


def choose_devices(
    devices: Iterable[Device], accelerator: CudaAccelerator, most: int = 1
) -> tuple[Device, ...]:
    """Return the first device that is the one ``accelerator`` asks for, and further ones like it.

    Args:
        devices: Those to choose from.
        accelerator: The spec's section.
        most: How many a run can use. All are of one model, so that they give the same bits. Of
            parts of GPUs there is one, as CUDA lets a process see no more (NVIDIA, "MIG User
            Guide", section "CUDA Device Enumeration").

    Returns:
        In the order of the PCI bus, in which containers see them; empty if none is as asked for.
    """
    fitting = [
        device
        for device in devices
        if accelerator.gpu in (None, device.name)
        and accelerator.compute_capability in (None, device.compute_capability)
    ]
    alike = [device for device in fitting if device.name == fitting[0].name]
    if any(":" in device.place for device in alike):
        most = 1
    return tuple(sorted(alike[:most], key=lambda device: (device.gpu, device.place)))


def devices_for(
    accelerator: CpuAccelerator | CudaAccelerator, learners: int = 1
) -> tuple[Device, ...]:
    """Choose the devices of a run; the engine's first where this machine has no driver to ask.

    Args:
        accelerator: The spec's section.
        learners: Processes that share a gradient, each of which can use a GPU of its own.

    Raises:
        CapsuleError: CAP-M002, no GPU that this process sees is the one of the spec; CAP-M008 of
            :func:`visible_devices`.
    """
    if accelerator.kind == "cpu":
        return ()
    if not (devices := read_devices(load_nvml())):
        return (FIRST,)
    visible = visible_devices(devices, os.environ)
    if not (chosen := choose_devices(visible, accelerator, learners)):
        raise CapsuleError(
            "CAP-M002",
            f"the spec requires {accelerator.gpu or 'an NVIDIA GPU'}, and this process sees "
            f"{', '.join(each.name for each in visible) or 'none'}",
            fix="Use a machine with that GPU, or change CUDA_VISIBLE_DEVICES.",
        )
    return chosen


def visible_gpus(gpus: tuple[Gpu, ...], nvml: Any, variables: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return those of a machine's GPUs that programs with these environment variables see.

    Args:
        gpus: All of them, by their NVML indices.
        nvml: See :func:`read_devices`.
        variables: Variables of the environment.

    Returns:
        An entry for each GPU, and one for each part of a GPU in MIG mode. Without the variable,
        those that give runs no device have an entry as well.

    Raises:
        CapsuleError: CAP-M008 of :func:`visible_devices`.
    """
    devices = visible_devices(read_devices(nvml), variables)
    # read_gpus() has an entry for every NVML index, also of a GPU that does not answer.
    found = [_entry(gpus[device.gpu], nvml, device) for device in devices]
    if VISIBLE in variables:
        return tuple(found)
    given = {device.gpu for device in devices}
    # Last, because select_gpu() takes the first one that fits, and a run gets none of these.
    silent = (gpu for gpu in gpus if gpu.index not in given)
    return (*found, *silent)


def _entry(gpu: Gpu, nvml: Any, device: Device) -> Gpu:
    _, _, slot = device.place.partition(":")
    if not slot:
        return gpu
    with suppress(nvml.NVMLError), initialised(nvml):
        handle = nvml.nvmlDeviceGetHandleByIndex(device.gpu)
        return gpu.model_copy(update={"part": read_part(nvml, handle, int(slot))})
    return gpu  # lost since its parts were listed
