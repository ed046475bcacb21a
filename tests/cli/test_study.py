"""``capsule study`` on the command line, with runs that are not executed."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from capsule.bundle.keys import ENCRYPTED
from capsule.cli.main import app
from capsule.host.errors import CapsuleError, ExitCode
from capsule.host.run_directory import MEMBERS, STUDY_LOCK
from capsule.image import lockfile
from tests.study.conftest import end_as_planned
from tests.study.small_studies import BASE, STUDY, Resolutions, write


@pytest.fixture
def resolutions(monkeypatch):
    found = Resolutions(monkeypatch)
    monkeypatch.setattr(lockfile, "resolve", found.resolve)
    return found


@pytest.fixture
def place(tmp_path, monkeypatch, resolutions):
    """A folder with a study and a key, in which members end at once."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    assert capsule("keygen", "alice").exit_code == 0
    monkeypatch.setattr("sys.executable", end_as_planned(tmp_path / "python"))
    plan(tmp_path)
    return tmp_path


def capsule(*words):
    return CliRunner().invoke(app, [*map(str, words)])


def study(command, *words):
    done = capsule("study", command, *words)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def run(*words):
    return study("run", "tiny.yaml", "--key", "alice", "--quiet", *words)


def plan(folder, **words):
    members = folder / "studies" / "tiny" / MEMBERS
    members.mkdir(parents=True, exist_ok=True)
    text = json.dumps({name.replace("_", "."): word for name, word in words.items()})
    (members / "plan").write_text(text)


def test_lock_writes_its_lock_and_no_other(place):
    done = study("lock", "tiny.yaml", "--json")
    found = json.loads(done.stdout)
    assert set(found["members"]) == {
        *("deterministic.1", "deterministic.2", "exploration.1", "exploration.2")
    }
    assert done.stderr == "  wrote tiny.study.lock.json\n"
    assert not (place / "cart.lock.json").exists()
    written = (place / "tiny.study.lock.json").read_bytes()
    again = study("lock", "tiny.yaml")
    assert again.stderr == ""
    assert again.stdout == (
        f"lock      sha256:{found['lock']}\n"
        "members   4 in 2 groups\nlocks     3 different\nimages    1\n"
    )
    assert (place / "tiny.study.lock.json").read_bytes() == written


@pytest.mark.slow
def test_the_lock_of_the_base_is_kept(place):
    capsule("lock", "cart.yaml")
    written = (place / "cart.lock.json").read_bytes()
    study("lock", "tiny.yaml")
    assert run().exit_code == 0
    assert (place / "cart.lock.json").read_bytes() == written


def test_refresh_resolves_again(place, resolutions):
    capsule("lock", "cart.yaml")
    study("lock", "tiny.yaml")
    assert len(resolutions.made) == 1
    study("lock", "tiny.yaml", "--refresh")
    assert len(resolutions.made) == 2


def test_an_edited_lock_is_not_overwritten(place):
    study("lock", "tiny.yaml")
    path = place / "tiny.study.lock.json"
    path.write_bytes(
        edited := path.read_bytes().replace(b'"deterministic.2"', b'"deterministic.3"')
    )
    done = run()
    assert (done.exit_code, "CAP-Y003" in done.stderr) == (ExitCode.USAGE, True)
    assert path.read_bytes() == edited


@pytest.mark.slow
def test_a_setting_of_one_command_changes_no_lock_file_and_lock_says_so(place):
    done = capsule("lock", "cart.yaml", "--set", "seeds.root=7")
    assert done.stderr == "  cart.lock.json was not written: --set applies to this command alone\n"
    assert not (place / "cart.lock.json").exists()
    done = capsule("lock", "cart.yaml")
    assert done.stderr == "  wrote cart.lock.json\n"
    written = (place / "cart.lock.json").read_bytes()
    done = capsule("lock", "cart.yaml", "--set", "seeds.root=7", "--json")
    assert "was not written" in done.stderr
    assert json.loads(done.stdout)["schema"] == "capsule/locked/v1"
    assert capsule("lock", "cart.yaml", "--set", "seeds.root=7", "--quiet").stderr == ""
    assert (place / "cart.lock.json").read_bytes() == written


@pytest.mark.parametrize(
    "command", [["build"], ["run", "--key", "alice"]], ids=lambda each: each[0]
)
def test_run_and_build_write_no_lock_file_for_a_setting(place, monkeypatch, command):
    def unprepared(lock, *_, **__):
        assert lock.spec.seeds.root == 7
        raise CapsuleError("CAP-E013", "not in this test", fix="None.")

    capsule("lock", "cart.yaml")
    written = (place / "cart.lock.json").read_bytes()
    monkeypatch.setattr("capsule.execution.prepare", unprepared)
    name, *rest = command
    done = capsule(name, "cart.yaml", "--set", "seeds.root=7", "--engine", "process", *rest)
    assert "not in this test" in done.stderr
    assert (place / "cart.lock.json").read_bytes() == written


@pytest.mark.slow
def test_run_brings_every_member_to_its_bundle(place):
    done = run()
    assert done.exit_code == 0
    assert done.stderr == "next: capsule study report studies/tiny\n"
    assert "all" in done.stdout
    assert run().exit_code == ExitCode.USAGE
    assert json.loads(run("--resume", "--json").stdout)["groups"]["exploration"]["done"] == 2


@pytest.mark.slow
def test_run_ends_with_status_6_if_a_member_fails(place):
    plan(place, deterministic_1="refused", exploration_2="killed")
    done = run("--on", "local:1", "--json")
    assert done.exit_code == ExitCode.TRAINING_FAILED == 6
    found = json.loads(done.stdout)
    assert found["groups"]["deterministic"]["done"] == 1
    assert found["groups"]["exploration"]["done"] == 1
    assert found["failures"]["deterministic.1"]["code"] == "CAP-E007"
    assert "CAP-Y012: 2 of 4 members failed or were stopped; the first is" in done.stderr
    plan(place)
    done = run("--resume")
    assert (done.exit_code, done.stderr) == (0, "next: capsule study report studies/tiny\n")


@pytest.mark.slow
def test_run_of_one_group_does_not_fail_for_another(place):
    plan(place, deterministic_1="refused")
    assert run().exit_code == ExitCode.TRAINING_FAILED
    assert run("--resume", "--only", "exploration").exit_code == 0
    done = run("--resume", "--only", "deterministic")
    assert done.exit_code == ExitCode.TRAINING_FAILED
    assert "1 of 2 members failed" in done.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--only", "explore"], "CAP-Y013"),
        (["--on", "nonsense"], "CAP-Y014"),
        (["--on", "local:0"], "CAP-Y014"),
        (["--output", "cart.yaml"], "CAP-Y005"),
        (["--key", "bob"], "CAP-B13"),
    ],
)
def test_run_refuses_a_wrong_option_before_it_makes_anything(place, words, code):
    done = run("--output", "new", *words)
    assert done.exit_code == ExitCode.USAGE
    assert code in done.stderr
    assert not (place / "new").exists()


def test_run_does_not_ask_for_a_passphrase_that_its_members_could_not_ask_for(place):
    (place / "passphrase").write_text("correct horse battery staple\n")
    (place / "passphrase").chmod(0o600)
    words = ["--passphrase-file", "passphrase"]
    assert capsule("keygen", "bob", *words).exit_code == 0
    done = run("--key", "bob")
    assert (done.exit_code, ENCRYPTED in done.stderr) == (ExitCode.USAGE, True)
    assert run("--key", "bob", *words).exit_code == 0
    given = json.loads((place / "studies/tiny" / MEMBERS / "exploration.1/arguments").read_text())
    assert given[-4:] == ["--passphrase-file", str(place / "passphrase"), "--json", "--quiet"]


@pytest.mark.slow
def test_member_runs_one_member(place):
    run("--only", "deterministic")
    done = study("member", "studies/tiny", "exploration.2", "--key", "alice")
    assert done.stdout.splitlines()[0] == f"claim id  {'a' * 64}"
    plan(place, exploration_1="refused")
    done = study("member", "studies/tiny", "exploration.1", "--key", "alice")
    assert (done.exit_code, "CAP-E007" in done.stderr) == (ExitCode.TRAINING_FAILED, True)
    plan(place, exploration_1="killed")
    done = study("member", "studies/tiny", "exploration.1", "--key", "alice")
    assert done.exit_code == ExitCode.INTERRUPTED
    done = study("member", "studies/tiny", "exploration.3", "--key", "alice")
    assert (done.exit_code, "CAP-Y008" in done.stderr) == (ExitCode.USAGE, True)


@pytest.mark.slow
def test_status_is_that_of_the_folder(place):
    plan(place, exploration_1="refused")
    run()
    done = study("status", "studies/tiny")
    assert done.exit_code == 0
    assert "exploration.1 failed: CAP-E007: out of memory" in done.stdout
    found = json.loads(study("status", "studies/tiny", "--json").stdout)
    assert found["groups"]["exploration"] == {
        "done": 1,
        "running": 0,
        "failed": 1,
        "stopped": 0,
        "waiting": 0,
    }
    assert found["failures"]["exploration.1"]["message"] == "out of memory"


def test_status_of_another_folder_is_refused_in_json_too(place):
    done = study("status", ".", "--json")
    assert done.exit_code == ExitCode.USAGE
    assert json.loads(done.stdout)["code"] == "CAP-Y005"
    (place / "studies" / "tiny" / STUDY_LOCK).write_text("{}")
    done = study("status", "studies/tiny")
    assert "CAP-Y003" in done.stderr


def test_starts_needs_a_study_that_has_them(place):
    done = study("starts", "tiny.yaml", "--key", "alice")
    assert (done.exit_code, "CAP-Y002" in done.stderr) == (ExitCode.USAGE, True)
    (place / "tiny.yaml").write_text(STUDY + "starts: {set: {seeds.root: 1000}}\n")
    done = study("lock", "tiny.yaml")
    assert (done.exit_code, "CAP-Y004" in done.stderr) == (ExitCode.USAGE, True)
    plan(place)
    (place / "runs").mkdir()
    (place / "runs" / "plan").write_text("{}")
    done = study("starts", "tiny.yaml", "--key", "alice")
    assert done.exit_code != 0
    assert not (place / "tiny.starts.json").exists()


def test_a_wrong_base_is_refused_with_its_line(place):
    (place / "cart.yaml").write_text(BASE.replace("total_steps", "total_step"))
    done = study("lock", "tiny.yaml")
    assert done.exit_code == ExitCode.USAGE, done.stderr
    assert (done.exit_code, "cart.yaml:4:41: trainer.total_step" in done.stderr) == (2, True)
    assert not Path("tiny.study.lock.json").exists()
