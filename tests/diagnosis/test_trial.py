"""Trying settings: two more runs, and a spec that is changed only if they were equal."""

import pytest

from capsule.diagnosis.diagnose import Diagnosis, OperatorCensus
from capsule.diagnosis.findings import finding
from capsule.diagnosis.trial import Trial, Workplace, apply_if_cured, try_settings
from capsule.experiment.spec import SourcesSpec
from capsule.host.spec_file import load_spec
from capsule.report.progress import SilentReporter
from tests.diagnosis.conftest import PROGRAM, SYSTEM_CLOCK, LocalEngine, locked, parsed

# An archive's dates are even seconds.
ZIP = """\
import time, zipfile
time.sleep(2)
with zipfile.ZipFile("model.zip", "w") as archive:
    archive.writestr("policy", b"equal")
"""


class Local:
    """A workplace whose engine needs no image."""

    def __init__(self, tmp_path, program):
        self.project = tmp_path / "project"
        self.project.mkdir()
        (self.project / "train.py").write_text(program)
        self.spec = tmp_path / "capsule.yaml"
        engine = LocalEngine(tmp_path, self.project, torch=False)
        self.place = Workplace(engine, None, SourcesSpec(), 64, SilentReporter())

    def cure(self, tmp_path, **sections):
        spec = parsed(PROGRAM, **sections)
        self.spec.write_text(spec.model_dump_json(by_alias=True, exclude_unset=True))
        lock = locked(spec, self.project)
        diagnosis = self.place.diagnose(lock, tmp_path / "runs")
        assert not diagnosis.equal
        trial = try_settings(lock, diagnosis, self.place, tmp_path / "runs")
        return None if trial is None else apply_if_cured(trial, self.spec)


@pytest.fixture
def local(tmp_path, monkeypatch):
    monkeypatch.setattr("capsule.execution.prepare", lambda *_arguments, **_options: None)
    return lambda program: Local(tmp_path, program)


@pytest.mark.slow
def test_a_setting_is_written_once_two_runs_with_it_were_equal(local, tmp_path):
    place = local(ZIP)
    trial = place.cure(tmp_path, **SYSTEM_CLOCK)
    assert trial.applied
    assert trial.diagnosis.equal
    assert trial.settings == {"entropy.clock": "virtual"}
    assert '"virtual"' in place.spec.read_text()


@pytest.mark.slow
def test_a_setting_that_does_not_help_is_not_written(local, tmp_path):
    place = local("import time\nprint(time.time(), time.monotonic())\n")
    trial = place.cure(tmp_path, **SYSTEM_CLOCK)
    assert not trial.applied
    assert not trial.diagnosis.equal
    assert '"virtual"' not in place.spec.read_text()


@pytest.mark.slow
def test_nothing_is_tried_where_no_setting_is_proposed(local, tmp_path):
    assert local("import time\nprint(time.monotonic())\n").cure(tmp_path) is None


# --- trials of diagnoses that were made by hand -------------------------------------------------

CURE = {"entropy.clock": "virtual"}


def diagnosis(*findings, equal=False):
    census = OperatorCensus(calls=0, repeated=0, differing=0, statuses={})
    return Diagnosis(name="own", steps=None, equal=equal, operators=census, findings=findings)


class Place:
    """Gives one diagnosis, and notes the lock and the folder that it was made for."""

    def __init__(self, result):
        self.result, self.asked = result, []

    def diagnose(self, lock, directory):
        self.asked.append((lock, directory))
        return self.result


@pytest.fixture
def lock(tmp_path):
    return locked(parsed(PROGRAM, **SYSTEM_CLOCK), tmp_path)


def test_two_runs_of_the_lock_with_the_proposed_settings_are_the_trial(lock, tmp_path):
    place = Place(diagnosis(equal=True))
    trial = try_settings(lock, diagnosis(finding("CAP-D108", "")), place, tmp_path / "runs")
    ((tried, directory),) = place.asked
    assert tried.spec.entropy.clock == "virtual"
    assert tried.model_copy(update={"spec": lock.spec}) == lock
    assert directory == tmp_path / "runs" / "trial"
    assert trial == Trial(settings=CURE, diagnosis=place.result, applied=False)
    assert lock.spec.entropy.clock == "system"


@pytest.mark.parametrize(
    "findings",
    [
        [],
        [finding("CAP-D107", "")],  # no setting helps
        [finding("CAP-D302", "", level="note")],  # asks for nothing
        [finding("CAP-D108", "").model_copy(update={"patch": {"recording.trace_interval": 8}})],
    ],
    ids=["no finding", "no setting", "a note", "a setting that the spec cannot have"],
)
def test_nothing_is_run_without_a_setting_to_try(lock, tmp_path, findings):
    place = Place(diagnosis(equal=True))
    assert try_settings(lock, diagnosis(*findings), place, tmp_path) is None
    assert place.asked == []


def written(folder, lock):
    path = folder / "spec.yaml"
    path.write_text(lock.spec.model_dump_json(by_alias=True, exclude_unset=True))
    return path


def test_equal_runs_change_the_spec(lock, tmp_path):
    spec = written(tmp_path, lock)
    trial = Trial(settings=CURE, diagnosis=diagnosis(equal=True), applied=False)
    applied = apply_if_cured(trial, spec)
    assert applied == Trial(settings=CURE, diagnosis=trial.diagnosis, applied=True)
    assert load_spec(spec).entropy.clock == "virtual"


def test_runs_that_still_differ_leave_the_spec_as_it_was(lock, tmp_path):
    spec = written(tmp_path, lock)
    before = spec.read_bytes()
    trial = Trial(settings=CURE, diagnosis=diagnosis(), applied=False)
    assert apply_if_cured(trial, spec) == trial
    assert spec.read_bytes() == before


def test_a_trial_is_read_back_from_json():
    trial = Trial(
        settings={"a": True, "b": 1, "c": "x"},
        diagnosis=diagnosis(finding("CAP-D108", "m")),
        applied=True,
    )
    again = Trial.model_validate_json(trial.model_dump_json(by_alias=True))
    assert again == trial
    assert [type(value) for value in again.settings.values()] == [bool, int, str]
