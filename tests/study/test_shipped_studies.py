"""The studies that come with Capsule."""

from collections import Counter
from pathlib import Path

import pytest

from capsule.study.study_file import StudyFile
from tests.study.studies import base_spec

STUDIES = Path(__file__).parents[2] / "specs" / "studies"
PAPER = ["deterministic", "environment", "exploration", "initialization", "minibatch"]


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_each_is_valid_and_named_after_its_file(path):
    file = StudyFile.load(path)
    assert file.study.name == path.stem
    assert list(file.member_specs(None))


@pytest.mark.parametrize(
    ("name", "arithmetic"), [("nagarajan2019", "gpu"), ("nagarajan2019-small", "arithmetic")]
)
def test_the_groups_of_nagarajan_et_al(name, arithmetic):
    file = StudyFile.load(STUDIES / f"{name}.yaml")
    members = list(file.member_specs(None))
    assert Counter(member.group for member, _ in members) == dict.fromkeys([*PAPER, arithmetic], 5)
    base = base_spec(file)
    for member, spec in members:
        varied = {"deterministic": set(), arithmetic: set()}.get(member.group, {member.group})
        assert {*spec.seeds.streams} == varied
        assert spec.seeds.root == base.seeds.root
        sticky = spec.environment.sticky_action_probability
        assert sticky == (0.25 if member.group == "environment" else 0.0)


def test_only_one_source_varies_within_a_group():
    members = list(StudyFile.load(STUDIES / "nagarajan2019-small.yaml").member_specs(None))
    different = {
        group: len({spec.digest() for member, spec in members if member.group == group})
        for group in {member.group for member, _ in members}
    }
    assert different.pop("deterministic") == 1
    assert set(different.values()) == {5}


def test_all_runs_of_the_full_study_but_the_environments_have_the_same_starts():
    file = StudyFile.load(STUDIES / "nagarajan2019.yaml")
    ranking = file.starts_spec()
    assert ranking.seeds.root != base_spec(file).seeds.root
    assert ranking.evaluation.start_set is None
    for member, spec in file.member_specs(None):
        none = (spec.evaluation.min_actions, spec.evaluation.max_actions) == (0, 0)
        assert none == (member.group == "environment")
