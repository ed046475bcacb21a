"""Text from elsewhere, numbers in words, and lines on a console."""

import io
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from capsule.report.text import (
    MAX_CHARACTERS,
    bytes_text,
    print_line,
    printable,
    terminal_console,
)


@pytest.mark.parametrize(
    "text",
    ["\x1b[31mred", "\u202eevil", "a\r\nb", "bell\a", "\u200bzero", "\x9b1m", "\ud800"],
)
def test_text_from_strangers_cannot_steer_the_terminal(text):
    assert "\N{REPLACEMENT CHARACTER}" in printable(text)
    assert printable(text).isprintable()


@settings(max_examples=50)
@given(st.text())
def test_printable_text_is_printable_and_bounded(text):
    assert len(printable(text)) <= MAX_CHARACTERS + 1
    assert all(character.isprintable() or character.isspace() for character in printable(text))


@settings(max_examples=50)
@given(st.text(max_size=MAX_CHARACTERS))
def test_every_character_is_shown_in_its_place_or_replaced(text):
    """Python's own notion of printable characters excludes every space except U+0020."""
    shown = printable(text)
    assert len(shown) == len(text)
    for character, other in zip(text, shown, strict=True):
        if character.isprintable():
            assert other == character
        else:
            assert other in (character, "\N{REPLACEMENT CHARACTER}")


@settings(max_examples=50)
@given(st.text(max_size=2 * MAX_CHARACTERS))
def test_printable_text_is_not_changed_again(text):
    assert printable(printable(text)) == printable(text)


def test_only_what_is_too_long_is_cut():
    longest = "x" * MAX_CHARACTERS
    assert printable(longest) == longest
    assert printable(f"{longest}y") == f"{longest}…"


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        ((1 << 30) - 1, "1.0 GiB"),
        (1 << 20, "1.0 MiB"),
        (1_468_006, "1.4 MiB"),
        (1 << 30, "1.0 GiB"),
        (5 << 40, "5120.0 GiB"),
    ],
)
def test_a_number_of_bytes_has_the_largest_unit_that_it_fills(size, expected):
    assert bytes_text(size) == expected


def test_a_line_is_printed_without_markup_colours_or_breaks():
    stream = io.StringIO()
    console = Console(file=stream, width=20, force_terminal=True, color_system="truecolor")
    line = "[bold]step[/bold] 100 'quoted' https://example.org /a/path True"
    print_line(console, line)
    assert stream.getvalue() == f"{line}\n"


def test_lines_in_a_pipe_are_as_long_as_text_can_be(capsys):
    assert not sys.stdout.isatty()
    terminal_console().print("word " * 70)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_terminal_has_its_own_width(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "57")
    monkeypatch.setenv("TERM", "xterm")
    assert terminal_console().width == 57
