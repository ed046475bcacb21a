"""What is collected from NVML: with a GPU, without one, and with one that cannot say everything.

The stand-in for NVML answers only functions that NVIDIA's binding really has, with its constants
and its errors, so that what is tested is the collection and not an invented interface.
"""

import ctypes
import hashlib
from types import SimpleNamespace

import pynvml
import pytest

from capsule.machine.gpu import (
    DRIVER_FIELDS,
    GPU_FIELDS,
    Driver,
    Gpu,
    RemappedRows,
    load_nvml,
    read_gpus,
)

UUID = "GPU-2c1d3a5e-0000-1111-2222-333344445555"
H200 = {
    "nvmlInit": lambda: None,
    "nvmlShutdown": lambda: None,
    "nvmlSystemGetDriverVersion": lambda: "580.95.05",
    "nvmlSystemGetCudaDriverVersion_v2": lambda: 13_020,
    "nvmlDeviceGetCount": lambda: 1,
    "nvmlDeviceGetHandleByIndex": lambda index: f"handle {index}",
    "nvmlDeviceGetName": lambda _: "NVIDIA H200",
    "nvmlDeviceGetArchitecture": lambda _: pynvml.NVML_DEVICE_ARCH_HOPPER,
    "nvmlDeviceGetCudaComputeCapability": lambda _: (9, 0),
    "nvmlDeviceGetNumGpuCores": lambda _: 16_896,
    "nvmlDeviceGetMigMode": lambda _: [0, 1],
    "nvmlDeviceGetMaxMigDeviceCount": lambda _: 0,
    "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=150_754_820_096, used=1),
    "nvmlDeviceGetMemoryBusWidth": lambda _: 6_144,
    "nvmlDeviceGetBoardPartNumber": lambda _: "900-21010-0040-000",
    "nvmlDeviceGetVbiosVersion": lambda _: "96.00.BC.00.01",
    "nvmlDeviceGetGspFirmwareVersion": lambda _: b"580.95.05",
    "nvmlDeviceGetInforomImageVersion": lambda _: "G520.0280.00.05",
    "nvmlDeviceGetEccMode": lambda _: [1, 1],
    "nvmlDeviceGetTotalEccErrors": lambda _, kind, counter: 100 * kind + counter,
    "nvmlDeviceGetRemappedRows": lambda _: (3, 2, 1, 0),
    "nvmlDeviceGetEnforcedPowerLimit": lambda _: 700_000,
    "nvmlDeviceGetMaxClockInfo": lambda _, clock: 1_000 + clock,
    "nvmlDeviceGetUUID": lambda _: UUID,
}


class Nvml:
    """NVML with some functions answering; every other function is not supported."""

    def __init__(self, **answers):
        self.answers = answers
        self.calls = []

    def __dir__(self):
        return dir(pynvml)

    def __getattr__(self, name):
        real = getattr(pynvml, name)  # AttributeError for what the binding does not have
        if not name.startswith("nvml"):
            return real

        def answer(*arguments):
            self.calls.append(name)
            if name not in self.answers:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return self.answers[name](*arguments)

        return answer


def failing(error):
    def fail(*arguments):
        raise pynvml.NVMLError(error)

    return fail


def has_nvidia_library():
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def test_every_field_is_collected():
    driver, gpus = read_gpus(Nvml(**H200))
    assert driver == Driver(nvml="loaded", version="580.95.05", cuda="13.2")
    assert gpus == (
        Gpu(
            index=0,
            name="NVIDIA H200",
            architecture="hopper",
            compute_capability="9.0",
            cuda_cores=16_896,
            sm_count=None,
            mig_enabled=False,
            mig_devices=(),
            memory_bytes=150_754_820_096,
            memory_bus_bits=6_144,
            part_number="900-21010-0040-000",
            vbios="96.00.BC.00.01",
            gsp_firmware="580.95.05",
            inforom="G520.0280.00.05",
            ecc_enabled=True,
            uncorrected_errors=101,
            remapped_rows=RemappedRows(correctable=3, uncorrectable=2, pending=True, failed=False),
            power_limit_milliwatts=700_000,
            max_sm_clock_mhz=1_001,
            max_memory_clock_mhz=1_002,
            uuid_sha256=hashlib.sha256(b"capsule/gpu-uuid/v1\0" + UUID.encode()).hexdigest(),
            unavailable={"sm_count": "NVML_ERROR_NOT_SUPPORTED"},
        ),
    )
    assert Gpu.model_validate_json(gpus[0].model_dump_json()) == gpus[0]


def test_the_tables_and_the_models_name_the_same_fields():
    assert set(GPU_FIELDS) == set(Gpu.model_fields) - {"index", "part", "unavailable"}
    assert set(DRIVER_FIELDS) == set(Driver.model_fields) - {"nvml", "unavailable"}


def test_the_uuid_is_not_published():
    _, (gpu,) = read_gpus(Nvml(**H200))
    assert UUID not in gpu.model_dump_json()
    assert UUID.removeprefix("GPU-") not in gpu.model_dump_json()


@pytest.mark.parametrize("field", sorted(GPU_FIELDS))
def test_a_field_that_fails_is_null_with_its_reason_and_spoils_no_other(field):
    everything = Nvml(
        **H200 | {"nvmlDeviceGetAttributes_v2": lambda _: SimpleNamespace(multiprocessorCount=132)}
    )
    _, (whole,) = read_gpus(everything)
    assert whole.unavailable == {}
    probe = Nvml(**everything.answers)
    GPU_FIELDS[field](probe, "handle 0")
    groups = ({"max_sm_clock_mhz", "max_memory_clock_mhz"}, {"mig_enabled", "mig_devices"})
    lost = {probe.calls[0]: failing(pynvml.NVML_ERROR_NO_PERMISSION)}
    _, (gpu,) = read_gpus(Nvml(**everything.answers | lost))
    expected = next((group for group in groups if field in group), {field})
    assert gpu.unavailable == dict.fromkeys(expected, "NVML_ERROR_NO_PERMISSION")
    nothing = dict.fromkeys(expected)
    assert (
        gpu.model_dump(exclude={"unavailable"})
        == whole.model_dump(exclude={"unavailable"}) | nothing
    )


def test_mig_devices_are_named_and_empty_slots_skipped():
    def device(gpu, slot):
        if slot == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return f"slot {slot}"

    names = {"handle 0": "NVIDIA H200", "slot 0": "NVIDIA H200 MIG 3g.71gb", "slot 2": "other"}
    mig = {
        "nvmlDeviceGetMigMode": lambda _: [1, 1],
        "nvmlDeviceGetMaxMigDeviceCount": lambda _: 3,
        "nvmlDeviceGetMigDeviceHandleByIndex": device,
        "nvmlDeviceGetName": names.__getitem__,
    }
    _, (gpu,) = read_gpus(Nvml(**H200 | mig))
    assert gpu.mig_enabled is True
    assert gpu.mig_devices == ("NVIDIA H200 MIG 3g.71gb", "other")
    refused = {"nvmlDeviceGetMigDeviceHandleByIndex": failing(pynvml.NVML_ERROR_NO_PERMISSION)}
    _, (gpu,) = read_gpus(Nvml(**H200 | mig | refused))
    assert gpu.mig_devices is None
    assert gpu.unavailable["mig_devices"] == "NVML_ERROR_NO_PERMISSION"


def test_a_gpu_that_is_not_in_mig_mode_has_no_parts():
    mig = {
        "nvmlDeviceGetMaxMigDeviceCount": lambda _: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": failing(pynvml.NVML_ERROR_NO_PERMISSION),
    }
    _, (gpu,) = read_gpus(Nvml(**H200 | mig))
    assert (gpu.mig_enabled, gpu.mig_devices) == (False, ())


def test_an_architecture_newer_than_the_binding_is_named_by_its_number():
    _, (gpu,) = read_gpus(Nvml(**H200 | {"nvmlDeviceGetArchitecture": lambda _: 77}))
    assert gpu.architecture == "number-77"


def test_one_lost_gpu_does_not_hide_the_others():
    def handle(index):
        if index == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return "handle 1"

    two = {"nvmlDeviceGetCount": lambda: 2, "nvmlDeviceGetHandleByIndex": handle}
    _, gpus = read_gpus(Nvml(**H200 | two))
    assert gpus[0] == Gpu(index=0, unavailable={"handle": "NVML_ERROR_GPU_IS_LOST"})
    assert gpus[1].name == "NVIDIA H200"


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "not found"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "NVML_ERROR_DRIVER_NOT_LOADED"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "NVML_ERROR_LIB_RM_VERSION_MISMATCH"),
        (4_321, "NVML_ERROR_4321"),
    ],
)
def test_nvml_that_does_not_start_is_a_fact(error, state):
    nvml = Nvml(**H200 | {"nvmlInit": failing(error)})
    assert read_gpus(nvml) == (Driver(nvml=state), ())
    assert nvml.calls == ["nvmlInit"]


def test_a_driver_without_devices_is_shut_down_again():
    nvml = Nvml(**H200 | {"nvmlDeviceGetCount": failing(pynvml.NVML_ERROR_UNKNOWN)})
    assert read_gpus(nvml) == (Driver(nvml="NVML_ERROR_UNKNOWN"), ())
    assert nvml.calls[-1] == "nvmlShutdown"


@pytest.mark.skipif(has_nvidia_library(), reason="this machine has NVIDIA's NVML library")
def test_this_machine_has_no_nvml():
    assert read_gpus(load_nvml()) == (Driver(nvml="not found"), ())


@pytest.mark.gpu
@pytest.mark.skipif(not has_nvidia_library(), reason="this machine has no NVIDIA NVML library")
def test_a_real_gpu_tells_what_decides_about_bits():
    driver, gpus = read_gpus(load_nvml())
    assert driver.nvml == "loaded"
    assert driver.version is not None
    assert driver.cuda is not None
    assert gpus
    for gpu in gpus:
        assert gpu.name is not None
        assert gpu.compute_capability is not None
        assert gpu.cuda_cores is not None
        assert gpu.uuid_sha256 is not None
        assert set(gpu.unavailable) == {
            field for field in GPU_FIELDS if getattr(gpu, field) is None
        }
    assert read_gpus(load_nvml())[1][0].name == gpus[0].name
