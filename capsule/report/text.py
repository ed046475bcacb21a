"""Text from elsewhere, made safe to show."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

MAX_CHARACTERS = 400
# Of a verdict in words. What it says of the image and of the training code comes last, and must not
# be cut off.
MAX_SENTENCE = 10_000
_ITEM, _ITEMS = 70, 240  # characters of a text in a list, and after which the others are counted
_PATTERNS = "trainer.outputs="  # how the relaxations begin whose text the signer chooses


def printable(text: str, most: int = MAX_CHARACTERS) -> str:
    """Replace control and direction-changing characters, and cut what is too long.

    An untrusted bundle or training process must not be able to move the cursor, recolour the
    verdict or reverse the reading order.
    """
    # The text is cut first, since text from elsewhere may be very long.
    shown = "".join(_safe(character) for character in text[: most + 1])
    return shown if len(shown) <= most else shown[:most] + "…"


def listed(texts: Sequence[str], rest: str = "") -> str:
    """Return the first of several texts, each cut to a few words, and the number of the others.

    A long text from elsewhere thus leaves room for the others, or it is said that there are more.

    Args:
        texts: The texts, the most important ones first.
        rest: What is said of those that are only counted.
    """
    shown: list[str] = []
    for text in texts:
        shown.append(text if len(text) <= _ITEM else f"{text[:_ITEM]}…")
        if len(", ".join(shown)) > _ITEMS:
            break
    more = len(texts) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more{rest}" if more else "")


def listed_relaxations(relaxations: Sequence[str], rest: str = "") -> str:
    """List relaxations as :func:`listed` does, patterns of outputs last: there can be many."""
    return listed(sorted(relaxations, key=lambda name: name.startswith(_PATTERNS)), rest)


def _safe(character: str) -> str:
    # These are control and format characters (direction among them), surrogates, private and
    # unassigned code points, and the separators of lines and paragraphs.
    if unicodedata.category(character) in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}:
        return "\N{REPLACEMENT CHARACTER}"
    return character


def bytes_text(size: int) -> str:
    """Return a number of bytes as text: ``812 B``, ``1.4 MiB``."""
    if size < 1 << 10:
        return f"{size} B"
    # A number that would be rounded to 1024.0 is one of the next unit.
    shift, unit = next(
        (each for each in ((10, "KiB"), (20, "MiB")) if round(size / (1 << each[0]), 1) < 1 << 10),
        (30, "GiB"),
    )
    return f"{size / (1 << shift):.1f} {unit}"


def print_line(console: Console, text: str) -> None:
    """Print a line as it is: unmarked, not highlighted and not wrapped."""
    # Text in brackets would otherwise be taken for a style or a link.
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def terminal_console() -> Console:
    """Return a console for standard output that breaks no table in a pipe or a file."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=MAX_CHARACTERS)
