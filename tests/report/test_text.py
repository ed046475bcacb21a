"""Text from elsewhere, numbers in words, and lines on a console."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.report.text import MAX_CHARACTERS, printable


@pytest.mark.parametrize(
    "text",
    ["\x1b[31mred", "\u202eevil", "a\r\nb", "bell\a", "\u200bzero", "\x9b1m", "\ud800"],
)
def test_text_from_strangers_cannot_steer_the_terminal(text):
    assert "\N{REPLACEMENT CHARACTER}" in printable(text)
    assert printable(text).isprintable()


@given(st.text())
def test_printable_text_is_printable_and_bounded(text):
    assert len(printable(text)) <= MAX_CHARACTERS + 1
    assert all(character.isprintable() or character.isspace() for character in printable(text))
