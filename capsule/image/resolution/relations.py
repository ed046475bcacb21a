"""Versions and relations of Debian packages (deb-version(7), deb-control(5)), and what they need.

The rules resemble those of ``apt-get install --no-install-recommends`` on a machine that has the
base's packages: the first alternative that exists is taken, what is installed stays unless
something needs a newer version, and a contradiction is an error, since nothing is ever removed.

Unlike apt, no choice is revised: if the first alternative contradicts another package, the next one
is not tried, unless the spec names it before. The virtual packages that the base's packages provide
are not known here, so a package that needs one brings a provider, even if the base has one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest
from typing import NamedTuple

_RELATION = re.compile(
    r"(?P<name>[a-zA-Z0-9][a-zA-Z0-9.+-]*)(?::[a-z0-9-]+)?"
    r"(?:\s*\((?P<operator><<|<=|=|>=|>>)\s*(?P<version>[^\s)]+)\s*\))?"
)
# Digits of other scripts are no numbers in a version, although int() reads them.
_PARTS = re.compile(r"(\D*)(\d*)", re.ASCII)
_END = ((0,), 0)  # what follows the end of a version: neither text nor number
_NEEDS = ("Pre-Depends", "Depends")
_BREAKS = ("Breaks", "Conflicts")
_PRIORITIES = ("required", "important", "standard", "optional", "extra")


class Unresolvable(Exception):  # noqa: N818 - what cannot be resolved is a result here
    """Packages do not exist together. The message says which, and why."""


class Relation(NamedTuple):
    """A package that another one needs or conflicts with, perhaps in some versions only."""

    name: str
    operator: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} ({self.operator} {self.version})" if self.operator else self.name

    def allows(self, version: str) -> bool:
        """Tell whether a version meets the relation."""
        if not self.operator:
            return True
        order = compare_versions(version, self.version)
        return {
            "<<": order < 0,
            "<=": order <= 0,
            "=": order == 0,
            ">=": order >= 0,
            ">>": order > 0,
        }[self.operator]


class Stanza(NamedTuple):
    """A package of an index, or one that is installed."""

    name: str
    version: str
    fields: Mapping[str, str]

    def relations(self, field: str) -> list[list[Relation]]:
        """Return a field's relations, as lists of alternatives: one of each list has to be met."""
        return parse_relations(self.fields.get(field, ""))

    def all_of(self, *names: str) -> list[Relation]:
        """Return the relations of fields that have no alternatives."""
        return [each for name in names for group in self.relations(name) for each in group]

    def provides(self, relation: Relation) -> bool:
        """Tell whether the package is what a relation names, by itself or as a virtual package."""
        if self.name == relation.name:
            return relation.allows(self.version)
        for virtual in self.all_of("Provides"):
            if virtual.name == relation.name:
                # A virtual package without a version satisfies no relation that has one.
                return relation.allows(virtual.version) if virtual.version else not relation.version
        return False


class Index(NamedTuple):
    """The packages of an archive.

    Attributes:
        candidate: Gives the newest package of a name, if there is one.
        providers: Gives the names of the packages that provide a virtual package.
    """

    candidate: Callable[[str], Stanza | None]
    providers: Callable[[str], Iterable[str]]


def compare_versions(one: str, other: str) -> int:
    """Compare ``[epoch:]upstream[-revision]``: below 0 if ``one`` is older, above 0 if newer."""
    for first, second in zip(_split(one), _split(other), strict=True):
        for pair in zip_longest(_parts(first), _parts(second), fillvalue=_END):
            if pair[0] != pair[1]:
                return -1 if pair[0] < pair[1] else 1
    return 0


version_key = functools.cmp_to_key(compare_versions)


def parse_relations(text: str) -> list[list[Relation]]:
    """Parse a field such as ``Depends``; architecture qualifiers (``:any``) are left out."""
    groups = []
    for group in filter(str.strip, text.split(",")):
        matches = (_RELATION.match(each.strip()) for each in group.split("|"))
        groups.append(
            [Relation(m["name"], m["operator"] or "", m["version"] or "") for m in matches if m]
        )
    return groups


def install(extra: Iterable[str], installed: Iterable[Stanza], index: Index) -> list[Stanza]:
    """Return the packages to add to ``installed``, or to replace there, so that it has ``extra``.

    Args:
        extra: Names of packages; the newest version of each is taken.
        installed: What is there. Its relations count only for packages that replace it.
        index: What exists.

    Raises:
        Unresolvable: A needed package does not exist, or two contradict each other.
    """
    return _Installation(installed, index).run(extra)


class _Installation:
    def __init__(self, installed: Iterable[Stanza], index: Index) -> None:
        self._packages = {package.name: package for package in installed}
        self._provided: dict[str, set[str]] = {}
        self._added: dict[str, Stanza] = {}
        self._index = index

    def run(self, extra: Iterable[str]) -> list[Stanza]:
        for name in extra:
            candidate = self._index.candidate(name)
            if candidate is None:
                raise Unresolvable(f"{name} is a virtual package, or does not exist")
            known = self._packages.get(name)
            if known is None or compare_versions(known.version, candidate.version) < 0:
                self._add(candidate)
        # This comes last, when newer versions may have replaced what another package breaks.
        self._check()
        return list(self._added.values())

    def _add(self, package: Stanza) -> None:
        """Add a package and, one after the other and deep before wide, what it needs."""
        # It is entered before its dependencies are followed, so that cycles of them end.
        self._packages[package.name] = self._added[package.name] = package
        for virtual in package.all_of("Provides"):
            self._provided.setdefault(virtual.name, set()).add(package.name)
        for field in _NEEDS:
            for group in package.relations(field):
                if not any(map(self._has, group)):
                    self._add(self._choice(package, group))
        for relation in package.all_of(*_BREAKS):
            for hit in list(self._matching(relation)):
                if newer := self._newer(hit, relation):
                    self._add(newer)

    def _has(self, relation: Relation) -> bool:
        return any(True for _ in self._matching(relation))

    def _matching(self, relation: Relation) -> Iterable[Stanza]:
        """Yield the packages that are there and are what a relation names."""
        for name in {relation.name} | self._provided.get(relation.name, set()):
            # _provided keeps the names of packages that have been replaced since, so each is asked
            # again.
            package = self._packages.get(name)
            if package is not None and package.provides(relation):
                yield package

    def _choice(self, package: Stanza, group: list[Relation]) -> Stanza:
        """Return the package that satisfies the first alternative that any package satisfies."""
        for relation in group:
            candidate = self._index.candidate(relation.name)
            if candidate is not None and candidate.provides(relation):
                return candidate
            found = map(self._index.candidate, self._index.providers(relation.name))
            providers = [each for each in found if each is not None and each.provides(relation)]
            if providers:
                return min(providers, key=_preference)
        raise Unresolvable(f"{package.name} needs {' | '.join(map(str, group))}, which is missing")

    def _newer(self, package: Stanza, relation: Relation) -> Stanza | None:
        """Return a newer version of a package that is not what a relation names any more."""
        candidate = self._index.candidate(package.name)
        if candidate is None or candidate.provides(relation):
            return None
        newer = compare_versions(candidate.version, package.version) > 0
        return candidate if newer else None

    def _check(self) -> None:
        for package in self._added.values():
            for relation in package.all_of(*_BREAKS):
                for hit in self._matching(relation):
                    # A package may conflict with a virtual one that it provides itself.
                    if hit.name != package.name:
                        raise Unresolvable(f"{package.name} breaks {hit.name} {hit.version}")
            for field in _NEEDS:
                for group in package.relations(field):
                    if not any(map(self._has, group)):
                        raise Unresolvable(f"{package.name} needs {' | '.join(map(str, group))}")


def _preference(package: Stanza) -> tuple[int, str]:
    priority = package.fields.get("Priority", "")
    known = priority in _PRIORITIES
    return (_PRIORITIES.index(priority) if known else len(_PRIORITIES)), package.name


def _split(version: str) -> tuple[str, str, str]:
    epoch, colon, rest = version.partition(":")  # an upstream version may have colons, too
    if not colon:
        epoch, rest = "0", version
    upstream, dash, revision = rest.rpartition("-")
    # A version without a revision equals one with the revision 0 (deb-version(7)).
    return epoch, (upstream if dash else rest), (revision if dash else "")


def _parts(text: str) -> list[tuple[tuple[int, ...], int]]:
    """Return the texts and numbers of which an upstream version or a revision is made in turn."""
    # The 0 after the letters is their end, which sorts after '~' and before any other character.
    found = _PARTS.findall(text)
    return [((*map(_order, letters), 0), int(number or "0")) for letters, number in found]


def _order(character: str) -> int:
    """Return the rank of a character: '~' is before the end, letters before everything else."""
    if character == "~":
        return -1
    return ord(character) if character.isalpha() else ord(character) + 256
