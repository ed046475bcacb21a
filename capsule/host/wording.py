"""Words of messages that depend on a number, or on whether there is a value."""

from __future__ import annotations

import json


def shown_value(value: object) -> str:
    """Return a value of a document as text, and "absent" for null or a missing value."""
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    return "absent" if value is None else str(value)


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun; the plural has an s if no other is given."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def agreeing(number: int, one: str, many: str) -> str:
    """Return the form of a verb or a pronoun that agrees with a number of things."""
    return one if number == 1 else many
