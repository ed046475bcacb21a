"""Finding engines, and saying clearly that there is none."""

import json
import os
import socket
from pathlib import Path

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
    usual = addresses("podman", {"XDG_RUNTIME_DIR": "/run/user/7"})
    assert usual == ["unix:///run/user/7/podman/podman.sock", "unix:///run/podman/podman.sock"]


def test_the_usual_places_are_those_of_docker_of_rootless_docker_and_of_docker_desktop(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert addresses("docker", {"XDG_RUNTIME_DIR": "/run/user/7", "CONTAINER_HOST": "x"}) == [
        "unix:///var/run/docker.sock",
        "unix:///run/user/7/docker.sock",
        f"unix://{tmp_path}/.docker/desktop/docker.sock",
        f"unix://{tmp_path}/.docker/run/docker.sock",
    ]


DESKTOP = "fe9c6bd7a66301f49ca9b6a70b217107cd1284598bfc254700c989b916da791e"  # of "desktop-linux"


@pytest.fixture
def contexts(tmp_path):
    """Return a function that writes the context desktop-linux as Docker does."""

    def write(host, *, tls=False):
        path = tmp_path / "contexts" / "meta" / DESKTOP / "meta.json"
        path.parent.mkdir(parents=True)
        endpoint = {"Host": host, "SkipTLSVerify": False}
        document = {"Name": "desktop-linux", "Metadata": {}, "Endpoints": {"docker": endpoint}}
        path.write_text(json.dumps(document))
        (tmp_path / "config.json").write_text('{"auths": {}, "currentContext": "desktop-linux"}')
        if tls:
            (tmp_path / "contexts" / "tls" / DESKTOP / "docker").mkdir(parents=True)
        return {"DOCKER_CONFIG": str(tmp_path)}

    return write


@pytest.mark.parametrize("host", ["unix:///home/u/.docker/desktop/docker.sock", "tcp://x:2375"])
def test_the_context_of_docker_is_where_its_engine_is(contexts, host):
    environment = contexts(host)
    assert addresses("docker", environment) == [host]
    assert addresses("docker", {**environment, "DOCKER_HOST": "unix:///d"}) == ["unix:///d"]
    assert len(addresses("docker", {**environment, "DOCKER_CONTEXT": "default"})) > 1
    assert host not in addresses("podman", environment)
    (config,) = Path(environment["DOCKER_CONFIG"]).glob("config.json")
    config.unlink()
    assert len(addresses("docker", environment)) > 1
    assert addresses("docker", {**environment, "DOCKER_CONTEXT": "desktop-linux"}) == [host]


@pytest.mark.parametrize(
    ("host", "tls"), [("ssh://user@x", False), ("tcp://x:2376", True), ("npipe:////./x", False)]
)
def test_a_context_that_is_not_supported_is_named(contexts, host, tls):
    with pytest.raises(CapsuleError) as refusal:
        addresses("docker", contexts(host, tls=tls))
    assert refusal.value.code == "CAP-E001"
    assert f"'desktop-linux' names {host}" in refusal.value.message
    assert "--engine bwrap" in refusal.value.fix


def test_a_context_that_does_not_exist_or_cannot_be_read_is_named(contexts, monkeypatch, tmp_path):
    environment = contexts("unix:///d")
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("DOCKER_CONTEXT", "../other")
    with pytest.raises(CapsuleError, match=r"CAP-E001 .*context '\.\./other' does not exist"):
        connect("docker")
    for text in ("{", "[]", '{"currentContext": 7}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CapsuleError, match=r"CAP-E001 .*config\.json"):
            addresses("docker", environment)


@pytest.mark.parametrize("name", ["docker", "podman"])
def test_no_engine_names_the_socket_the_cause_and_the_fix(name, nothing_answers):
    with pytest.raises(CapsuleError) as refusal:
        connect(name)
    assert (refusal.value.code, refusal.value.exit_code) == ("CAP-E001", ExitCode.NO_ENGINE)
    assert f"{nothing_answers}: no such file or directory" in refusal.value.message
    for other in ("--engine bwrap", "install bubblewrap", "--engine apptainer", "--engine process"):
        assert other in refusal.value.fix


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
