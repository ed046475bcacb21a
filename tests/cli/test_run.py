"""'capsule run', as far as it comes without an engine."""

import pytest

from capsule.bundle.keys import generate
from capsule.experiment.spec import MAX_MEBIBYTES
from capsule.image.lockfile import write_lock
from tests.cli.conftest import SMALL, capsule
from tests.verification.runs import make_lock

PROGRAM = {"name": "program", "trainer": {"command": ["true"], "outputs": ["one"]}}


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
