"""The results of the learning benchmark that are kept."""

import json

import pytest
from learning import LAG, RESULTS, TASKS, runs_of, said


@pytest.mark.parametrize("task", [*TASKS, LAG])
def test_the_kept_results_are_of_todays_specs(task):
    """Otherwise, the benchmark would train all of them again."""
    name = f"impala-{LAG}" if task == LAG else task
    kept = [json.dumps(each["spec"]) for each in json.loads((RESULTS / f"{name}.json").read_text())]
    assert sorted(kept) == sorted(json.dumps(said(run.spec())) for run in runs_of(task, 5))
