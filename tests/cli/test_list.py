"""``capsule list``: the runs of a folder as a table and as JSON."""

import json
import os

import pytest

from capsule.experiment import contract
from capsule.host.run_directory import LOCK, MEMBERS, WORK
from capsule.image.lockfile import write_lock
from tests.cli.conftest import capsule
from tests.report import runs


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def make_run(folder, name, second=0):
    """Make a run directory that was made in some second after the epoch."""
    (folder / name / WORK).mkdir(parents=True)
    write_lock(folder / name / LOCK, runs.make_lock(runs.DQN))
    os.utime(folder / name / LOCK, (second, second))
    return folder / name


def fail(directory, message):
    failure = contract.Failure(code="CAP-T302", message=message, fix="Correct it.")
    (directory / WORK / contract.FAILURE).write_bytes(failure.document())


def test_the_newest_run_is_the_first_in_both_forms(folder):
    for name, second in (("old", 100), ("new", 300), ("middle", 200)):
        make_run(folder, name, second)
    document = json.loads(capsule("list", "--json").stdout)
    assert (document["schema"], document["folder"]) == ("capsule/runs/v1", "runs")
    assert [run["path"] for run in document["runs"]] == ["runs/new", "runs/middle", "runs/old"]
    assert {run["state"] for run in document["runs"]} == {"interrupted"}
    assert document["runs"][0]["started"] == "1970-01-01T00:05:00+00:00"
    done = capsule("list")
    assert done.exit_code == 0
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == ["run", "new", "middle", "old"]
    assert done.stderr == "3 runs\n"


def test_one_run_is_counted_in_the_singular(folder):
    make_run(folder, "only")
    assert capsule("list", folder).stderr == "1 run\n"


def test_a_study_and_a_run_directory_are_folders_with_runs_too(folder):
    make_run(folder, f"study/{MEMBERS}/a.1")
    for place in (folder, folder / "study"):
        assert f"{MEMBERS}/a.1" in capsule("list", place).stdout
    done = capsule("list", folder / "study" / MEMBERS / "a.1")
    assert done.stdout.splitlines()[1].startswith("a.1 ")


def test_why_a_run_failed_is_said_below_the_table(folder):
    fail(make_run(folder, "broken"), "the program failed")
    make_run(folder, "other")
    done = capsule("list")
    assert done.exit_code == 0
    assert "the program failed" not in done.stdout
    assert done.stderr == "broken failed: CAP-T302: the program failed\n2 runs\n"
    problems = [run["problem"] for run in json.loads(capsule("list", "--json").stdout)["runs"]]
    assert sorted(problems, key=str) == ["CAP-T302: the program failed", None]


def test_a_damaged_run_does_not_hide_the_others(folder):
    (make_run(folder, "damaged") / LOCK).write_text("{}")
    make_run(folder, "whole")
    done = capsule("list")
    assert "whole" in done.stdout
    assert done.stderr.startswith("damaged damaged: CAP-L002: ")


def test_names_and_reasons_do_not_control_the_terminal(folder):
    fail(make_run(folder, "a\x1b[2Jb"), "c\x1b[2Jd")
    done = capsule("list")
    assert "\x1b" not in done.stdout + done.stderr
    assert "a\ufffd[2Jb failed: CAP-T302: c\ufffd[2Jd\n" in done.stderr


def test_words_in_brackets_are_no_markup(folder):
    make_run(folder, "[red]name")
    assert "[red]name " in capsule("list").stdout


def test_a_folder_without_runs_is_no_error(folder):
    done = capsule("list")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == (
        "runs has no runs; name the folder that 'capsule run --output' was given, by default "
        "'runs'\n"
    )
    assert json.loads(capsule("list", "--json").stdout)["runs"] == []


@pytest.mark.parametrize("name", ["missing", "file"])
def test_what_is_no_folder_is_named_with_the_remedy(folder, name):
    (folder / "file").touch()
    done = capsule("list", folder / name, "--json")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["code"]) == (2, "CAP-P105")
    assert document["message"] == f"{folder / name} is not a folder"
    assert "'capsule run --output'" in document["fix"]
