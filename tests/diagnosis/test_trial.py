"""Trying settings: two more runs, and a spec that is changed only if they were equal."""

import pytest

from capsule.diagnosis.trial import Workplace, apply_if_cured, try_settings
from capsule.experiment.spec import SourcesSpec
from capsule.report.progress import SilentReporter
from tests.diagnosis.conftest import PRINTED, PROGRAM, SYSTEM_CLOCK, LocalEngine, locked, parsed

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
@pytest.mark.parametrize("program", [PRINTED, ZIP], ids=["printed", "dates in an archive"])
def test_a_setting_is_written_once_two_runs_with_it_were_equal(local, tmp_path, program):
    place = local(program)
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
