"""What is read of bundles, studies and run directories."""

import csv
import json
import math
import os
import sys

import pytest

from capsule.bundle.trust import TrustPolicy
from capsule.experiment.canonical import canonical_json
from capsule.export.mlflow import export_mlflow
from capsule.export.runs import _seconds, read_runs
from capsule.export.table import export_table
from capsule.export.tensorboard import export_tensorboard
from capsule.host.errors import CapsuleError
from capsule.report.subject import MAX_NAMES
from tests.export.conftest import PROGRAM, STUDY, TRAINING, content, logged, returns
from tests.report import runs

NO_KEYS = TrustPolicy.of([])


def values(run, name):
    (metric,) = [metric for metric in run.metrics if metric.name == name]
    return {point.step: point.value for point in metric.points}


def test_a_bundle_gives_what_was_logged_and_what_is_claimed():
    (run,) = read_runs(TRAINING, NO_KEYS)
    assert values(run, "training/episode_return") == logged("episode_return")
    assert values(run, "training/loss") == logged("loss")
    means = {step: math.fsum(each) / len(each) for step, each in returns().items()}
    assert values(run, "evaluation/mean_return") == pytest.approx(means, rel=1e-15)
    assert values(run, "evaluation/max_return") == {s: max(each) for s, each in returns().items()}
    assert run.name == f"dqn-{run.claims.claim_id()[:8]}"
    assert run.facts["capsule.claim_id"] == run.claims.claim_id()
    spec = json.loads(content(TRAINING, "spec/lock.json"))["spec"]
    assert run.parameters["seeds.root"] == str(spec["seeds"]["root"])
    assert run.parameters["trainer.algorithm"] == "dqn"


def test_a_study_gives_one_run_for_each_member():
    runs = read_runs(STUDY, NO_KEYS)
    lock = json.loads(content(STUDY, "study/lock.json"))
    assert [run.name for run in runs] == [member["name"] for member in lock["members"]]
    for run in runs:
        claims = json.loads(content(STUDY, f"members/{run.name}.json"))
        points = claims["evaluation"]["points"]
        assert [list(each.returns) for each in run.evaluations["evaluation/"]] == [
            [float.fromhex(value) for value in point["returns"]] for point in points
        ]
    assert len({run.id for run in runs}) == len(runs)


def test_a_program_without_a_recorder_has_no_metrics():
    (run,) = read_runs(PROGRAM, NO_KEYS)
    assert run.metrics == ()


def test_a_run_directory_gives_what_the_recorder_wrote(program_directory):
    (run,) = read_runs(program_directory, NO_KEYS)
    loss = values(run, "training/loss")
    assert (loss[1], math.isnan(loss[2])) == (0.5, True)
    assert [metric.name for metric in run.logged] == ["training/loss"]
    assert values(run, "evaluation/mean_return") == {2: 2.5}
    assert (run.name, run.state, run.claims) == ("own", "interrupted", None)


def test_a_folder_gives_each_run_in_it_and_in_its_studies(tmp_path):
    lock = content(TRAINING, "spec/lock.json")
    for place in ("b", "a", "study/members/grid.1"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "lock.json").write_bytes(lock)
    runs = read_runs(tmp_path, NO_KEYS)
    assert [run.name for run in runs] == ["a", "b", "grid.1"]
    assert len({run.id for run in runs}) == 3
    assert [run.name for run in read_runs(tmp_path / "study", NO_KEYS)] == ["grid.1"]


def test_members_of_two_studies_with_one_name_stay_apart(tmp_path):
    lock = content(TRAINING, "spec/lock.json")
    places = ("seed.1", "one/members/seed.1", "two/members/seed.1", "two/members/seed.2")
    for place in places:
        (tmp_path / "runs" / place).mkdir(parents=True)
        (tmp_path / "runs" / place / "lock.json").write_bytes(lock)
    runs = read_runs(tmp_path / "runs", NO_KEYS)
    names = ["one.seed.1", "seed.1", "seed.2", "two.seed.1"]
    assert sorted(run.name for run in runs) == names
    export_tensorboard(runs, tmp_path / "made")
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == names
    export_mlflow(runs, tmp_path / "store")
    assert len([*(tmp_path / "store").glob("*/*/meta.yaml")]) == 4


def test_no_link_of_a_run_directory_is_followed(program_directory, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text('{"step": 1, "loss": 42}\n')
    metrics = program_directory / "work" / "workspace" / "outputs" / "metrics.jsonl"
    metrics.unlink()
    metrics.symlink_to(secret)
    (run,) = read_runs(program_directory, NO_KEYS)
    assert run.logged == ()


def test_a_program_that_logs_many_names_does_not_fill_the_memory(program_directory):
    metrics = program_directory / "work" / "workspace" / "outputs" / "metrics.jsonl"
    metrics.write_text("".join(f'{{"step": 1, "{n}": 1}}\n' for n in range(2 * MAX_NAMES)))
    (run,) = read_runs(program_directory, NO_KEYS)
    assert len(run.logged) == MAX_NAMES


def test_a_training_that_has_not_begun_has_no_metrics(tmp_path):
    (tmp_path / "lock.json").write_bytes(content(TRAINING, "spec/lock.json"))
    (run,) = read_runs(tmp_path, NO_KEYS)
    assert (run.metrics, run.state) == ((), "not started")


def test_points_that_no_tool_has_a_place_for_are_dropped(tmp_path):
    (tmp_path / "lock.json").write_bytes(content(TRAINING, "spec/lock.json"))
    (tmp_path / "work").mkdir()
    events = [
        {"time": time, "kind": "progress", "step": step, "loss": 0.5}
        for step, time in ((-1, 1.0), (2**64, 1.0), (1, 1e300), (2, 1.5))
    ]
    lines = "".join(f"{json.dumps(event)}\n" for event in events)
    (tmp_path / "work" / "events.jsonl").write_text(lines)
    (run,) = read_runs(tmp_path, NO_KEYS)
    assert run.metrics[0].points == ((1, 0.5, None), (2, 0.5, 1.5))


@pytest.mark.parametrize("text", ["yesterday", "0001-01-01T00:00:00", "9999-12-31T23:59:59+00:00"])
def test_a_time_that_is_none_is_not_exported(text):
    assert _seconds(text) is None


@pytest.mark.parametrize("name", ["folder", "capsule.yaml", "capsule.lock.json"])
def test_what_is_not_a_run_is_refused(name, tmp_path):
    path = tmp_path / name
    path.mkdir() if name == "folder" else path.write_text("{}")
    with pytest.raises(CapsuleError, match="neither a bundle nor a folder with a run") as raised:
        read_runs(path, NO_KEYS)
    assert raised.value.code == "CAP-P201"


@pytest.mark.parametrize(
    ("evaluation", "code"),
    [
        ({}, "CAP-B090"),
        (
            {
                "schema": "capsule/evaluation/v1",
                "starts": [],
                "points": [{"step": 1, "returns": ["0x1p+99999"], "lengths": [1]}],
            },
            "CAP-P202",
        ),
    ],
)
def test_a_malformed_evaluation_is_refused(evaluation, code, tmp_path):
    (tmp_path / "lock.json").write_bytes(content(TRAINING, "spec/lock.json"))
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "evaluation.json").write_bytes(canonical_json(evaluation))
    with pytest.raises(CapsuleError) as raised:
        read_runs(tmp_path, NO_KEYS)
    assert raised.value.code == code


def test_returns_of_several_games_are_metrics_of_their_own(tmp_path):
    returns = {640: (-21.0, 40.0, -19.0, 50.0)}
    bundle = runs.pack(tmp_path, runs.POPULATION, evaluation=runs.evaluation(returns))
    (run,) = read_runs(bundle, NO_KEYS)
    assert values(run, "evaluation/pong/mean_return") == {640: -20.0}
    assert values(run, "evaluation/breakout/max_return") == {640: 50.0}
    assert "evaluation/mean_return" not in {metric.name for metric in run.metrics}
    export_table([run], tmp_path / "table.csv")
    rows = list(csv.DictReader((tmp_path / "table.csv").read_text().splitlines()))
    found = [row for row in rows if row["metric"] == "evaluation/breakout/return"]
    assert [(row["episode"], row["value"]) for row in found] == [("0", "40.0"), ("1", "50.0")]


@pytest.mark.skipif(sys.platform == "win32", reason="names of files are Unicode there")
def test_a_folder_whose_name_is_not_utf_8_is_exported(tmp_path, program_directory):
    directory = program_directory.rename(tmp_path / os.fsdecode(b"run\xff"))
    found = read_runs(directory, NO_KEYS)
    assert [run.name for run in found] == ["run\ufffd"]
    export_table(found, tmp_path / "table.csv")
    export_mlflow(found, tmp_path / "store")
    export_tensorboard(found, tmp_path / "logs")
