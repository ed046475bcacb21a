"""Texts that came from outside, and need not be valid UTF-8."""

from __future__ import annotations


def is_utf8(text: str) -> bool:
    """Tell whether a text can be encoded in UTF-8.

    An argument or a path that is not UTF-8 has surrogates, as the system gives it, and JSON can
    have halves of surrogate pairs.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
