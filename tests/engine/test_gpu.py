"""The request for a GPU, for each kind of engine that grants one."""

import pytest

from capsule.engine.gpu import about_gpu, gpu_request
from capsule.experiment.errors import CapsuleError, ExitCode

CDI = {
    "Driver": "cdi",
    "Count": 0,
    "DeviceIDs": ["nvidia.com/gpu=0"],
    "Capabilities": [],
    "Options": {},
}


def version(number, name="Engine"):
    return {"Version": number, "Components": [{"Name": name, "Version": number}]}


@pytest.fixture(autouse=True)
def no_hook(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _: None)


def test_docker_that_lists_its_cdi_devices():
    info = {"DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=0"}]}
    assert gpu_request(version("28.3.0"), info) == CDI


def test_docker_that_names_its_cdi_folders(tmp_path):
    info = {"CDISpecDirs": [str(tmp_path)]}
    with pytest.raises(CapsuleError):
        gpu_request(version("27.0.0"), info)
    (tmp_path / "nvidia.yaml").write_text("cdiVersion: 0.6.0\nkind: nvidia.com/gpu\n")
    assert gpu_request(version("27.0.0"), info) == CDI


def test_docker_with_the_nvidia_runtime():
    request = gpu_request(version("20.10.24"), {"Runtimes": {"nvidia": {}}})
    assert (request["Driver"], request["DeviceIDs"]) == ("", ["0"])
    assert request["Capabilities"] == [["gpu"]]


@pytest.mark.parametrize("number", ["4.3.1", "5.3.9", "5.3.0-rc1"])
def test_podman_that_would_ignore_the_request(number):
    with pytest.raises(CapsuleError) as refusal:
        gpu_request(version(number, "Podman Engine"), {"Runtimes": {"nvidia": {}}})
    assert (refusal.value.code, refusal.value.exit_code) == ("CAP-E003", ExitCode.INCONCLUSIVE)
    assert number in refusal.value.message


@pytest.mark.parametrize(
    "message",
    [
        'could not select device driver "" with capabilities: [[gpu]]',
        "nvidia-container-cli: initialization error: nvml error: driver not loaded",
        "error gathering device information: unresolvable CDI devices nvidia.com/gpu=0",
    ],
)
def test_refusals_that_are_about_the_gpu(message):
    assert about_gpu(message)


def test_other_refusals_are_not():
    assert not about_gpu("Minimum memory limit allowed is 6MB")


def test_the_gpu_asked_for_is_the_one_requested():
    info = {"DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=0"}]}
    assert gpu_request(version("28.3.0"), info, 3)["DeviceIDs"] == ["nvidia.com/gpu=3"]
    assert gpu_request(version("20.10.24"), {"Runtimes": {"nvidia": {}}}, 2)["DeviceIDs"] == ["2"]
