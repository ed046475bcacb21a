"""Fields that no setting gives: they come from the base spec, so all members have the same ones.

A study's lock has the specs of its members and not the base spec. Without these checks, a signer
could give one group a hyper-parameter, a seed or an image that the study does not show.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, get_args

from capsule.experiment.spec import Spec, StreamName
from capsule.study.members import PlannedMember
from capsule.study.study_file import START_SET

# Fields that determine which other fields their section has, and which defaults these have.
KINDS = {
    "accelerator": "kind",
    "environment": "suite",
    "trainer": "algorithm",
    "trainer.inference": "mode",
    "trainer.network": "module",
    "trainer.schedule": "mode",
}
FOLLOWS = "image.python"  # from image.base, which Spec compares with it
# The pins follow from these sections.
PINNED = ("image", "accelerator", "code", "data")


class _Field(NamedTuple):
    """A field of a spec, with the kinds of the sections that it is in; ``{}`` is any section."""

    path: str
    kinds: tuple[Any, ...]
    value: Any


def check_unset_fields(
    members: Iterable[tuple[PlannedMember, int, int]], specs: tuple[Spec, ...], *, ranked: bool
) -> None:
    """Check that members with the same settings for a field have the same value of it.

    Args:
        members: Each member of the study, with the indices of its spec and of its pins.
        specs: The specs.
        ranked: Whether a further run ranks the start sequences of the members.

    Raises:
        ValueError: Two members differ in a field or in their pins, and the study does not say why.
    """
    fields = [tuple(_fields(spec.model_dump(mode="json", by_alias=True))) for spec in specs]
    known: dict[tuple[Any, ...], tuple[Any, str]] = {}
    for member, spec, pins in members:
        settings = _Settings(member)
        for path, kinds, value in fields[spec]:
            given = settings.of(path)
            if path == START_SET and ranked and not given and value is None:
                raise ValueError(
                    f"members: {member.name} has no {path}, although the study ranks one"
                )
            expected, other = known.setdefault((path, kinds, given), (value, member.name))
            if value != expected:
                raise ValueError(
                    f"members: {member.name} has {path} {value!r}, and {other} {expected!r}, which "
                    "no setting gives"
                )
        sections = tuple(map(settings.of, PINNED))
        expected, other = known.setdefault(sections, (pins, member.name))
        if pins != expected:
            raise ValueError(
                f"members: {member.name} has other pins than {other}, which no setting gives"
            )


def _fields(
    section: dict[str, Any], prefix: str = "", kinds: tuple[Any, ...] = ()
) -> Iterator[_Field]:
    """Yield the fields of a section, and those of the sections in it."""
    kind = KINDS.get(prefix.removesuffix("."))
    if kind is not None:
        yield _Field(prefix + kind, kinds, section.get(kind))
        kinds = (*kinds, section.get(kind))
    # A stream that one spec names and another one does not name is a difference, too.
    names = get_args(StreamName) if prefix == "seeds.streams." else section
    for name in names:
        path, value = prefix + name, section.get(name)
        if isinstance(value, dict):
            yield _Field(path, kinds, {})
            yield from _fields(value, f"{path}.", kinds)
        elif name != kind and path != FOLLOWS:
            yield _Field(path, kinds, value)


class _Settings:
    """The settings of a member, by the fields to which they matter."""

    def __init__(self, member: PlannedMember) -> None:
        self._own: dict[str, str] = {}
        self._within: dict[str, str] = {}
        for field, value in member.settings:
            # Settings have lists and mappings as values, which have no hash.
            text = f"{field}={value!r};"
            self._own[field] = self._own.get(field, "") + text
            for section in _sections(field):
                self._within[section] = self._within.get(section, "") + text

    def of(self, path: str) -> str:
        """Return the settings of a field, of the sections that it is in, and of fields in it."""
        above = "".join(self._own.get(section, "") for section in _sections(path))
        return above + self._own.get(path, "") + self._within.get(path, "")


def _sections(path: str) -> list[str]:
    """Return the sections that a field is in, the outermost first."""
    keys = path.split(".")
    return [".".join(keys[:count]) for count in range(1, len(keys))]
