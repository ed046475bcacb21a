"""Checklists for submissions."""

import re

from capsule.report.checklists import artifact_appendix, neurips
from tests.report.conftest import make_report, read


def test_the_checklist_asks_sixteen_questions_and_answers_only_what_files_show(bundles):
    document = neurips(read(bundles["dqn"]))
    parts = re.split(r"^## \d+\. ", document, flags=re.MULTILINE)[1:]
    assert len(parts) == 16
    answered = [part for part in parts if "Answer: [Yes]" in part]
    assert [part.splitlines()[0] for part in answered] == [
        "Reproducibility of results",
        "Experimental setting",
        "Compute resources",
    ]
    assert all(re.search(r"`[\w/]+\.(json|md)`", part) for part in answered)
    assert all("TODO" in part for part in parts if part not in answered)


def test_nothing_is_said_to_be_reproduced_that_was_not(bundles, saved):
    before = artifact_appendix(read(bundles["dqn"]))
    assert "its run was not executed again" in before
    reports = saved(make_report(read(bundles["dqn"])))
    after = artifact_appendix(read(bundles["dqn"], *reports))
    assert "An unsigned report says: reproduced, bit for bit" in after
