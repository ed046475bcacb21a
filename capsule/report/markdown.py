"""Markdown in which text from elsewhere stays text."""

from __future__ import annotations

import re
from collections.abc import Iterable

from capsule.report.text import printable

TODO = "TODO"
# `$` begins mathematics on GitHub, and `&` a character reference.
_SPECIAL = re.compile(r"([\\`*_\[\]<>|~&$])")


def plain(value: object) -> str:
    """Return a text that Markdown shows as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", printable(str(value)))


def code(value: object) -> str:
    """Return a text as a code span; a grave accent in it becomes an apostrophe."""
    text = printable(str(value))
    # Markdown has no empty code span: two grave accents would begin one that ends further on.
    if not text:
        return "(empty)"
    # Within a code span, a backslash escapes nothing.
    return f"`{text.replace('`', chr(39))}`"


def files(*paths: str) -> str:
    """Cite files of the bundle."""
    return ", ".join(code(path) for path in paths)


def todo(what: str) -> str:
    """Leave to a person what a bundle cannot know."""
    return f"**{TODO}**: {what}"


def document(*blocks: str) -> str:
    """Put blocks below each other."""
    return "\n\n".join(block for block in blocks if block) + "\n"


def items(lines: Iterable[str]) -> str:
    """Return a list."""
    return "\n".join(f"- {line}" for line in lines)


def rows(heads: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> str:
    """Return a table; the cells are Markdown already."""
    shown = [heads, ("---",) * len(heads), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in shown)
