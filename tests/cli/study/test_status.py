"""``capsule study status``: what is shown of a folder, on a terminal and as JSON."""

import json
import re

import pytest

from capsule.host.errors import ExitCode
from capsule.host.run_directory import STUDY_LOCK
from capsule.study.directory import StudyDirectory
from tests.cli.study.conftest import plan, run, study
from tests.study.small_studies import locked


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


def test_members_that_never_began_are_waiting(place):
    folder = StudyDirectory.create(place / "new", locked(place / "tiny.yaml"), resume=False).path
    before = {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}
    found = json.loads(study("status", folder, "--json").stdout)
    assert found["schema"] == "capsule/study-progress/v1"
    assert {name: counts["waiting"] for name, counts in found["groups"].items()} == {
        "deterministic": 2,
        "exploration": 2,
    }
    assert found["failures"] == {}
    shown = study("status", folder).stdout
    (whole,) = (line for line in shown.splitlines() if re.search(r"\ball\b", line))
    assert re.findall(r"\d+", whole) == ["0", "0", "0", "0", "4"]
    assert {path: path.lstat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize("name", ["absent", "tiny.yaml"])
def test_what_is_no_folder_of_a_study_is_named(place, name):
    done = study("status", name, "--json")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["code"]) == (ExitCode.USAGE, "CAP-Y005")
    assert name in document["message"]


def test_an_edited_lock_is_refused(place):
    study("lock", "tiny.yaml")
    lock = (place / "tiny.study.lock.json").read_bytes()
    path = place / "studies" / "tiny" / STUDY_LOCK
    path.write_bytes(lock.replace(b'"deterministic.2"', b'"deterministic.3"'))
    done = study("status", "studies/tiny")
    assert (done.exit_code, "CAP-Y003" in done.stderr) == (ExitCode.USAGE, True)
