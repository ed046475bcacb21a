"""The entries of nested observations, each named by its path.

``camera/left`` is the entry ``left`` of the ``Dict`` that is the entry ``camera`` of an
observation; ``1/speed`` is an entry of the second element of a ``Tuple``. Names may contain slashes
themselves; if two entries have the same path, it names the outer one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from operator import getitem
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

Space = spaces.Space[Any]


class Entry(NamedTuple):
    """An entry of an observation, or a whole observation.

    Attributes:
        space: The space of the entry.
        keys: The names and indices that lead to it, from the outermost to the innermost.
    """

    space: Space
    keys: tuple[Any, ...]

    @property
    def path(self) -> str:
        """The keys, joined by slashes."""
        return "/".join(map(str, self.keys))

    def of(self, observation: Any) -> Any:
        """Return the value of this entry in an observation."""
        return reduce(getitem, self.keys, observation)

    def contains(self, other: Entry) -> bool:
        """Return whether another entry is inside of this one, or is this one."""
        return other.keys[: len(self.keys)] == self.keys


def entries_of(space: Space) -> dict[str, Entry]:
    """Return the entries at any depth, by path, outer ones first."""
    found: dict[str, Entry] = {}
    for entry in sorted(_inside(Entry(space, ())), key=lambda each: len(each.keys)):
        found.setdefault(entry.path, entry)
    return found


def is_image(space: Space) -> bool:
    """Return whether a space is a Box of uint8, ``[rows, columns]`` with or without channels."""
    shape = space.shape or ()
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(shape) in (2, 3)


def is_text(space: Space) -> bool:
    """Return whether a space is one of texts."""
    # Gymnasium's Text spaces have the dtype str, whose kind is U.
    return space.dtype is not None and space.dtype.kind == "U"


def not_numbers(entry: Entry) -> list[Entry]:
    """Return the parts of an entry that prevent it from being a vector of a fixed length."""
    return [each for each in (entry, *_inside(entry)) if _is_obstacle(each.space)]


def _is_obstacle(space: Space) -> bool:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return not len(space)  # gymnasium.spaces.flatten() fails for an empty space
    numbers = spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
    return not isinstance(space, numbers)


def _inside(entry: Entry) -> Iterator[Entry]:
    """Yield the entries inside of an entry, in the order in which Gymnasium flattens them."""
    space = entry.space
    parts: Mapping[Any, Space] = {}
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces if isinstance(space, spaces.Dict) else dict(enumerate(space.spaces))
    for key, part in parts.items():
        inner = Entry(part, (*entry.keys, key))
        yield inner
        yield from _inside(inner)
