"""The request for a GPU, for each kind of engine that grants one."""

import json
import subprocess

import pytest

from capsule.engine.containers import ContainerEngine
from capsule.engine.gpu import (
    about_gpu,
    driver_folder,
    gpu_components,
    gpu_request,
    outdated,
    require_driver,
)
from capsule.engine.process import task_environment
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.machine.devices import FIRST as ELSEWHERE
from capsule.machine.devices import Device

FIRST = Device(0, "0", "GPU-aaaa", "NVIDIA H200", "9.0", 2)
SECOND = Device(1, "1", "GPU-bbbb", "NVIDIA H200", "9.0", 2)
PART = Device(0, "0:2", "MIG-cccc", "NVIDIA H200 MIG 1g.18gb", "9.0", 1)
LEGACY = {"Runtimes": {"nvidia": {}}}
# As nvidia-ctk writes it since 1.15, and before.
NAMES = ["0", "1", "GPU-aaaa", "GPU-bbbb", "all"]
INDICES = ["0", "1", "all"]


def version(number, name="Engine"):
    return {"Version": number, "Components": [{"Name": name, "Version": number}]}


@pytest.fixture(autouse=True)
def no_hook(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _: None)


def discovered(names):
    devices = [{"Source": "cdi", "ID": f"nvidia.com/gpu={name}"} for name in names]
    return {"DiscoveredDevices": [*devices, {"Source": "cdi", "ID": "vendor.com/net=GPU-bbbb"}]}


def specification(names):
    devices = [{"name": name, "containerEdits": {}} for name in names]
    return json.dumps({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices})


def test_docker_that_lists_its_cdi_devices():
    request = gpu_request(version("28.3.0"), discovered(NAMES), [FIRST, SECOND])
    assert request == {
        "Driver": "cdi",
        "Count": 0,
        "DeviceIDs": ["nvidia.com/gpu=GPU-aaaa", "nvidia.com/gpu=GPU-bbbb"],
        "Capabilities": [],
        "Options": {},
    }


def test_docker_that_names_its_cdi_folders(tmp_path):
    info = {"CDISpecDirs": [str(tmp_path), str(tmp_path / "none")]}
    (tmp_path / "network.json").write_text('{"kind": "vendor.com/net", "devices": []}')
    (tmp_path / "broken.yaml").write_text("kind: nvidia.com/gpu\ndevices: [\n")
    with pytest.raises(CapsuleError):
        gpu_request(version("27.0.0"), info, [SECOND])
    (tmp_path / "nvidia.yaml").write_text(specification(NAMES))
    assert gpu_request(version("27.0.0"), info, [SECOND])["DeviceIDs"] == [
        "nvidia.com/gpu=GPU-bbbb"
    ]


def test_an_index_is_requested_only_where_it_has_one_meaning():
    """In a job of Slurm, NVML may show one of two GPUs, as number 0 whatever it is outside."""
    docker, info = version("28.3.0"), discovered(INDICES)
    assert gpu_request(docker, info, [SECOND])["DeviceIDs"] == ["nvidia.com/gpu=1"]
    with pytest.raises(CapsuleError, match=r"CAP-E003.*GPU-aaaa") as refusal:
        gpu_request(docker, info, [FIRST._replace(among=1)])
    assert refusal.value.exit_code == ExitCode.INCONCLUSIVE
    parts = discovered(["0:1", "0:2", "all"])
    assert gpu_request(docker, parts, [PART])["DeviceIDs"] == ["nvidia.com/gpu=0:2"]
    with pytest.raises(CapsuleError, match="CAP-E003"):
        gpu_request(docker, discovered(["gpu0", "gpu1"]), [FIRST])


@pytest.mark.parametrize("device", [FIRST, PART])
def test_docker_with_the_nvidia_runtime(device):
    request = gpu_request(version("20.10.24"), LEGACY, [device])
    assert (request["Driver"], request["DeviceIDs"]) == ("", [device.uuid])
    assert request["Capabilities"] == [["gpu"]]


def test_podman_takes_cdi_only(tmp_path, monkeypatch):
    podman = version("5.4.0", "Podman Engine")
    monkeypatch.setattr("capsule.engine.gpu._PODMAN_FOLDERS", [tmp_path])
    with pytest.raises(CapsuleError, match="no CDI specification"):
        gpu_request(podman, LEGACY, [FIRST])
    (tmp_path / "nvidia.json").write_text(specification(NAMES))
    assert gpu_request(podman, {}, [FIRST])["DeviceIDs"] == ["nvidia.com/gpu=GPU-aaaa"]


def test_an_engine_elsewhere_is_asked_for_its_first_gpu():
    assert gpu_request(version("20.10.24"), LEGACY, [ELSEWHERE])["DeviceIDs"] == ["0"]
    request = gpu_request(version("28.3.0"), discovered(NAMES), [ELSEWHERE])
    assert request["DeviceIDs"] == ["nvidia.com/gpu=0"]


@pytest.mark.parametrize("number", ["4.3.1", "5.3.9", "5.3.0-rc1"])
def test_podman_that_would_ignore_the_request(number):
    with pytest.raises(CapsuleError) as refusal:
        gpu_request(version(number, "Podman Engine"), LEGACY, [FIRST])
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
        ("runc", "1.2.8~rc1+ds1", True),
        ("runc", "1.2.8-rc.1+dev", True),
        ("runc", "1.3.2-0ubuntu1~24.04.1", True),
        ("runc", "1.3.3-0ubuntu1~24.04.2", False),
        ("runc", "1.3.3-1.el9_6", False),
        ("runc", "1.4.0-rc.2", True),
        ("runc", "1.4.0-rc.3", False),
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


def test_a_plain_process_sees_its_gpus_and_no_others(make_task, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", SECOND.uuid)
    for gpus, seen in (((), ""), ((FIRST,), FIRST.uuid), ((FIRST, SECOND), "GPU-aaaa,GPU-bbbb")):
        variables = task_environment(make_task("", gpus=gpus), "/environment", "/home")
        assert variables["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize(
    ("present", "lacking"),
    [
        ({"/dev/nvidiactl", "/dev/nvidia-uvm"}, None),
        ({"/proc/driver/nvidia/version"}, None),
        ({"/dev/dxg"}, "no NVIDIA driver is loaded"),
        ({"/dev/nvidiactl"}, "module nvidia-uvm is not loaded"),
        ({"/dev/nvidiactl", "/proc/driver/nvidia/version"}, "module nvidia-uvm is not loaded"),
    ],
)
def test_a_driver_is_one_of_linux_with_the_module_of_cuda(monkeypatch, present, lacking):
    monkeypatch.setattr("pathlib.Path.exists", lambda path: str(path) in present)
    if lacking is None:
        require_driver()
    else:
        with pytest.raises(CapsuleError, match=lacking) as caught:
            require_driver()
        assert caught.value.code == "CAP-E003"


class Daemon:
    """A Docker client of an engine with CDI devices."""

    def version(self):
        return version("28.3.0") | {"ApiVersion": "1.51"}

    def info(self):
        return discovered(NAMES)

    def close(self):
        pass


@pytest.mark.parametrize("gpus", [(), (SECOND,)])
def test_a_container_gets_its_gpus_and_finds_their_driver(make_task, gpus):
    engine = ContainerEngine(Daemon())
    engine._image = "an image"
    settings = engine._settings(make_task("true", gpus=gpus), [])
    if gpus:
        (request,) = settings["device_requests"]
        assert request["DeviceIDs"] == ["nvidia.com/gpu=GPU-bbbb"]
        assert settings["environment"]["LD_LIBRARY_PATH"] == "/usr/lib64"
    else:
        assert "device_requests" not in settings
        assert "LD_LIBRARY_PATH" not in settings["environment"]
