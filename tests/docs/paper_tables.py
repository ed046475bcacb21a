"""Reads the tables of ``docs/papers``: what a paper has, what its authors' code has, what we have.

A table of these has a column ``Capsule``. In it, ``section.field: value`` in backquotes names a
field of a spec with its value in YAML.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

PAPERS = Path(__file__).parents[2] / "docs" / "papers"
OURS = "Capsule"
SPAN = re.compile(r"`([a-z_]+(?:\.[a-z0-9_]+)+): ([^`]+)`")


def rows(page: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of every table with a column of ours, by the heads of its columns."""
    heads = None
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            heads = None
        elif heads is None:
            heads = cells
        elif OURS in heads and set(line) - set("|- "):
            yield dict(zip(heads, cells, strict=True))


def named(page: Path) -> Iterator[tuple[str, Any]]:
    """Yield each field that a page's tables name, with its value."""
    for row in rows(page):
        for field, value in SPAN.findall(row[OURS]):
            yield field, YAML(typ="safe").load(value)


def fields(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each field of a section, and of the sections in it, with its value."""
    for name, value in document.items():
        if isinstance(value, Mapping) and value:
            yield from fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def disagreements(page: Path, document: Mapping[str, Any], sections: tuple[str, ...]) -> list[str]:
    """Say where a page's tables and a spec do not have the same fields with the same values."""
    spec = dict(fields({section: document[section] for section in sections}))
    table = list(named(page))
    wrong = [
        f"{field}: the page has {value!r}, the spec {spec.get(field, 'no such field')!r}"
        for field, value in table
        if field not in spec or spec[field] != value or type(spec[field]) is not type(value)
    ]
    missing = sorted(spec.keys() - {field for field, _ in table})
    return wrong + [f"{field}: the page lacks it" for field in missing]
