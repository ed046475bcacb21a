"""``capsule diagnose --apply``: the diagnosis is shown even if its settings cannot be applied."""

import errno
import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from capsule.cli import diagnose
from capsule.cli.main import app
from capsule.diagnosis.diagnose import Diagnosis, OperatorCensus
from capsule.diagnosis.findings import finding
from capsule.diagnosis.trial import Workplace
from capsule.experiment.spec import SourcesSpec
from capsule.host.errors import CapsuleError, ExitCode
from tests.verification.runs import CARTPOLE, make_lock, merged

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "schemas" / "diagnosis-v1.json").read_text())
FINDING = finding("CAP-D301", "os.urandom")
SETTING = {"entropy.mode": "virtual"}
SPEC = """\
schema: capsule/spec/v1
name: mine
seeds: {root: 1}
environment: {suite: atari, game: breakout}
trainer: {algorithm: dqn}
"""


def diagnosis(*findings):
    census = OperatorCensus(calls=0, repeated=0, differing=0, statuses={})
    return Diagnosis(
        name="mine", steps=256, equal=not findings, operators=census, findings=findings
    )


def refuse(*_):
    raise PermissionError(errno.EACCES, "Permission denied")


@pytest.fixture
def apply(monkeypatch, tmp_path):
    """Diagnose a spec whose runs differ, and apply the settings where no spec can be written."""
    lock = make_lock(merged(CARTPOLE, {"entropy": {"mode": "system"}}))
    monkeypatch.setattr(diagnose, "locked", lambda *_, **__: (lock, SourcesSpec()))
    monkeypatch.setattr("capsule.engine.select.open_engine", lambda *_, **__: None)
    monkeypatch.setattr("capsule.diagnosis.apply.write_atomic", refuse)
    spec = tmp_path / "capsule.yaml"
    spec.write_text(SPEC)

    def call(*arguments, second):
        results = [diagnosis(FINDING), second]

        def next_result(*_):
            if isinstance(result := results.pop(0), CapsuleError):
                raise result
            return result

        monkeypatch.setattr(Workplace, "diagnose", next_result)
        done = CliRunner().invoke(app, ["diagnose", str(spec), "--apply", "--quiet", *arguments])
        assert spec.read_text() == SPEC
        return done

    return call


def test_the_diagnosis_is_printed_although_the_spec_cannot_be_changed(apply):
    done = apply(second=diagnosis())
    assert done.exit_code == ExitCode.USAGE
    assert done.stdout.startswith("CAP-D301  os.urandom")
    assert "--apply tries entropy.mode: virtual" in done.stdout
    assert done.stdout.endswith("capsule.yaml was not changed\n")
    assert done.stderr.startswith("CAP-D004: cannot write spec")


def test_the_document_has_the_diagnosis_the_trial_and_the_error(apply):
    done = apply("--json", second=diagnosis())
    document = json.loads(done.stdout)
    assert [item["code"] for item in document["findings"]] == ["CAP-D301"]
    assert document["trial"]["settings"] == SETTING
    assert (document["trial"]["diagnosis"]["equal"], document["trial"]["applied"]) == (True, False)
    assert document["error"]["code"] == "CAP-D004"
    Draft202012Validator(SCHEMA).validate(document)
    assert done.exit_code == document["error"]["exit_code"] == ExitCode.USAGE
    assert "CAP-D004" in done.stderr


def test_the_document_of_a_diagnosis_alone_has_the_form_of_its_schema():
    document = diagnose._document(diagnosis(FINDING), None, None)
    Draft202012Validator(SCHEMA).validate(document)
    assert (document["trial"], document["error"]) == (None, None)


def test_a_diagnosis_of_no_steps_is_rejected():
    done = CliRunner().invoke(app, ["diagnose", "capsule.yaml", "--steps", "0"])
    assert done.exit_code == ExitCode.USAGE
    assert "'--steps': Input should be greater than or equal to 1" in done.stderr


def test_the_diagnosis_is_printed_although_its_settings_could_not_be_tried(apply):
    done = apply(second=CapsuleError("CAP-E012", "the run was interrupted", fix="Run it again."))
    assert done.exit_code == ExitCode.INTERRUPTED
    assert done.stdout.startswith("CAP-D301  os.urandom")
    assert "tried " not in done.stdout
    assert "CAP-E012: the run was interrupted" in done.stderr


def test_a_place_for_the_runs_that_is_no_folder_is_found_before_them(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(diagnose, "locked", lambda *_, **__: pytest.fail("it was locked"))
    arguments = ["diagnose", "capsule.yaml", "--keep", str(tmp_path / "file"), "--json"]
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, json.loads(done.stdout)["code"]) == (ExitCode.USAGE, "CAP-X004")


@pytest.mark.parametrize("name", ["run-1", "run-2", "trial"])
def test_runs_of_an_earlier_diagnosis_are_not_taken_for_new_ones(monkeypatch, tmp_path, name):
    (tmp_path / "kept" / name).mkdir(parents=True)
    monkeypatch.setattr(diagnose, "locked", lambda *_, **__: pytest.fail("it was locked"))
    arguments = ["diagnose", "capsule.yaml", "--keep", str(tmp_path / "kept"), "--json"]
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, json.loads(done.stdout)["code"]) == (ExitCode.USAGE, "CAP-X004")
    assert f"{tmp_path}/kept/{name}" in json.loads(done.stdout)["message"]
