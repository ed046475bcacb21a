"""Lines of pages are short enough to be read, compared and merged."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GENERATED = {"docs/commands.md", "docs/errors.md"}
FOLDERS = ("docs", "results", "benchmarks", "examples")
FOUND = (*ROOT.glob("*.md"), *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md")))
PAGES = {str(page.relative_to(ROOT)) for page in FOUND}
COLUMNS = 120
# Rows of tables, headings, pictures and fences cannot be wrapped.
UNBREAKABLE = re.compile(r"\s*(\||#|!\[|```)")


@pytest.mark.parametrize("page", sorted(PAGES - GENERATED))
def test_lines_of_prose_are_wrapped(page):
    assert too_long((ROOT / page).read_text()) == []


def too_long(text):
    """Return the numbers of the lines of prose with more columns and with a space to break at."""
    found, in_code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        is_prose = not in_code and not UNBREAKABLE.match(line) and not line.startswith("    ")
        if is_prose and len(line) > COLUMNS and " " in line.strip():
            found.append(number)
    return found


def test_only_prose_has_to_be_wrapped():
    long = "word " * 30
    kept = f"```\n{long}\n```\n| {long} |\n# {long}\n    {long}\n{'x' * 200}\n"
    assert too_long(f"{kept}{long}\n- {long}\n") == [8, 9]
