"""``capsule show``: what it takes, and what it refuses with the name of another command."""

import json
import shlex
from pathlib import Path

import pytest

from capsule.host.run_directory import LOCK, STUDY_LOCK
from capsule.image.lockfile import write_lock
from capsule.study.study_bundle import pack_study
from tests.cli.conftest import capsule
from tests.command_lines import parse
from tests.hostile import genuine
from tests.report import runs
from tests.study.studies import make_lock, make_results

CORPUS = Path(__file__).parents[1] / "corpus"


@pytest.fixture
def everything(tmp_path, bundle):
    """One of each kind that can be shown, by its kind in the document."""
    run, study = tmp_path / "run", tmp_path / "study"
    run.mkdir()
    study.mkdir()
    lock, of_study = runs.make_lock(runs.DQN), make_lock().document() + b"\n"
    write_lock(run / LOCK, lock)
    write_lock(tmp_path / "cart.lock.json", lock)
    (study / STUDY_LOCK).write_bytes(of_study)
    (tmp_path / "tiny.study.lock.json").write_bytes(of_study)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("run.capsule.tar", "run-bundle"),
        ("run", "run-directory"),
        (f"run/{LOCK}", "lock"),
        ("cart.lock.json", "lock"),
        ("study", "study-lock"),
        (f"study/{STUDY_LOCK}", "study-lock"),
        ("tiny.study.lock.json", "study-lock"),
    ],
)
def test_the_kind_of_a_path_is_found(everything, name, kind):
    before = {path: path.lstat().st_mtime_ns for path in everything.rglob("*")}
    done = capsule("show", everything / name, "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["kind"] == kind
    text = capsule("show", everything / name)
    assert (text.exit_code, text.stderr) == (0, "")
    assert {path: path.lstat().st_mtime_ns for path in everything.rglob("*")} == before


def test_the_bundle_of_a_study_is_shown():
    found = json.loads(capsule("show", CORPUS / "study.capsule-study.tar", "--json").stdout)
    assert found["kind"] == "study-bundle"


def test_a_folder_and_its_lock_are_the_same_study(everything):
    first, second = (
        capsule("show", everything / name, "--json").stdout
        for name in ("study", f"study/{STUDY_LOCK}")
    )
    assert first == second


def test_a_changed_bundle_is_not_shown(bundle):
    data = bytearray(bundle.read_bytes())
    data[-3000] ^= 1
    bundle.write_bytes(data)
    done = capsule("show", bundle)
    assert done.exit_code == 3
    assert not done.stdout


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("capsule.yaml", "a spec"),
        ("capsule.yml", "a spec"),
        ("missing.yaml", "a spec"),
        ("empty", "a folder without a lock"),
    ],
)
def test_specs_and_other_folders_lead_to_the_right_command(tmp_path, name, what):
    (tmp_path / "capsule.yaml").touch()
    (tmp_path / "capsule.yml").touch()
    (tmp_path / "empty").mkdir()
    done = capsule("show", tmp_path / name, "--json")
    assert done.exit_code == 2
    document = json.loads(done.stdout)
    assert document["code"] == "CAP-P106"
    assert document["message"] == f"{tmp_path / name} is {what}"
    commands = document["fix"].split("'")[1::2]
    assert [shlex.split(command)[1] for command in commands] == ["list", "plan"]
    for command in commands:
        parse(command)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("missing.capsule.tar", "CAP-B101"),
        ("missing.lock.json", "CAP-L001"),
        ("missing.study.lock.json", "CAP-Y003"),
    ],
)
def test_what_is_missing_is_named(tmp_path, name, code):
    done = capsule("show", tmp_path / name, "--json")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["code"]) == (2, code)
    assert name in document["message"]
    assert "Delete" not in document["fix"]


def test_a_run_directory_with_a_damaged_lock_is_shown_as_damaged(tmp_path):
    (tmp_path / LOCK).write_text("{}")
    found = json.loads(capsule("show", tmp_path, "--json").stdout)
    assert found["state"] == "damaged"


def test_a_study_of_single_runs_shows_no_interval_and_counts_the_scores_left_out(tmp_path):
    groups = {f"g{number}": {"runs": 1} for number in range(9)}
    path, _ = pack_study(make_results(make_lock(groups)), genuine.SIGNER, tmp_path / "s.tar")
    text = " ".join(capsule("show", path).stdout.split())
    assert "interquartile" not in text
    assert "and 1 more score ('capsule study report' has all)" in text
