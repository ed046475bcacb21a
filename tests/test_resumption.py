"""What is kept of a run in its directory, and what may have changed when it is resumed."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from capsule import execution, resumption
from capsule.bundle.keys import generate
from capsule.engine.supervise import exclusive
from capsule.entropy.report import REPORT
from capsule.experiment.contract import ENDED, ENTROPY_STARTS, LEDGER, RESULT
from capsule.experiment.spec import MAX_MEBIBYTES
from capsule.host.errors import CapsuleError
from capsule.host.run_directory import FINGERPRINT, LOCK, WORK, started
from capsule.image.lockfile import read_lock, write_lock
from capsule.machine.fingerprint import take_fingerprint
from capsule.report.runs import read_run
from capsule.resumption import keep_fingerprint, lock_to_resume, reopen_engine
from tests.cli.conftest import capsule
from tests.verification.runs import make_lock

PROGRAM = {"name": "program", "trainer": {"command": ["true"], "outputs": ["one"]}}


@pytest.fixture
def directory(tmp_path):
    directory = tmp_path / "run"
    (directory / WORK).mkdir(parents=True)
    write_lock(directory / LOCK, make_lock(PROGRAM))
    return directory


@pytest.fixture
def opened(monkeypatch):
    """The engines that were opened; Docker answers where any engine may be chosen."""
    names = []

    def open_engine(name, **_):
        names.append(name)
        return SimpleNamespace(name="docker" if name == "auto" else name)

    monkeypatch.setattr(resumption, "open_engine", open_engine)
    return names


def test_a_run_that_another_process_executes_is_not_resumed(directory, tmp_path):
    generate(tmp_path / "alice")
    words = ["run", "--resume", directory, "--key", tmp_path / "alice", "--engine", "process"]
    words += ["--set", "trainer.outputs=[other]", "--metrics", f"csv:{tmp_path}/metrics.csv"]
    before = (directory / LOCK).read_bytes()
    with exclusive(directory / WORK):
        done = capsule(*words)
    assert done.exit_code == 2
    assert "CAP-E008: another Capsule process is running" in done.output
    assert (directory / LOCK).read_bytes() == before
    assert not (tmp_path / "metrics.csv").exists()


def began_in(directory, engine):
    fingerprint = take_fingerprint({"name": engine, "version": "1"}, directory)
    (directory / FINGERPRINT).write_bytes(fingerprint.document())
    return fingerprint


def test_a_run_that_began_in_a_container_is_not_resumed_without_one(directory, tmp_path):
    generate(tmp_path / "alice")
    began_in(directory, "podman")
    before = (directory / FINGERPRINT).read_bytes()
    words = ["--resume", directory, "--key", tmp_path / "alice"]
    done = capsule("run", *words, "--engine", "process")
    assert done.exit_code == 2
    assert "CAP-E050" in done.output
    assert "Add --engine podman." in done.output
    assert (directory / FINGERPRINT).read_bytes() == before


def test_a_run_that_has_ended_needs_nothing_of_this_machine(directory, tmp_path, monkeypatch):
    def listed(_lock, engine, _directory, *_, **__):
        raise CapsuleError("CAP-E012", f"listed with {engine.name}", fix="-")

    generate(tmp_path / "alice")
    write_lock(directory / LOCK, make_lock({**PROGRAM, "limits": {"memory_mb": MAX_MEBIBYTES}}))
    began_in(directory, "process")
    prepared = []
    monkeypatch.setattr(execution, "prepare", lambda *_, **facts: prepared.append(facts["to_run"]))
    monkeypatch.setattr(execution, "execute", listed)
    words = ["run", "--resume", directory, "--key", tmp_path / "alice"]
    assert "CAP-M005" in capsule(*words).stderr
    start = directory / WORK / ENTROPY_STARTS / "start-0001"
    start.mkdir(parents=True)
    for path in (start / REPORT, directory / WORK / ENDED):
        path.touch()
    assert "listed with process" in capsule(*words).stderr
    assert prepared == [False]


def test_a_run_that_is_packed_is_not_an_interrupted_one(directory, tmp_path, monkeypatch):
    def packed(*_, **__):
        states.append(read_run(directory).state)
        assert "CAP-E008" in capsule(*words).stderr
        raise CapsuleError("CAP-E012", "packed", fix="-")

    generate(tmp_path / "alice")
    words = ["run", "--resume", directory, "--key", tmp_path / "alice", "--engine", "process"]
    states = []
    for name in ("prepare", "execute"):
        monkeypatch.setattr(execution, name, lambda *_, **__: None)
    monkeypatch.setattr("capsule.bundle.packing.pack_run", packed)
    assert "packed" in capsule(*words).stderr
    assert states == ["running"]


@pytest.mark.parametrize("outputs", ["[other]", "[one]"])
def test_the_outputs_of_a_finished_run_are_not_chosen_anew(directory, outputs):
    """They were listed by the choice in the lock, and are not listed again."""
    (directory / WORK / RESULT).touch()
    before, words = (directory / LOCK).read_bytes(), [f"trainer.outputs={outputs}"]
    if outputs == "[one]":  # as in the lock
        assert lock_to_resume(directory, words) == read_lock(directory / LOCK)
    else:
        with pytest.raises(CapsuleError, match=r"CAP-S006 .* which has finished"):
            lock_to_resume(directory, words)
    assert (directory / LOCK).read_bytes() == before


@pytest.mark.parametrize(
    ("began", "wanted", "expected"),
    [
        (None, "auto", "auto"),
        ("process", "auto", "process"),
        ("process", "bwrap", "bwrap"),
        ("an engine of a later version", "auto", "auto"),
    ],
)
def test_a_run_is_resumed_with_its_engine_unless_another_is_named(
    directory, opened, began, wanted, expected
):
    if began is not None:
        began_in(directory, began)
    reopen_engine(directory, wanted, pytest.fail)
    assert opened == [expected]


@pytest.mark.parametrize(
    ("began", "chosen", "others"),
    [
        (None, "docker", []),
        ("process", "bwrap", []),
        ("docker", "docker", []),
        ("docker", "bwrap", ["docker"]),
        ("podman", "docker", ["podman"]),
    ],
)
def test_containers_of_the_engine_with_which_a_run_began_are_removed(
    directory, opened, began, chosen, others
):
    """Opening an engine removes what killed Capsules left there (tests/engine/test_containers)."""
    if began is not None:
        began_in(directory, began)
    assert reopen_engine(directory, chosen, pytest.fail).name == chosen
    assert opened == [chosen, *others]


@pytest.mark.parametrize("code", ["CAP-E001", "CAP-E006"])
def test_a_run_is_resumed_where_the_engine_with_which_it_began_is_missing(
    directory, monkeypatch, code
):
    def open_engine(name, **_):
        if name == "docker":
            raise CapsuleError(code, f"{name} does not answer", fix="Start it.")
        return SimpleNamespace(name=name)

    notes = []
    monkeypatch.setattr(resumption, "open_engine", open_engine)
    began_in(directory, "docker")
    if code == "CAP-E001":
        reopen_engine(directory, "bwrap", notes.append)
        (note,) = notes
        assert note.startswith("the run began with docker, which does not answer; if a container")
    else:  # it answered before, so that its containers may be running
        with pytest.raises(CapsuleError, match=code):
            reopen_engine(directory, "bwrap", notes.append)


def test_a_run_that_has_finished_keeps_the_fingerprint_with_which_it_ended(directory):
    here = take_fingerprint({"name": "docker", "version": "2"}, directory)
    assert keep_fingerprint(directory, here) == here
    began = began_in(directory, "docker")
    assert keep_fingerprint(directory, here) == here  # it continues here
    began_in(directory, "docker")
    (directory / WORK / LEDGER).touch()
    assert keep_fingerprint(directory, here) == began != here


@pytest.mark.parametrize("name", [ENDED, RESULT])
def test_a_run_that_is_only_to_be_listed_keeps_the_fingerprint_with_which_it_ended(directory, name):
    here = take_fingerprint({"name": "docker", "version": "2"}, directory)
    began = began_in(directory, "docker")
    start = directory / WORK / ENTROPY_STARTS / "start-0001"
    start.mkdir(parents=True)
    (start / REPORT).touch()
    (directory / WORK / name).touch()
    assert keep_fingerprint(directory, here) == began != here
    (start / REPORT).unlink()  # its launcher was killed, so it continues here
    assert keep_fingerprint(directory, here) == here


def test_a_copy_of_a_run_directory_began_when_its_original_did(directory, tmp_path):
    os.utime(directory / LOCK, (10**9, 10**9))
    here = take_fingerprint({"name": "docker", "version": "2"}, directory)
    for name in ("copy", "copy of the copy"):
        keep_fingerprint(directory, here)
        directory = Path(shutil.copytree(directory, tmp_path / name, copy_function=shutil.copy))
        assert (directory / LOCK).stat().st_mtime > 10**9
        assert started(directory).timestamp() == 10**9


def test_the_fingerprint_of_a_run_that_another_process_executes_is_kept(directory):
    began_in(directory, "bwrap")
    before = (directory / FINGERPRINT).read_bytes()
    here = take_fingerprint({"name": "docker", "version": "2"}, directory)
    with exclusive(directory / WORK), pytest.raises(CapsuleError, match="CAP-E008"):
        keep_fingerprint(directory, here)
    assert (directory / FINGERPRINT).read_bytes() == before
    assert keep_fingerprint(directory, here) == here
