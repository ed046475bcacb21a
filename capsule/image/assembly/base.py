"""The base layer: locked Debian packages, a recipe's small files, and the links of a merged /usr.

Everything else in an image runs on top of it, so its bytes must be those that the locked packages
give and no others. That is why a lock holds the layer's digest, and why Capsule ships the
digests of the layers that its own base lists give (``images/debian-12.lock.json``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from capsule.experiment.canonical import sha256_file
from capsule.experiment.lock import Lock, LockedDebianPackage, LockedImage
from capsule.experiment.spec import SourcesSpec
from capsule.host.errors import CapsuleError
from capsule.host.reporter import Progress
from capsule.image.archives.deb import deb_entries
from capsule.image.archives.layer_reader import read_layer
from capsule.image.archives.layers import TarEntry, file_entry, rejected, write_tar
from capsule.image.assembly.making import (
    ASSEMBLER_VERSION,
    SUPPLY_FIX,
    Layer,
    Made,
    Plan,
    layer_key,
    make_layers,
)
from capsule.image.cache import Cache
from capsule.image.distribution import DISTRIBUTIONS
from capsule.image.recipe import Recipe, load_recipe
from capsule.image.releases import base_inputs, releases
from capsule.image.resolution.debian import shipped_base
from capsule.image.resolution.fetch import fetch_debian

_LINKS = {
    "bin": "usr/bin",
    "lib": "usr/lib",
    "lib64": "usr/lib64",
    "sbin": "usr/sbin",
}

Packages = Iterable[LockedDebianPackage]


def locked_base(
    packages: Packages, recipe: Recipe, cache: Cache, sources: SourcesSpec, progress: Progress
) -> str:
    """Return the SHA-256 of the base layer of Debian packages, for a lock.

    Of Capsule's own list it is known; of any other the layer is made, once.

    Raises:
        CapsuleError: CAP-I303 a package is not available; CAP-I103 to CAP-I111 the layer
            cannot be made (:func:`make_base`).
    """
    packages = tuple(packages)
    if (shipped := shipped_layer(packages, recipe)) is not None:
        return shipped
    fetch_debian(DISTRIBUTIONS[recipe.base].vendor, packages, cache, sources, progress)
    return make_base(packages, recipe, cache, progress).diff_id.removeprefix("sha256:")


def make_base(packages: Packages, recipe: Recipe, cache: Cache, progress: Progress) -> Layer:
    """Make the base layer of Debian packages that are in the cache.

    Raises:
        CapsuleError: CAP-I103 a package is missing or damaged, CAP-I104, CAP-I107 to CAP-I109 one
            is rejected, CAP-I111 the layer cannot be written.
    """
    ((layer, _),) = make_layers([plan_base(packages, recipe, cache)], cache, progress)
    return layer


def shipped_layer(packages: Packages, recipe: Recipe) -> str | None:
    """Return the SHA-256 that Capsule ships for the base layer of exactly these packages, if any.

    It holds for the rules by which this Capsule assembles images (``ASSEMBLER_VERSION``).
    """
    shipped = shipped_base(DISTRIBUTIONS[recipe.base])
    ours = {package.name: package for package in shipped.packages}
    if {package.name: package for package in packages} != {
        name: ours[name] for name in recipe.debian
    }:
        return None
    return shipped.layers[recipe.name]


def is_genuine(lock: Lock) -> bool:
    """Tell whether the locked base layer is known to be what its packages make, without making it.

    It is if this version or a released one ships its digest for exactly these packages.

    Raises:
        CapsuleError: CAP-I113, it is known not to be.
    """
    image = lock.image
    recipe = load_recipe(image.recipe, lock.spec.image.base)
    inputs = base_inputs(image.assembler, image.recipe_sha256, image.debian)
    shipped = releases().bases.get(inputs)
    if (image.assembler, image.recipe_sha256) == (ASSEMBLER_VERSION, recipe.digest()):
        shipped = shipped_layer(image.debian, recipe) or shipped
    if shipped is not None:
        check_base(image, shipped)
    return shipped is not None


def check_base(image: LockedImage, found: str) -> None:
    """Check that the base layer that the locked packages make is the locked one.

    Raises:
        CapsuleError: CAP-I113.
    """
    if found != image.base:
        raise CapsuleError(
            "CAP-I113",
            f"the lock's Debian packages make the base layer {found}, but the lock says "
            f"{image.base}",
            fix="Do not trust the lock or its bundle. If the lock is your own, delete it and lock "
            "the spec again.",
        )


def plan_base(packages: Packages, recipe: Recipe, cache: Cache) -> Plan:
    """Say how the base layer of Debian packages is made."""
    # The key of the layer must not depend on the order of packages in the lock.
    packages = sorted(packages, key=lambda package: package.name)
    distribution = DISTRIBUTIONS[recipe.base]
    # In Debian, the names python and python3 come with packages that the base does not have.
    links = _LINKS | {
        f"usr/bin/{name}": f"python{distribution.python}" for name in ("python", "python3")
    }
    # A container's root is read-only, so the mount point of the run directory has to be in the
    # image. The last two are targets of the links, which the packages need not have.
    folders = ("out", distribution.site, "usr/lib64", "usr/sbin")

    def entries(stack: ExitStack) -> Iterator[TarEntry]:
        folder = stack.enter_context(cache.scratch())
        scratch = stack.enter_context((folder / "unpacked").open("w+b"))
        for package in packages:
            yield from deb_entries(cache.package(package), package, scratch)
        for path, text in recipe.files.items():
            yield file_entry(path.removeprefix("/"), "recipe", text.encode())
        for path, target in links.items():
            yield TarEntry(path, "recipe", "symlink", 0o777, target=target)
        for path in folders:
            yield TarEntry(path, "recipe", "directory")

    inputs = {
        "debian": [(p.name, p.version, p.architecture, p.sha256) for p in packages],
        "files": recipe.files,
        "python": distribution.python,
    }
    return Plan("base", layer_key("base", inputs), entries)


def supplied_base(path: Path, image: LockedImage) -> Made:
    """Accept a base layer only in the form that this module writes, and only the locked one.

    Raises:
        CapsuleError: CAP-I110 it is another; or see :func:`canonical_layer`.
    """
    diff_id, facts = canonical_layer(path, "base")
    if diff_id != f"sha256:{image.base}":
        raise rejected(
            "CAP-I110", f"the supplied base layer is {diff_id}, not the locked one", SUPPLY_FIX
        )
    return Layer("base", diff_id, path, path.stat().st_size), facts


def canonical_layer(path: Path, name: str) -> tuple[str, dict[str, str]]:
    """Return the digest and the facts of a layer archive, if this module could have written it.

    Raises:
        CapsuleError: CAP-I110, it is in another form; CAP-I104 to CAP-I108, it holds what no layer
            may hold.
    """
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        facts = write_tar(read_layer(stream, f"the supplied {name} layer"), digest.update)
    if digest.hexdigest() != sha256_file(path):  # a folder above a file is missing
        raise rejected(
            "CAP-I110", f"the supplied {name} layer is not in canonical form", SUPPLY_FIX
        )
    return f"sha256:{digest.hexdigest()}", facts
