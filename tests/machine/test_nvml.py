"""The fingerprint of GPUs through NVIDIA's own binding, on machines that a stand-in plays."""

import json

import pytest

from capsule.machine.gpu import Driver, Gpu
from tests.machine.conftest import MACHINES

READ = """
import json
from capsule.machine.gpu import load_nvml, read_gpus
driver, gpus = read_gpus(load_nvml())
print(json.dumps([driver.model_dump(), [gpu.model_dump() for gpu in gpus]]))
"""


@pytest.fixture
def read(on_machine):
    def machine(name):
        driver, gpus = on_machine(name, READ)
        return (
            Driver.model_validate_json(json.dumps(driver)),
            [Gpu.model_validate_json(json.dumps(gpu)) for gpu in gpus],
        )

    return machine


@pytest.mark.parametrize("name", ["h100", "h200", "rtx4090", "two-different", "two-equal"])
def test_every_gpu_is_described_as_its_machine_says(read, name):
    driver, gpus = read(name)
    assert (driver.nvml, driver.version, driver.cuda) == ("loaded", "580.95.05", "13.0")
    assert len(gpus) == len(MACHINES[name]["devices"])
    for index, (gpu, facts) in enumerate(zip(gpus, MACHINES[name]["devices"], strict=True)):
        assert (gpu.index, gpu.name) == (index, facts["name"])
        assert gpu.compute_capability == facts["compute_capability"].replace(",", ".")
        for field in ("cuda_cores", "memory_bytes", "memory_bus_bits", "power_limit_milliwatts"):
            assert getattr(gpu, field) == facts[field]
        for field in ("vbios", "part_number", "inforom", "gsp_firmware"):
            assert getattr(gpu, field) == facts.get(field)
        assert len(gpu.uuid_sha256) == 64
    assert len({gpu.uuid_sha256 for gpu in gpus}) == len(gpus)


def test_a_geforce_says_what_it_cannot_tell(read):
    _, (gpu,) = read("rtx4090")
    assert gpu.architecture == "ada"
    assert (gpu.mig_enabled, gpu.ecc_enabled, gpu.remapped_rows) == (None, None, None)
    unknown = {"mig_enabled", "mig_devices", "ecc_enabled", "remapped_rows", "part_number"}
    assert unknown < gpu.unavailable.keys()
    assert set(gpu.unavailable.values()) == {"NVML_ERROR_NOT_SUPPORTED"}


@pytest.mark.parametrize("name", ["a100-mig", "a100-mig-invalid-slots"])
def test_the_parts_of_a_divided_gpu_are_listed_wherever_they_are(read, name):
    _, (gpu,) = read(name)
    assert gpu.mig_enabled is True
    assert gpu.mig_devices == (
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    )


def test_errors_of_memory_are_reported(read):
    _, (gpu,) = read("ecc-pending")
    assert gpu.ecc_enabled is False  # on after the next reset only
    assert gpu.uncorrected_errors == 3
    rows = gpu.remapped_rows
    assert (rows.correctable, rows.uncorrectable, rows.pending, rows.failed) == (1, 2, True, False)


def test_a_gpu_that_does_not_answer_hides_no_other(read):
    _, (broken, sound) = read("failing-handle")
    assert (broken.index, broken.name) == (0, None)
    assert broken.unavailable == {"handle": "NVML_ERROR_OPERATING_SYSTEM"}
    assert (sound.index, sound.name) == (1, "NVIDIA H100 80GB HBM3")


def test_a_gpu_lost_while_it_is_read_keeps_what_it_said(read):
    driver, (gpu,) = read("lost")
    assert driver.nvml == "loaded"
    assert gpu.name == "NVIDIA H100 80GB HBM3"
    assert gpu.uuid_sha256 is None
    assert gpu.unavailable["uuid_sha256"] == "NVML_ERROR_GPU_IS_LOST"


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("no-driver", "NVML_ERROR_DRIVER_NOT_LOADED"),
        ("mismatch", "NVML_ERROR_LIB_RM_VERSION_MISMATCH"),
    ],
)
def test_a_driver_that_does_not_answer_is_a_fact(read, name, state):
    assert read(name) == (Driver(nvml=state), [])


def test_a_driver_without_a_gpu(read):
    driver, gpus = read("none")
    assert (driver.version, gpus) == ("580.95.05", [])


def test_an_old_driver_states_the_cuda_that_it_supports(read):
    driver, (gpu,) = read("old-driver")
    assert (driver.version, driver.cuda) == ("470.57.02", "11.4")
    assert (gpu.architecture, gpu.compute_capability) == ("volta", "7.0")


DRIVER = """
import json
from capsule.training.determinism.flags import _driver_version
print(json.dumps(_driver_version()))
"""


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("h100", "580.95.05"),
        ("old-driver", "470.57.02"),
        ("no-driver", None),
        ("mismatch", None),
        ("none", "580.95.05"),
    ],
)
def test_the_process_that_trains_asks_the_driver_for_its_version(on_machine, name, version):
    assert on_machine(name, DRIVER) == version
