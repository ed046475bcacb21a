"""HTML and SVG in which no text from elsewhere can be anything but text.

Whatever is not :class:`Markup` is escaped, bounded and freed of control and direction-changing
characters on its way in; there is no other way in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from capsule.report.text import printable

NUMBER = re.compile(r"-?[0-9][0-9,.]*(e[+-][0-9]+)?")
VOID = frozenset({"br", "col", "meta"})


class Markup(str):
    """A piece of a document: made by this module, and safe to be put into another piece."""

    __slots__ = ()


def text(value: object) -> Markup:
    """Return a text that is shown as it is, at most :data:`capsule.report.text.MAX_CHARACTERS`."""
    return Markup(escape(printable(str(value))))


def element(name: str, /, *children: object, **attributes: object) -> Markup:
    """Return an element.

    Args:
        name: Its tag.
        children: Markup; anything else becomes a text.
        attributes: By name, ``class_`` for ``class`` and hyphens as underscores; None leaves one
            out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{join([value])}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{join(children)}</{name}>")


def join(pieces: Iterable[object]) -> Markup:
    """Put pieces one after the other."""
    return Markup("".join(each if isinstance(each, Markup) else text(each) for each in pieces))


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    """Return a table whose rows are each headed by their first cell.

    One of numbers scrolls where it is too wide; one of words has each row below the other then,
    which takes the roles of its elements from it, so that they are named.
    """
    rows = list(rows)
    words = any(map(_is_word, (cell for row in rows for cell in row[1:])))
    names = (element("th", head, scope="col", role="columnheader") for head in heads)
    body = (
        element(
            "tr",
            element("th", row[0], scope="row", role="rowheader"),
            *(_cell(*each) for each in zip(row[1:], heads[1:], strict=False)),
            role="row",
        )
        for row in rows
    )
    whole = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *names, role="row"), role="rowgroup"),
        element("tbody", *body, role="rowgroup"),
        class_="words" if words else None,
        role="table",
    )
    return element("div", whole, class_="scroll", tabindex=0, role="group", aria_label=caption)


def _cell(content: object, head: str) -> Markup:
    kind = None if _is_word(content) else "number"
    return element("td", content, class_=kind, role="cell", data_head=head)


def _is_word(content: object) -> bool:
    return isinstance(content, Markup) or not NUMBER.fullmatch(str(content))
