"""Sentences about a run that several documents need."""

from dataclasses import replace

import pytest

from capsule.experiment.evaluation import StartSet
from capsule.report.facts import starts
from tests.report.conftest import read


@pytest.mark.parametrize(
    ("evaluation", "made"),
    [
        ({"noop_max": 30}, "of 1 to 30 no-ops"),
        ({}, "ranked by the final network of this run"),
        ({"start_set": {"run": "b" * 64}}, f"ranked by the final network of the run {'b' * 64}"),
    ],
)
def test_starts_are_told_with_what_made_them(bundles, evaluation, made):
    subject = read(bundles["dqn"])
    spec = subject.lock.spec
    if "start_set" in evaluation:
        evaluation = {"start_set": StartSet.model_construct(**evaluation["start_set"])}
    changed = spec.evaluation.model_copy(update=evaluation)
    lock = subject.lock.model_copy(update={"spec": spec.model_copy(update={"evaluation": changed})})
    told = starts(replace(subject, lock=lock))
    assert f"start sequences {made}, SHA-256 " in told
