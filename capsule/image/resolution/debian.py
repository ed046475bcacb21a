"""Packages of Debian or Ubuntu: the shipped base lock, and what a spec adds to it.

Nothing of the machine is needed for it: indexes are read from mirrors
(:mod:`capsule.image.resolution.indexes`), and packages are chosen much as apt does
(:mod:`capsule.image.resolution.relations`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from pydantic import Field

from capsule.experiment.fields import Model
from capsule.experiment.lock import LockedDebianPackage, Sha256
from capsule.experiment.spec import SourcesSpec
from capsule.host.errors import CapsuleError
from capsule.image.cache import Cache
from capsule.image.distribution import Distribution
from capsule.image.recipe import data_file
from capsule.image.resolution.indexes import read_archive
from capsule.image.resolution.mirrors import mirrors
from capsule.image.resolution.relations import Index, Stanza, Unresolvable, install


class BaseLock(Model):
    """``images/NAME.lock.json``: the base of a distribution, which Capsule ships a lock of.

    ``scripts/base_lock.py`` writes it.
    """

    layers: dict[str, Sha256] = Field(description="Recipe to SHA-256 of its base layer.")
    packages: tuple[LockedDebianPackage, ...]


def resolve_debian(
    distribution: Distribution,
    base: tuple[str, ...],
    extra: tuple[str, ...],
    sources: SourcesSpec,
    cache: Cache,
    *,
    refresh_base: bool,
    progress: Callable[[str], None],
) -> tuple[LockedDebianPackage, ...]:
    """Lock the base packages, and extra packages with what they depend on beyond the base.

    Args:
        distribution: The release.
        base: Packages of the recipe; exactly these, without dependencies.
        extra: Packages of the spec; with dependencies, without recommendations.
        sources: Mirrors, if not the machine's own.
        cache: Holds the package indexes between calls, for offline use.
        refresh_base: Take the base from the mirrors as they are now, not from the shipped lock.
        progress: Told about each stage.

    Returns:
        Packages sorted by name. A base package is replaced if an extra one needs a newer one.

    Raises:
        CapsuleError: CAP-L122 no package index, CAP-L123 unknown package, CAP-L124 packages that
            do not fit together, CAP-L125 the shipped lock does not fit the recipe.
    """
    if not (extra or refresh_base):
        return tuple(_from_shipped(distribution, base))
    progress("resolving Debian packages")
    with cache.lock("debian"):
        addresses = mirrors(distribution.vendor, sources)
        index = read_archive(addresses, distribution, cache.folder("debian"), progress)
    asked = {*base, *extra} if refresh_base else set(extra)
    exists = (
        name for name in asked if index.candidate(name) is not None or any(index.providers(name))
    )
    if unknown := sorted(asked.difference(exists)):
        raise CapsuleError(
            "CAP-L123",
            f"image.debian: {distribution.title} has no package {', '.join(map(repr, unknown))}",
            fix=f"Correct the name. {distribution.vendor.search}/{distribution.codename} finds "
            "packages.",
        )
    locked = _newest(base, index) if refresh_base else _from_shipped(distribution, base)
    # Without their relations: the base is not closed, and what it has is what images need.
    installed = [Stanza(package.name, package.version, {}) for package in locked]
    try:
        added = install(extra, installed, index)
    except Unresolvable as error:
        raise CapsuleError(
            "CAP-L124",
            f"image.debian {list(extra)} cannot be resolved: {error}",
            fix=f"Change image.debian so that the packages exist in {distribution.title} and fit "
            "together, or lock with --refresh-base. Capsule takes the first of alternative "
            "dependencies; to use another one, list it before the package that needs it.",
        ) from error
    merged = {package.name: package for package in locked}
    for stanza in added:
        merged[stanza.name] = _locked(stanza, requested=stanza.name in {*base, *extra})
    return tuple(merged[name] for name in sorted(merged))


@functools.cache
def shipped_base(distribution: Distribution) -> BaseLock:
    """Return the lock of a distribution's base that this version of Capsule ships."""
    document = data_file("images", f"{distribution.name}.lock.json").read_bytes()
    return BaseLock.model_validate_json(document)


def _from_shipped(distribution: Distribution, base: tuple[str, ...]) -> list[LockedDebianPackage]:
    shipped = {package.name: package for package in shipped_base(distribution).packages}
    if missing := sorted(set(base) - shipped.keys()):
        raise CapsuleError(
            "CAP-L125",
            f"the recipe names Debian packages that the shipped base lock lacks: {missing}",
            fix="Lock with --refresh-base.",
        )
    return [shipped[name] for name in sorted(base)]


def _newest(names: Iterable[str], index: Index) -> list[LockedDebianPackage]:
    found = (index.candidate(name) for name in sorted(names))
    return [_locked(stanza, requested=True) for stanza in found if stanza is not None]


def _locked(stanza: Stanza, *, requested: bool) -> LockedDebianPackage:
    return LockedDebianPackage.model_validate(
        {
            "name": stanza.name,
            "version": stanza.version,
            "architecture": stanza.fields["Architecture"],
            "pool": stanza.fields["Filename"],
            "size": int(stanza.fields["Size"]),
            "sha256": stanza.fields["SHA256"],
            "requested": requested,
        }
    )
