"""Choosing an engine: the one that was asked for, or the best one that answers."""

import os
import subprocess
import sys
import tempfile

import pytest

from capsule.engine import select
from capsule.engine.process import ProcessEngine
from capsule.engine.select import open_engine
from capsule.experiment.errors import CapsuleError, ExitCode
from tests.engine.conftest import Rootless


def test_auto_ends_with_a_plain_process_and_says_so(nothing_answers):
    notes = []
    assert isinstance(open_engine("auto", progress=notes.append), ProcessEngine)
    assert len(notes) == 1
    assert "no docker engine answers" in notes[0]
    assert "engine=process" in notes[0]
    assert "--engine bwrap and --engine apptainer" in notes[0]


def test_a_strangers_run_never_ends_with_a_plain_process(nothing_answers):
    notes = []
    with pytest.raises(CapsuleError, match="no docker engine answers") as refusal:
        open_engine("auto", strange=True, progress=notes.append)
    assert (refusal.value.code, refusal.value.exit_code) == ("CAP-E001", ExitCode.NO_ENGINE)
    assert "no podman engine answers" in refusal.value.message
    assert "--engine bwrap" in refusal.value.fix
    assert "--engine apptainer" in refusal.value.fix
    assert notes == []
    assert open_engine("process", strange=True, progress=notes.append).name == "process"


def test_a_chosen_engine_is_never_replaced(nothing_answers):
    for choice in ("docker", "podman"):
        with pytest.raises(CapsuleError, match="CAP-E001"):
            open_engine(choice, progress=print)
    assert open_engine("process", progress=print).describe()["name"] == "process"


@pytest.mark.engine
def test_auto_prefers_docker():
    notes = []
    engine = open_engine("auto", progress=notes.append)
    assert engine.name == "docker"
    assert notes == [f"engine: docker {engine.describe()['version']}"]


class EmptyPodman(Rootless):
    """A Podman without containers and networks."""

    containers = networks = property(lambda self: self)

    def list(self, **_filters):
        return []


@pytest.mark.parametrize("strange", [False, True])
def test_auto_takes_podman_where_docker_does_not_answer(nothing_answers, monkeypatch, strange):
    connect, asked = select.connect, []

    def only_podman(name):
        asked.append(name)
        return EmptyPodman() if name == "podman" else connect(name)

    monkeypatch.setattr(select, "connect", only_podman)
    notes = []
    assert open_engine("auto", strange=strange, progress=notes.append).name == "podman"
    assert asked == ["docker", "podman"]
    assert notes == ["engine: podman 5.4.2"]


@pytest.mark.parametrize(
    ("choice", "reason"),
    [("bwrap", "bwrap is not on the PATH"), ("apptainer", "apptainer is not on the PATH")],
)
def test_programs_are_searched_on_the_path(monkeypatch, tmp_path, choice, reason):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CapsuleError, match=reason) as refusal:
        open_engine(choice, progress=print)
    assert (refusal.value.code, refusal.value.exit_code) == ("CAP-E001", ExitCode.NO_ENGINE)


@pytest.mark.parametrize("choice", ["auto", "process", "docker", "bwrap"])
def test_no_engine_is_opened_on_another_platform(monkeypatch, choice):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(CapsuleError, match="on aarch64") as refusal:
        open_engine(choice, progress=print)
    assert refusal.value.code == "CAP-E019"


def test_folders_of_a_killed_capsule_are_removed(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import os\n"
        "from capsule.host.owner import temporary_folder\n"
        "with temporary_folder('capsule-'): os._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)})
    assert len([*tmp_path.iterdir()]) == 1
    open_engine("process", progress=print)
    assert [*tmp_path.iterdir()] == []
