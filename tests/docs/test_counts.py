"""Numbers of things in the repository, as pages state them."""

import json
from collections import Counter

from tests.docs.pages import DOCS
from tests.machine.conftest import MACHINES

ROOT = DOCS.parent
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
