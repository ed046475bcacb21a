"""Finding engines, and saying clearly that there is none."""

import os
import socket

import pytest

from capsule.engine.connection import addresses, connect, engine_name, is_rootless
from capsule.engine.containers import ContainerEngine
from capsule.experiment.errors import CapsuleError, ExitCode
from tests.engine.conftest import PODMAN, Rootless

DOCKER = {"Version": "20.10.24", "Components": [{"Name": "Engine", "Version": "20.10.24"}]}


def test_the_engine_is_told_by_its_components():
    assert engine_name(DOCKER) == "docker"
    assert engine_name(PODMAN) == "podman"
    assert engine_name({"Version": "1.13"}) == "docker"


def test_a_variable_excludes_the_usual_places():
    assert addresses("docker", {"DOCKER_HOST": "tcp://x:1"}) == ["tcp://x:1"]
    assert addresses("podman", {"DOCKER_HOST": "unix:///d", "CONTAINER_HOST": "unix:///c"}) == [
        "unix:///c"
    ]
    assert addresses("docker", {"CONTAINER_HOST": "unix:///c"})[0] == "unix:///var/run/docker.sock"
    usual = addresses("podman", {"XDG_RUNTIME_DIR": "/run/user/7"})
    assert usual == ["unix:///run/user/7/podman/podman.sock", "unix:///run/podman/podman.sock"]


@pytest.mark.parametrize("name", ["docker", "podman"])
def test_no_engine_names_the_socket_the_cause_and_the_fix(name, nothing_answers):
    with pytest.raises(CapsuleError) as refusal:
        connect(name)
    assert (refusal.value.code, refusal.value.exit_code) == ("CAP-E001", ExitCode.NO_ENGINE)
    assert f"{nothing_answers}: no such file or directory" in refusal.value.message
    assert "--engine process" in refusal.value.fix


def test_a_socket_that_nobody_listens_on(monkeypatch, tmp_path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead.sock"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/dead.sock")
    with pytest.raises(CapsuleError, match=r"dead\.sock: connection refused"):
        connect("docker")


@pytest.mark.engine
def test_docker_at_the_address_given_for_podman(monkeypatch):
    monkeypatch.setenv("CONTAINER_HOST", addresses("docker", {})[0])
    with pytest.raises(CapsuleError) as refusal:
        connect("podman")
    assert refusal.value.code == "CAP-E002"
    assert "--engine docker" in refusal.value.fix


@pytest.mark.parametrize(
    ("info", "rootless"),
    [
        ({"SecurityOptions": ["name=seccomp,profile=builtin", "name=rootless"]}, True),  # Docker 28
        ({"SecurityOptions": ["name=seccomp,profile=default"], "Rootless": True}, True),  # Podman 4
        ({"SecurityOptions": ["name=seccomp,profile=builtin"]}, False),
        ({"SecurityOptions": None, "Rootless": False}, False),
    ],
)
def test_engines_without_root_are_recognised(info, rootless):
    assert is_rootless(info) is rootless


def test_without_root_a_run_is_root_inside_and_missing_limits_are_said(tmp_path):
    engine = ContainerEngine(Rootless())
    assert engine.describe()["rootless"] == "true"
    assert engine._user(tmp_path) == {"user": "0:0"}
    assert tmp_path.stat().st_uid == os.getuid()  # the run directory is given to nobody
    assert "memory and processes are not limited" in engine.unlimited
