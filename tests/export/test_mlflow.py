"""The file store, read by MLflow."""

import pytest

from capsule.bundle.trust import TrustPolicy
from capsule.export.mlflow import export_mlflow
from capsule.export.runs import read_runs
from capsule.host.errors import CapsuleError
from tests.export.conftest import STUDY, TRAINING, logged, returns

NO_KEYS = TrustPolicy.of([])


@pytest.fixture
def client(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient  # takes longer than many modules of tests

    return lambda: MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())


def test_mlflow_reads_metrics_settings_and_tags(tmp_path, client):
    (run,) = read_runs(TRAINING, NO_KEYS)
    export_mlflow([run], tmp_path / "mlruns")
    found = client().get_run(run.id)
    assert (found.info.run_name, found.info.status) == (run.name, "FINISHED")
    assert found.info.start_time == round(1000 * run.started)
    assert found.data.params == run.parameters
    assert found.data.tags["capsule.claim_id"] == run.claims.claim_id()
    for name in ("episode_return", "loss"):
        history = client().get_metric_history(run.id, f"training/{name}")
        assert {point.step: point.value for point in history} == logged(name)
    means = client().get_metric_history(run.id, "evaluation/mean_return")
    assert {point.step: point.value for point in means} == {
        step: sum(each) / len(each) for step, each in returns().items()
    }


def test_the_members_of_a_study_are_runs_of_one_experiment(tmp_path, client):
    runs = read_runs(STUDY, NO_KEYS)
    export_mlflow(runs, tmp_path / "mlruns")
    from mlflow.entities import ViewType

    (experiment,) = client().search_experiments(view_type=ViewType.ALL)
    assert experiment.name == runs[0].lock.spec.name
    found = client().search_runs([experiment.experiment_id])
    assert sorted(each.info.run_name for each in found) == sorted(run.name for run in runs)


def test_an_existing_store_gets_further_runs_and_none_twice(tmp_path, client):
    store = tmp_path / "mlruns"
    export_mlflow(read_runs(TRAINING, NO_KEYS), store)
    export_mlflow(read_runs(STUDY, NO_KEYS), store)
    with pytest.raises(CapsuleError) as raised:
        export_mlflow(read_runs(TRAINING, NO_KEYS), store)
    assert raised.value.code == "CAP-P203"


@pytest.mark.parametrize("name", ["a/../../b", "a//b", "..", "a:b", "x" * 300])
def test_a_name_that_would_be_another_path_is_refused(name, tmp_path, program_directory):
    metrics = program_directory / "work" / "workspace" / "outputs" / "metrics.jsonl"
    metrics.write_text(f'{{"step": 1, "{name}": 2}}\n')
    with pytest.raises(CapsuleError) as raised:
        export_mlflow(read_runs(program_directory, NO_KEYS), tmp_path / "mlruns")
    assert raised.value.code == "CAP-P204"


def test_metrics_below_the_name_of_another_are_refused(tmp_path, program_directory):
    metrics = program_directory / "work" / "workspace" / "outputs" / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 2, "loss/critic": 3}\n')
    with pytest.raises(CapsuleError, match="'training/loss', because others are below") as raised:
        export_mlflow(read_runs(program_directory, NO_KEYS), tmp_path / "mlruns")
    assert raised.value.code == "CAP-P204"


def test_an_error_leaves_no_run_at_all(tmp_path, program_directory):
    runs = read_runs(TRAINING, NO_KEYS)
    metrics = program_directory / "work" / "workspace" / "outputs" / "metrics.jsonl"
    metrics.write_text('{"step": 1, "a:b": 2}\n')
    with pytest.raises(CapsuleError, match="CAP-P204"):
        export_mlflow([*runs, *read_runs(program_directory, NO_KEYS)], tmp_path / "mlruns")
    assert list((tmp_path / "mlruns").iterdir()) == []


def test_an_interrupted_run_is_not_shown_as_finished(tmp_path, client, program_directory):
    (run,) = read_runs(program_directory, NO_KEYS)
    export_mlflow([run], tmp_path / "mlruns")
    assert client().get_run(run.id).info.status == "KILLED"
