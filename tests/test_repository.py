"""The repository's promises to its readers: error catalogue, documents, structure."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
CODE = re.compile(r"CAP-[A-Z][0-9]{3}")


def sources(folder="capsule", pattern="*.py"):
    return sorted((ROOT / folder).rglob(pattern))


def codes(text):
    return set(CODE.findall(text))


def test_every_error_code_is_catalogued_and_every_catalogued_code_exists():
    used = set().union(*(codes(path.read_text()) for path in sources()))
    catalogued = [
        CODE.match(line.removeprefix("| "))[0]
        for line in (ROOT / "docs/errors.md").read_text().splitlines()
        if line.startswith("| CAP-")
    ]
    assert len(catalogued) == len(set(catalogued))
    assert used == set(catalogued)


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(str(p.relative_to(ROOT)) for p in PAGES)]
)
def test_every_link_to_a_file_leads_somewhere(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_the_readme_shows_only_commands_that_exist():
    from capsule.cli import main

    known = {command.name for command in main.app.registered_commands}
    readme = (ROOT / "README.md").read_text()
    shown = set(re.findall(r"^ *(?:\$ )?capsule ([a-z]+)", readme, re.MULTILINE))
    assert shown
    assert shown <= known


def test_shipped_data_names_no_place():
    for path in (*sources("images", "*.json"), *sources("images", "*.yaml")):
        assert "://" not in path.read_text()
