"""The index of the documentation leads to every page, and the glossary defines the terms."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TERMS = """claim, claim id, relaxation, ledger, random profile, trace, schedule, grade, receipt,
bundle, lock, spec, verdict, engine, fingerprint, segment, challenge"""


def test_the_index_lists_every_page():
    listed = set(re.findall(r"\]\(([a-z0-9/-]+\.md)\)", (DOCS / "README.md").read_text()))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert listed == pages - {"README.md"}


@pytest.mark.parametrize("term", [term.strip() for term in TERMS.split(",")])
def test_the_glossary_defines_the_terms_that_users_meet(term):
    assert f"\n| {term} | " in (DOCS / "glossary.md").read_text()


def test_the_glossary_is_in_alphabetical_order():
    terms = re.findall(r"^\| (.+?) \|", (DOCS / "glossary.md").read_text(), re.MULTILINE)[1:]
    assert terms == sorted(terms)
