"""Pages avoid phrases that read as translated; CONTRIBUTING.md has to quote them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GENERATED = {"docs/commands.md", "docs/errors.md"}  # from texts of the program, tested elsewhere
FOLDERS = ("docs", "examples", "benchmarks", "results")
PAGES = {
    *("README.md", "SECURITY.md", "CHANGELOG.md"),
    *(str(page.relative_to(ROOT)) for name in FOLDERS for page in (ROOT / name).rglob("*.md")),
}
TRANSLATED = re.compile(
    r"\b(stands? in (the|its|a|every|for)|(is|are|was|were) told|be had|go(es)? on"
    r"|(one|user)'s own|(Claimed|Refused|Accepted) (is|are)|who calls|no bundle at all)\b"
)


@pytest.mark.parametrize("page", sorted(PAGES - GENERATED))
def test_pages_read_as_if_written_in_english(page):
    assert translated((ROOT / page).read_text()) == []


def translated(text):
    """Return the phrases of a page, also across the ends of its lines."""
    return [found[0] for found in TRANSLATED.finditer(" ".join(text.split()))]


def test_a_phrase_is_found_across_lines():
    text = "It stands\nin the claims. Claimed\nare the bytes of files."
    assert translated(text) == ["stands in the", "Claimed are"]
