"""The findings of a comparison of two files, and its bounds."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from capsule.experiment.fields import Model
from capsule.verification.content.times import Times

MAX_PARTS = 20  # kept of one file
MAX_EQUAL = 20  # names of equal parts that are kept of one file
MAX_MEMBER_BYTES = 64 << 20  # of a member that is unpacked into memory
MAX_UNPACKED_BYTES = 4 << 30  # of both sides, over a whole verification
MAX_DEPTH = 3  # of files within files
SHOWN_CHARACTERS = 80
SHOWN_BEFORE = 20  # characters before the first difference, if that is not at the beginning
MAX_NAME_CHARACTERS = 400  # of a part, which consists of names of members, fields and the like

# The gravest last. Dates are what a format, or the time of the run, shows to be dates; packaging is
# how a format writes the same content down; addresses are of objects that a text names by them.
Nature = Literal["packaging", "date", "order", "address", "content"]
NATURES: tuple[Nature, ...] = ("packaging", "date", "order", "address", "content")
HARMLESS: frozenset[Nature] = frozenset({"packaging", "date"})

Data = bytes | mmap.mmap


class NotComparableError(Exception):
    """A file is not of the format, or exceeds a bound."""


class Part(Model):
    """A part of a file that differs."""

    where: str = Field(
        description="Name of the part, e.g. a member, a tensor, a line or a field; empty for the "
        "whole file."
    )
    claimed: str
    found: str
    nature: Nature = "content"


class Comparison(Model):
    """Two files of one format, compared part by part."""

    format: str
    equal: tuple[str, ...] = Field((), description="Names of parts that are equal; at most 20.")
    parts: tuple[Part, ...] = Field(description="Parts that differ; at most 20.")
    count: int = Field(description="Number of parts that differ.")
    nature: Nature = Field(description="The gravest nature among all parts that differ.")


@dataclass
class Findings:
    """Collects what differs in two files of one format."""

    format: str
    equal: list[str] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    count: int = 0
    natures: set[Nature] = field(default_factory=set)

    def differs(self, where: str, pair: tuple[object, object], nature: Nature = "content") -> None:
        """Note a part that differs, with what was claimed and what was found."""
        # All that differs is counted and decides the nature, whether or not it is kept.
        self.count += 1
        self.natures.add(nature)
        if len(self.parts) < MAX_PARTS:
            claimed, found = _shown_pair(*pair)
            self.parts.append(
                Part(where=shown_name(where), claimed=claimed, found=found, nature=nature)
            )

    def same(self, where: str) -> None:
        """Note a part that is equal."""
        if len(self.equal) < MAX_EQUAL:
            self.equal.append(shown_name(where))

    def include(self, where: str, inner: Comparison) -> None:
        """Note what differs inside of one part."""
        for part in inner.parts:
            if len(self.parts) < MAX_PARTS:
                place = f"{where}: {part.where}" if part.where else where
                self.parts.append(part.model_copy(update={"where": shown_name(place)}))
        self.count += inner.count
        self.natures.add(inner.nature)

    def comparison(self) -> Comparison:
        """Return the result; bytes that differ without any part that does are packaging."""
        if not self.natures:
            self.differs("", ("other bytes", "for the same content"), "packaging")
        nature = max(self.natures, key=NATURES.index)
        return Comparison(
            format=self.format,
            equal=tuple(self.equal),
            parts=tuple(self.parts),
            count=self.count,
            nature=nature,
        )


@dataclass
class Budget:
    """The number of bytes that may still be unpacked."""

    left: int = MAX_UNPACKED_BYTES

    def spend(self, count: int) -> None:
        """Count bytes that are unpacked.

        Raises:
            NotComparableError: That is more than is left.
        """
        self.left -= count
        if self.left < 0:
            raise NotComparableError(f"more than {MAX_UNPACKED_BYTES >> 30} GiB are to be unpacked")


@dataclass(frozen=True)
class Context:
    """The circumstances of a comparison of two files.

    Attributes:
        times: When the two runs took place.
        compare: Compares two files within these files, by name and content.
        budget: Shared by all comparisons of a verification.
        depth: How many files this one is within.
    """

    times: Times
    compare: Callable[[str, Data, Data, Context], Comparison]
    budget: Budget = field(default_factory=Budget)
    depth: int = 0

    def inner(self, name: str, left: Data, right: Data) -> Comparison:
        """Compare two files within these files."""
        # All depths share one budget: otherwise each archive within an archive could be unpacked up
        # to the whole limit.
        deeper = Context(self.times, self.compare, self.budget, self.depth + 1)
        return self.compare(name, left, right, deeper)


def shown(value: object) -> str:
    """Return the beginning of a value as text; null and Booleans as JSON writes them."""
    return _beginning(_text(value), SHOWN_CHARACTERS)


def shown_name(where: str) -> str:
    """Return the beginning of the name of a part."""
    return _beginning(where, MAX_NAME_CHARACTERS)


def _shown_pair(claimed: object, found: object) -> tuple[str, str]:
    """Return two values as texts, cut so that the first difference is in them."""
    texts = _text(claimed), _text(found)
    characters = enumerate(zip(*texts, strict=False))
    first = next((at for at, (a, b) in characters if a != b), min(map(len, texts)))
    start = first - SHOWN_BEFORE if first > SHOWN_CHARACTERS - SHOWN_BEFORE else 0
    if max(map(len, texts)) <= SHOWN_CHARACTERS:
        start = 0
    before, after = (
        "…" * bool(start) + _beginning(text[start:], SHOWN_CHARACTERS) for text in texts
    )
    return before, after


def _text(value: object) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _beginning(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "…"
