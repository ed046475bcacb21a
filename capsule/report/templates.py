"""The templates of the report page, in which text from elsewhere stays text.

A template escapes whatever is not :class:`Markup`. Before that, the value is bounded and freed of
control and direction-changing characters.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from capsule.host.wording import counted, shown_value
from capsule.report.text import MAX_SENTENCE, printable

STYLE = (Path(__file__).parent / "page.css").read_text(encoding="ascii")
MARKS = {"good": "✓", "bad": "✗", "open": "○"}
_NUMBER = re.compile(r"-?[0-9][0-9,.]*(e[+-][0-9]+)?")


def code(value: str) -> Markup:
    """Return a text as code."""
    return Markup("<code>{}</code>").format(printable(value))


def sentence(text: str) -> Markup:
    """Return a statement of Capsule's own, which is longer than a text from elsewhere may be."""
    return escape(printable(text, MAX_SENTENCE))


def toned(word: str, tone: str | None) -> Markup:
    """Mark a word with a sign besides its colour, which not everyone can see."""
    if tone is None:
        return Markup("<span>{}</span>").format(printable(word))
    return Markup(
        '<span class="toned"><span class="mark {}" aria-hidden="true">{}</span> {}</span>'
    ).format(tone, MARKS[tone], printable(word))


def _shown(value: object) -> object:
    return value if isinstance(value, Markup) else printable(shown_value(value))


def _is_number(cell: object) -> bool:
    return not isinstance(cell, Markup) and _NUMBER.fullmatch(str(cell)) is not None


def _has_words(rows: Sequence[Sequence[object]]) -> bool:
    """Tell whether a cell beside the first of its row is not a number."""
    return not all(_is_number(cell) for row in rows for cell in row[1:])


TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    # A name that is missing is an error, and not an empty place in a report.
    undefined=StrictUndefined,
    # Jinja calls this on every value, and then escapes what is not Markup.
    finalize=_shown,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.globals |= {
    "code": code,
    "marks": MARKS,
    "style": Markup(STYLE),  # noqa: S704 - of this package
    # The Content-Security-Policy of a page allows the style sheet with this digest only. A browser
    # hashes the text between the tags of the style, to the byte.
    "style_digest": base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode(),
}
TEMPLATES.tests |= {"a_number": _is_number, "wordy": _has_words}
TEMPLATES.filters |= {"grouped": "{:,}".format, "counted": counted, "sentence": sentence}
