"""Numbers of things in the repository, as pages and comments state them."""

import json
import re
from collections import Counter

import pytest

from capsule.study.members import plan_members
from capsule.study.study_file import StudyFile
from tests.docs.pages import DOCS
from tests.machine.conftest import MACHINES

ROOT = DOCS.parent
STUDIES = sorted((ROOT / "specs" / "studies").glob("*.yaml"))
GOLDEN = ROOT / "capsule" / "training" / "determinism" / "golden" / "portable-v3.json"


def test_the_readme_counts_the_operators_that_a_run_tests_when_it_begins():
    names = json.loads(GOLDEN.read_text())["sets"][0]["answers"]
    kinds = Counter(name.partition(".")[0] for name in names)
    operators = kinds.total() - kinds["optimizer"] - kinds["training"]
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"test of {operators} operators and three small trainings" in text
    assert kinds["training"] == 3


def test_the_page_of_gpus_counts_the_machines_of_the_test_library():
    assert len(MACHINES) == 17
    assert "imitates seventeen machines" in (DOCS / "gpu.md").read_text()


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_study_counts_its_runs(path):
    comment = re.sub("\n# ?", " ", path.read_text().partition("\nschema")[0])
    stated = re.findall(r": (\d+) runs\b", comment)
    members = len(list(plan_members(StudyFile.load(path).study)))
    assert stated == ([str(members)] if members > 1 else [])
