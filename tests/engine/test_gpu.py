"""The request for a GPU, for each kind of engine that grants one."""

import subprocess

import pytest

from capsule.engine.gpu import about_gpu, driver_folder, gpu_components, gpu_request, outdated
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
    assert gpu_request(version("28.3.0"), info, ["3", "5"])["DeviceIDs"] == [
        "nvidia.com/gpu=3",
        "nvidia.com/gpu=5",
    ]
    assert gpu_request(version("20.10.24"), {"Runtimes": {"nvidia": {}}}, ["0:2"])["DeviceIDs"] == [
        "0:2"
    ]


DOCKER = {"Components": [{"Name": "Engine", "Version": "28.3.0"},
                         {"Name": "runc", "Version": "1.2.5"}]}  # fmt: skip
PODMAN = {"Components": [{"Name": "Podman Engine", "Version": "4.3.1"},
                         {"Name": "OCI Runtime (runc)",
                          "Version": "runc version 1.1.5+ds1\ncommit: x\nspec: 1.0"}]}  # fmt: skip
CRUN = {"Components": [{"Name": "Podman Engine", "Version": "5.4.0"},
                       {"Name": "OCI Runtime (crun)", "Version": "crun version 1.21"}]}  # fmt: skip


@pytest.mark.parametrize(
    ("version", "runc"), [(DOCKER, "1.2.5"), (PODMAN, "1.1.5+ds1"), (CRUN, None), ({}, None)]
)
def test_the_runtime_says_its_version(version, runc, monkeypatch):
    monkeypatch.setattr(subprocess, "run", _not_found)
    assert gpu_components(version) == ({} if runc is None else {"runc": runc})


def test_the_toolkit_says_its_version(monkeypatch):
    said = "NVIDIA Container Toolkit CLI version 1.17.7\ncommit: 123\n"
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=said)
    )
    assert gpu_components(CRUN) == {"nvidia-container-toolkit": "1.17.7"}


@pytest.mark.parametrize(
    ("name", "number", "is_outdated"),
    [
        ("runc", "1.1.5+ds1", True),
        ("runc", "1.2.7", True),
        ("runc", "1.2.8", False),
        ("runc", "1.3.2", True),
        ("runc", "1.3.3", False),
        ("runc", "1.4.0", False),
        ("nvidia-container-toolkit", "1.17.7", True),
        ("nvidia-container-toolkit", "1.17.8-1", False),
        ("nvidia-container-toolkit", "1.9.0", True),
        ("nvidia-container-toolkit", "1.18.0", False),
        ("nvidia-container-toolkit", "unknown", True),
    ],
)
def test_versions_with_a_known_way_out_of_a_container(name, number, is_outdated):
    sound = {"runc": "1.4.0", "nvidia-container-toolkit": "1.18.0"}
    findings = outdated(sound | {name: number})
    assert len(findings) == is_outdated
    assert all(number in finding for finding in findings)


def test_a_toolkit_that_does_not_say_its_version_is_a_finding():
    assert outdated({"runc": "1.4.0"}) == ["nvidia-container-toolkit does not report its version"]


def _not_found(*_, **__):
    raise FileNotFoundError


def test_a_process_gets_the_folder_of_the_driver_and_nothing_else_of_the_search_path(tmp_path):
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "libcuda.so.1").touch()
    path = f"/opt/compiler/lib::{tmp_path}/driver:{tmp_path}"
    assert driver_folder({"LD_LIBRARY_PATH": path}) == {"LD_LIBRARY_PATH": f"{tmp_path}/driver"}
    assert driver_folder({"LD_LIBRARY_PATH": str(tmp_path)}) == {}
    assert driver_folder({}) == {}
