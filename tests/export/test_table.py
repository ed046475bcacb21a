"""CSV, read by Python's own reader."""

import csv

from capsule.bundle.trust import TrustPolicy
from capsule.export.runs import read_runs
from capsule.export.table import export_table
from tests.export.conftest import STUDY, TRAINING, logged, returns


def read(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_every_value_is_a_row(tmp_path):
    export_table(read_runs(TRAINING, TrustPolicy.of([])), tmp_path / "out" / "metrics.csv")
    rows = read(tmp_path / "out" / "metrics.csv")
    losses = {
        int(row["step"]): float(row["value"]) for row in rows if row["metric"] == "training/loss"
    }
    assert losses == logged("loss")
    found = [
        (int(row["step"]), int(row["episode"]), float(row["value"]))
        for row in rows
        if row["metric"] == "evaluation/return"
    ]
    assert found == [
        (step, place, value) for step, each in returns().items() for place, value in enumerate(each)
    ]
    assert {row["run"] for row in rows} == {rows[0]["run"]}


def test_the_rows_of_a_study_name_their_members(tmp_path):
    runs = read_runs(STUDY, TrustPolicy.of([]))
    export_table(runs, tmp_path / "metrics.csv")
    assert {row["run"] for row in read(tmp_path / "metrics.csv")} == {run.name for run in runs}
