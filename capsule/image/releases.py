"""What the released versions of Capsule shipped, so that their bundles can be executed again.

``images/releases.json`` is part of every installation; ``scripts/release.sh`` adds to it. If the
training code, the recipe and the base layer of a bundle are listed there, they are known to be a
release's own, and not only by its signer's word, although this version would make others.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from capsule.experiment.canonical import canonical_json, sha256_hex
from capsule.experiment.fields import Model
from capsule.experiment.lock import Lock, LockedDebianPackage, Sha256
from capsule.image.recipe import Recipe, data_file, load_recipe


class Releases(Model):
    """``images/releases.json``: what all released versions shipped."""

    schema_id: Literal["capsule/releases/v1"] = Field("capsule/releases/v1", alias="schema")
    code: dict[Sha256, str] = Field(description="Digest of training code to the version.")
    recipes: dict[Sha256, Recipe] = Field(description="By digest.")
    bases: dict[Sha256, Sha256] = Field(
        description="What a base layer is made of (base_inputs) to the digest of the layer."
    )


@functools.cache
def releases() -> Releases:
    """Read what the released versions shipped."""
    return Releases.parse(data_file("images", "releases.json").read_bytes())


def release_of(code: str) -> str | None:
    """Return the version of Capsule that was released with training code of this digest."""
    return releases().code.get(code)


def recipe_of(lock: Lock) -> Recipe | None:
    """Return the recipe that a lock names: this version's or a released one's; None if neither."""
    image, base = lock.image, lock.spec.image.base
    own = load_recipe(image.recipe, base)
    if image.recipe_sha256 == own.digest():
        return own
    released = releases().recipes.get(image.recipe_sha256)
    # Otherwise a lock for one release of Debian could name the recipe of another by its digest.
    if released is None or (released.name, released.base) != (image.recipe, base):
        return None
    return released


def base_inputs(assembler: int, recipe: str, packages: Iterable[LockedDebianPackage]) -> str:
    """Return the SHA-256 that stands for everything a base layer is made of.

    Args:
        assembler: Version of the assembly rules.
        recipe: Digest of the recipe.
        packages: The Debian packages.
    """
    listed = sorted([package.name, package.sha256] for package in packages)
    return sha256_hex(canonical_json({"assembler": assembler, "debian": listed, "recipe": recipe}))
