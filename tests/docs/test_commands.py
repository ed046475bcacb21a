"""Every command that the documents show is one that the application accepts."""

import re
from pathlib import Path

import pytest
import typer

from tests.command_lines import parse

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
SHOWN = re.compile(r"(?:\$ )?(capsule [a-z].*)")


def commands(page):
    """Yield the command lines of the code blocks of a page, continued lines joined."""
    text = page.read_text().replace("\\\n", " ")
    fenced = False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        match = SHOWN.fullmatch(line.strip())
        if match and (fenced or line.startswith("    ")):
            yield match[1]


def test_the_pages_show_commands():
    shown = [command for page in PAGES for command in commands(page)]
    assert len(shown) > 60


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_accepted(page):
    rejected = []
    for command in commands(page):
        try:
            parse(command)
        except typer.TyperException as error:
            rejected.append(f"{command}: {error.format_message()}")
    assert not rejected
