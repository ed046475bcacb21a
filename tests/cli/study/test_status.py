"""``capsule study status``: what is shown of a folder, on a terminal and as JSON."""

import json

import pytest

from capsule.host.errors import ExitCode
from capsule.host.run_directory import STUDY_LOCK
from tests.cli.study.conftest import plan, run, study


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
