"""A bundle never chooses to be executed without a container, and no engine convicts it."""

from __future__ import annotations

import json
import os
import socket
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from capsule.bundle.keys import generate
from capsule.cli.main import app
from capsule.engine import connection
from capsule.engine.process import ProcessEngine
from capsule.experiment.errors import CapsuleError
from tests.hostile.genuine import (
    SIGNER,
    TRACE,
    Files,
    outside,
    packed,
    program,
    reclaim_trace,
    training,
)

BUNDLES = {
    "training": training,
    "program": program,
    "training-without-an-image": lambda: outside("training"),
    "program-without-an-image": lambda: outside("program"),
}


@pytest.fixture
def engines(monkeypatch, tmp_path):
    """Have every engine be at an address, and the plain-process engine count its preparations."""
    prepared = []

    def prepare(*_, **__):
        prepared.append("process")
        raise CapsuleError("CAP-E015", "enough seen", fix="-")

    monkeypatch.setattr(ProcessEngine, "prepare", prepare)
    monkeypatch.setenv("CAPSULE_CACHE", str(tmp_path / "cache"))
    for name in ("CAPSULE_ENGINE", "CAPSULE_VERIFY_ENGINE"):  # no variable selects an engine
        monkeypatch.setenv(name, "process")

    def work(address: str) -> list[str]:
        monkeypatch.setenv("DOCKER_HOST", address)
        monkeypatch.setenv("CONTAINER_HOST", address)
        return prepared

    return work


@pytest.fixture(params=["nothing", "silent", "full"])
def absent(request, tmp_path, monkeypatch):
    """An address at which no engine answers: no socket, a silent server, one that accepts none."""
    for limit in ("_CONNECT_SECONDS", "_ANSWER_SECONDS"):
        monkeypatch.setattr(connection, limit, 0.2)
    address = tmp_path / "engine.sock"
    with closing(socket.socket(socket.AF_UNIX)) as server:
        if request.param != "nothing":
            server.bind(str(address))
            server.listen(0 if request.param == "full" else 8)
        waiting = []
        if request.param == "full":
            for _ in range(2):
                client = socket.socket(socket.AF_UNIX)
                client.setblocking(False)
                client.connect_ex(str(address))
                waiting.append(client)
        yield f"unix://{address}"
        for client in waiting:
            client.close()


def verify(folder: Path, run, *options: str):
    (folder / "signer.pub").write_text(SIGNER.public.openssh())
    bundle = packed(run, folder / "bundle.capsule.tar")
    report = folder / "report.json"
    arguments = [bundle, "--key", folder / "signer.pub", "--quiet", "--report", report, *options]
    done = CliRunner().invoke(app, ["verify", *map(str, arguments)])
    return done, json.loads(report.read_text())


def other_streams(files: Files) -> None:
    files[TRACE] = files[TRACE].replace(b'"streams":"0', b'"streams":"1')
    reclaim_trace(files)


@pytest.mark.parametrize("name", BUNDLES)
def test_without_an_engine_nothing_is_executed_and_nothing_is_decided(
    name, absent, engines, tmp_path
):
    prepared = engines(absent)
    generate(tmp_path / "bob")
    signing = ("--sign", str(tmp_path / "bob"), "--receipt", str(tmp_path / "receipt.json"))
    done, report = verify(tmp_path, BUNDLES[name](), *signing)
    assert (done.exit_code, report["verdict"]) == (4, "inconclusive"), done.output
    assert report["error"]["code"] == ("CAP-V009" if "without" in name else "CAP-E001")
    assert "--engine process" in report["error"]["fix"]
    assert prepared == []
    assert not (tmp_path / "receipt.json").exists()


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["training", "program"])
@pytest.mark.parametrize("choice", ["auto", "docker"])
def test_a_bundle_without_an_image_does_not_choose_the_engine(kind, choice, engines, tmp_path):
    prepared = engines(connection.addresses("docker", os.environ)[0])
    done, report = verify(tmp_path, outside(kind), "--engine", choice)
    assert (done.exit_code, report["error"]["code"]) == (4, "CAP-V009"), done.output
    assert prepared == []


@pytest.mark.parametrize("kind", ["training", "program"])
def test_only_the_name_in_the_command_chooses_it(kind, engines, monkeypatch, tmp_path):
    """The twin: what the tests above refuse does happen once the user asks for it."""
    prepared = engines("unix:///nonexistent.sock")
    for name in ("fetch", "check_packages"):  # its wheels are on no index
        monkeypatch.setattr(f"capsule.execution.{name}", lambda *_, **__: None)
    options = ("--engine", "process", "--code", "supplied")
    done, report = verify(tmp_path, outside(kind), *options)
    assert prepared == ["process"]
    assert (done.exit_code, report["error"]["code"]) == (4, "CAP-E015")


@pytest.mark.slow
def test_diff_does_not_execute_a_bundle_without_a_container(engines, absent, tmp_path):
    prepared = engines(absent)
    other = packed(outside("training"), tmp_path / "other.tar", other_streams)
    options = ["--dense", str(tmp_path / "x.dense"), "--allow-untrusted", "--quiet"]
    for run in (outside("training"), training()):
        side = packed(run, tmp_path / "side.tar")
        done = CliRunner().invoke(app, ["diff", str(side), str(other), *options])
        assert (done.exit_code, "CAP-V070" in done.output) == (4, True), done.output
        assert "--engine process" in done.output
    assert prepared == []
