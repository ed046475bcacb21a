"""``capsule study run``: members, failures, and options that are checked first."""

import json
import re

import pytest

from capsule.bundle.keys import ENCRYPTED
from capsule.host.errors import ExitCode
from capsule.host.run_directory import MEMBERS
from capsule.study import running
from tests.cli.conftest import capsule
from tests.cli.study.conftest import plan, run, study


@pytest.mark.slow
def test_run_brings_every_member_to_its_bundle(place):
    done = run()
    assert done.exit_code == 0
    assert done.stderr == "next: capsule study report studies/tiny\n"
    assert "all" in done.stdout
    assert run().exit_code == ExitCode.USAGE
    assert json.loads(run("--resume", "--json").stdout)["groups"]["exploration"]["done"] == 2


@pytest.mark.slow
def test_run_prints_a_line_when_a_member_begins_or_ends(place):
    plan(place, deterministic_1="refused")
    done = study("run", "tiny.yaml", "--key", "alice")
    # Whether a member is seen while it runs depends on how long it runs.
    failed = [line for line in done.stderr.splitlines() if " failed: " in line]
    assert [line.split(": ")[:2] for line in failed] == [["  deterministic.1 failed", "CAP-E007"]]
    ends = re.findall(r"^  (\S+) is done \((.*)\)$", done.stderr, re.MULTILINE)
    assert {name for name, _ in ends} == {"deterministic.2", "exploration.1", "exploration.2"}
    assert [count for _, count in ends] == [f"{n} of 4 members" for n in (1, 2, 3)]


@pytest.mark.slow
def test_run_ends_with_status_6_if_a_member_fails(place):
    plan(place, deterministic_1="refused", exploration_2="killed")
    done = run("--on", "local:1", "--json")
    assert done.exit_code == ExitCode.TRAINING_FAILED == 6
    found = json.loads(done.stdout)
    assert found["groups"]["deterministic"]["done"] == 1
    assert found["groups"]["exploration"]["done"] == 1
    assert found["failures"]["deterministic.1"]["code"] == "CAP-E007"
    assert (
        "CAP-Y012: 2 of 4 members failed, were stopped or did not begin; the first is"
        in done.stderr
    )
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
        (["--output", "/proc/tiny"], "CAP-X004"),
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


def test_an_interrupted_study_says_how_it_continues(place, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "wait", interrupt)
    done = run()
    assert done.exit_code == ExitCode.INTERRUPTED
    assert done.stderr == (
        "next: the same command with --resume continues the study\ninterrupted\n"
    )
