"""'capsule run', as far as it comes without an engine."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from capsule import execution
from capsule.bundle.keys import generate
from capsule.cli import run
from capsule.engine import select
from capsule.engine.supervise import exclusive
from capsule.entropy.report import REPORT
from capsule.experiment.contract import ENDED, ENTROPY_STARTS, LEDGER, RESULT
from capsule.experiment.spec import MAX_MEBIBYTES
from capsule.host.errors import CapsuleError
from capsule.host.run_directory import FINGERPRINT, LOCK, WORK, started
from capsule.image.lockfile import read_lock, write_lock
from capsule.machine.fingerprint import take_fingerprint
from tests.cli.conftest import SMALL, capsule
from tests.verification.runs import make_lock

PROGRAM = {"name": "program", "trainer": {"command": ["true"], "outputs": ["one"]}}


@pytest.fixture
def directory(tmp_path):
    directory = tmp_path / "run"
    (directory / WORK).mkdir(parents=True)
    write_lock(directory / LOCK, make_lock(PROGRAM))
    return directory


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


@pytest.mark.parametrize("outputs", ["[other]", "[one]"])
def test_the_outputs_of_a_finished_run_are_not_chosen_anew(directory, outputs):
    """They were listed by the choice in the lock, and are not listed again."""
    (directory / WORK / RESULT).touch()
    before, words = (directory / LOCK).read_bytes(), [f"trainer.outputs={outputs}"]
    asked = (directory, None, words, None, None)
    if outputs == "[one]":  # as in the lock
        assert run._lock(*asked)[0] == read_lock(directory / LOCK)
    else:
        with pytest.raises(CapsuleError, match=r"CAP-S006 .* which has finished"):
            run._lock(*asked)
    assert (directory / LOCK).read_bytes() == before


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


def test_a_run_is_resumed_with_its_engine_unless_another_is_named(directory):
    assert run._engine("auto", None) == run._engine("auto", directory) == "auto"
    began_in(directory, "process")
    assert run._engine("auto", directory) == "process"
    assert run._engine("bwrap", directory) == "bwrap"
    began_in(directory, "an engine of a later version")
    assert run._engine("auto", directory) == "auto"


@pytest.mark.parametrize(
    ("began", "chosen", "opened"),
    [
        (None, "docker", []),
        ("process", "bwrap", []),
        ("docker", "docker", []),
        ("docker", "bwrap", ["docker"]),
        ("podman", "docker", ["podman"]),
    ],
)
def test_containers_of_the_engine_with_which_a_run_began_are_removed(
    directory, monkeypatch, began, chosen, opened
):
    """Opening an engine removes what killed Capsules left there (tests/engine/test_containers)."""
    calls = []
    monkeypatch.setattr(select, "open_engine", lambda name, **_: calls.append(name))
    if began is not None:
        began_in(directory, began)
    run._remove_containers(directory, SimpleNamespace(name=chosen), pytest.fail)
    run._remove_containers(None, SimpleNamespace(name=chosen), pytest.fail)
    assert calls == opened


@pytest.mark.parametrize("code", ["CAP-E001", "CAP-E006"])
def test_a_run_is_resumed_where_the_engine_with_which_it_began_is_missing(
    directory, monkeypatch, code
):
    def missing(name, **_):
        raise CapsuleError(code, f"{name} does not answer", fix="Start it.")

    notes = []
    monkeypatch.setattr(select, "open_engine", missing)
    began_in(directory, "docker")
    asked = (directory, SimpleNamespace(name="bwrap"), notes.append)
    if code == "CAP-E001":
        run._remove_containers(*asked)
        (note,) = notes
        assert note.startswith("the run began with docker, which does not answer; if a container")
    else:  # it answered before, so that its containers may be running
        with pytest.raises(CapsuleError, match=code):
            run._remove_containers(*asked)


def test_a_run_that_has_finished_keeps_the_fingerprint_with_which_it_ended(directory):
    here = take_fingerprint({"name": "docker", "version": "2"}, directory)
    assert run._kept(directory, here) == here
    began = began_in(directory, "docker")
    assert run._kept(directory, here) == here  # it continues here
    began_in(directory, "docker")
    (directory / WORK / LEDGER).touch()
    assert run._kept(directory, here) == began != here


@pytest.mark.parametrize("name", [ENDED, RESULT])
def test_a_run_that_is_only_to_be_listed_keeps_the_fingerprint_with_which_it_ended(directory, name):
    here = take_fingerprint({"name": "docker", "version": "2"}, directory)
    began = began_in(directory, "docker")
    start = directory / WORK / ENTROPY_STARTS / "start-0001"
    start.mkdir(parents=True)
    (start / REPORT).touch()
    (directory / WORK / name).touch()
    assert run._kept(directory, here) == began != here
    (start / REPORT).unlink()  # its launcher was killed, so it continues here
    assert run._kept(directory, here) == here


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


def test_a_copy_of_a_run_directory_began_when_its_original_did(directory, tmp_path):
    os.utime(directory / LOCK, (10**9, 10**9))
    here = take_fingerprint({"name": "docker", "version": "2"}, directory)
    for name in ("copy", "copy of the copy"):
        run._kept(directory, here)
        directory = Path(shutil.copytree(directory, tmp_path / name, copy_function=shutil.copy))
        assert (directory / LOCK).stat().st_mtime > 10**9
        assert started(directory).timestamp() == 10**9


def test_the_fingerprint_of_a_run_that_another_process_executes_is_kept(directory):
    began_in(directory, "bwrap")
    before = (directory / FINGERPRINT).read_bytes()
    here = take_fingerprint({"name": "docker", "version": "2"}, directory)
    with exclusive(directory / WORK), pytest.raises(CapsuleError, match="CAP-E008"):
        run._kept(directory, here)
    assert (directory / FINGERPRINT).read_bytes() == before
    assert run._kept(directory, here) == here


def test_run_refuses_an_unusable_key_before_it_does_anything(tmp_path):
    key = tmp_path / "key"
    key.write_text("no key")
    key.chmod(0o600)
    done = capsule("run", SMALL, "--key", key, "--output", tmp_path / "runs")
    assert done.exit_code == 2
    assert "CAP-B132" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_public_key_does_not_sign(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert capsule("keygen", "alice").exit_code == 0
    done = capsule("run", SMALL, "--key", "alice.pub")
    assert done.exit_code == 2
    assert "alice.pub is a public key" in done.stderr


def test_run_tries_the_ssh_key_before_it_does_anything(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert capsule("keygen", "alice").exit_code == 0
    options = ("--key", "alice", "--ssh-key", "missing", "--output", "runs")
    done = capsule("run", SMALL, *options)
    assert done.exit_code == 2
    assert "CAP-B156" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_an_option_that_a_plain_process_ignores_is_rejected(tmp_path):
    generate(tmp_path / "alice")
    words = ["--key", tmp_path / "alice", "--output", tmp_path / "runs", "--engine", "process"]
    done = capsule("run", SMALL, *words, "--embed-image")
    assert (done.exit_code, done.stderr.partition(":")[0]) == (2, "CAP-X005")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "code"), [(["--embed-data"], "CAP-X005"), (["--data", "mnist=/"], "CAP-E045")]
)
def test_an_option_for_data_sets_that_the_spec_does_not_have_is_rejected(tmp_path, words, code):
    generate(tmp_path / "alice")
    done = capsule("run", SMALL, "--key", tmp_path / "alice", "-o", tmp_path / "runs", *words)
    assert (done.exit_code, done.stderr.partition(":")[0]) == (2, code)
    assert not (tmp_path / "runs").exists()


def test_a_place_of_metrics_that_cannot_be_written_is_found_before_anything_is_made(tmp_path):
    generate(tmp_path / "alice")
    (tmp_path / "metrics.csv").write_text("other,columns\n")
    words = ["--key", tmp_path / "alice", "--output", tmp_path / "runs", "--engine", "process"]
    for place in ("metrics.csv", "metrics.csv/file"):
        done = capsule("run", SMALL, *words, "--metrics", f"csv:{tmp_path / place}")
        assert (done.exit_code, done.stderr.partition(":")[0]) == (2, "CAP-P206")
    assert not (tmp_path / "runs").exists()


def test_a_bundle_without_an_image_is_verified_without_a_container():
    assert run._where(SimpleNamespace(image=None)) == " --engine process"
    assert run._where(SimpleNamespace(image="sha256:…")) == ""


def test_a_file_in_the_place_of_the_folder_of_runs_is_found_before_anything_is_made(tmp_path):
    generate(tmp_path / "alice")
    (tmp_path / "runs").touch()
    words = ["--key", tmp_path / "alice", "--output", tmp_path / "runs", "--engine", "process"]
    done = capsule("run", SMALL, *words)
    assert done.exit_code == 2
    assert f"CAP-X004: the output '{tmp_path / 'runs'}' cannot be written" in done.stderr


def test_what_the_machine_lacks_is_found_before_a_run_directory_is_made(tmp_path):
    generate(tmp_path / "alice")
    lock = tmp_path / "large.lock.json"
    write_lock(lock, make_lock({**PROGRAM, "limits": {"memory_mb": MAX_MEBIBYTES}}))
    words = ["--key", tmp_path / "alice", "--output", tmp_path / "runs", "--engine", "process"]
    done = capsule("run", lock, *words)
    assert done.exit_code == 4
    assert "CAP-M005" in done.stderr
    assert not (tmp_path / "runs").exists()
