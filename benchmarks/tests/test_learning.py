"""The results of the learning benchmark that are kept."""

import json

import pytest
from learning import LAG, RESULTS, TASKS, lag_table, runs_of, said, task_row

PAGE = (RESULTS.parent / "README.md").read_text()


def kept(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize("task", [*TASKS, LAG])
def test_the_kept_results_are_of_todays_specs(task):
    """Otherwise, the benchmark would train all of them again."""
    results = kept(f"impala-{LAG}" if task == LAG else task)
    specs = [json.dumps(each["spec"]) for each in results]
    assert sorted(specs) == sorted(json.dumps(said(run.spec())) for run in runs_of(task, 5))


@pytest.mark.parametrize("task", TASKS)
def test_the_page_shows_the_kept_results(task):
    assert task_row(task, kept(task)) in PAGE.splitlines()


def test_the_page_shows_the_kept_returns_under_policy_lags():
    assert lag_table(kept(f"impala-{LAG}")) in PAGE
