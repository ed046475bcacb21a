"""What a case of the corpus of hostile bundles is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Presented:
    """A bundle as somebody presents it, and the options that ``capsule verify`` is given with it.

    Attributes:
        bundle: The bundle; its file may be anything.
        options: Options of ``capsule verify``, the trusted keys among them.
    """

    bundle: Path
    options: tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """A flaw that ``capsule verify`` must refuse, with a twin that lacks nothing but the flaw.

    Attributes:
        number: Of the threat in docs/hostile-bundles.md.
        name: What is wrong, in words joined by dashes; names the case's folder.
        code: Code of the error that refuses it.
        present: Writes the bundle into a folder; hostile if its second argument is true.
    """

    number: int
    name: str
    code: str
    present: Callable[[Path, bool], Presented]
