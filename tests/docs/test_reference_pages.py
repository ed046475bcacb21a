"""The commands of reference pages that train nothing, run on the corpus as readers run them."""

import shutil

import pytest

from tests.docs.pages import DOCS, FENCED, commands, follow, run

ROOT = DOCS.parent
CORPUS = ROOT / "tests" / "corpus"
# The files that the pages name.
FILES = {
    "run.capsule.tar": CORPUS / "dqn.capsule.tar",
    "run.capsule.tar.bob.receipt.json": CORPUS / "dqn.capsule.tar.verifier.receipt.json",
    "other.capsule.tar": CORPUS / "r2d2.capsule.tar",
    "study.capsule-study.tar": CORPUS / "study.capsule-study.tar",
    "alice.pub": CORPUS / "author.pub",
    "bob.pub": CORPUS / "verifier.pub",
    "CITATION.cff": ROOT / "CITATION.cff",
}
PAGES = {  # and how many commands each of them runs
    "configuration.md": 3,
    "diff.md": 2,
    "export.md": 7,
    "housekeeping.md": 2,
    "receipts.md": 1,
    "report.md": 3,
    "scores.md": 2,
    "study.md": 1,
    "verify.md": 2,
}

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path):
    for name, source in FILES.items():
        shutil.copy(source, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_print_what_it_shows(page, folder):
    if page == "report.md":  # it reports on a verification, too
        command = "capsule verify run.capsule.tar --key alice.pub --mode integrity"
        assert run(command, folder).returncode == 0
    blocks = [each[2] for each in FENCED.finditer((DOCS / page).read_text())]
    assert sum(len(list(commands(block))) for block in blocks) == PAGES[page]
    follow(page, folder)


def test_receipts_below_the_threshold_are_not_enough(folder):
    command = "capsule receipts run.capsule.tar --key alice.pub --key bob.pub --threshold "
    assert run(f"{command}1", folder).returncode == 0
    done = run(f"{command}2", folder)
    assert (done.returncode, "1 of the 2 signers" in done.stdout) == (1, True)
