"""capsule study bundle: the command that it proposes."""

import pytest

from capsule.study import results as study_results
from tests.cli.conftest import capsule
from tests.study.corpus import finished_study


@pytest.mark.parametrize("engine", ["process", "bwrap", "docker"])
def test_the_proposed_command_runs_the_members_again(tmp_path, monkeypatch, engine):
    study = finished_study(tmp_path / "study")
    observed = study_results.RecordedRun.observations

    def elsewhere(run):
        return observed(run).model_copy(update={"engine": {"name": engine}})

    monkeypatch.setattr(study_results.RecordedRun, "observations", elsewhere)
    assert capsule("keygen", tmp_path / "alice").exit_code == 0
    done = capsule("study", "bundle", study.path, "--key", tmp_path / "alice")
    option = "" if engine == "docker" else f" --engine {engine}"
    assert done.stderr.startswith("next: capsule study verify ")
    assert done.stderr.endswith(f"alice.pub --sample 3{option}\n")


def test_the_proposed_command_names_the_bundles_that_programs_need(tmp_path):
    study = finished_study(tmp_path / "study", "study-program")
    assert capsule("keygen", tmp_path / "alice").exit_code == 0
    done = capsule("study", "bundle", study.path, "--key", tmp_path / "alice")
    assert f" --members {study.path} --engine process\n" in done.stderr
