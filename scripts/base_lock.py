# ruff: noqa: INP001
"""Write the lock of a base in images/: its packages, and the digests of the layers that they make.

Run this script after every change of a recipe's files or of the rules for base layers. It needs
mirrors of Debian and Ubuntu.

usage: python scripts/base_lock.py [--refresh] [BASE ...]

By default, it writes the locks of all bases. With --refresh it pins the current packages of the
machine's mirrors; otherwise the packages do not change.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

from capsule.experiment.lock import LockedImage
from capsule.experiment.spec import SourcesSpec
from capsule.image.assembly.base import make_base
from capsule.image.cache import Cache
from capsule.image.distribution import DISTRIBUTIONS, Distribution
from capsule.image.recipe import load_recipe
from capsule.image.resolution.debian import BaseLock, resolve_debian, shipped_base
from capsule.image.resolution.fetch import fetch_debian

FOLDER = Path(__file__).parents[1] / "images"
RECIPES = get_args(LockedImage.model_fields["recipe"].annotation)


def main(distribution: Distribution, *, refresh: bool) -> None:
    """Make the layers and write the file."""
    cache, sources = Cache(), SourcesSpec()
    recipes = [load_recipe(name, distribution.name) for name in RECIPES]
    if refresh:
        names = tuple(sorted({name for recipe in recipes for name in recipe.debian}))
        packages = resolve_debian(
            distribution, names, (), sources, cache, refresh_base=True, progress=_ignore
        )
    else:
        packages = shipped_base(distribution).packages
    fetch_debian(distribution.vendor, packages, cache, sources, _ignore)
    layers: dict[str, str] = {}
    for recipe in recipes:
        chosen = [package for package in packages if package.name in recipe.debian]
        diff_id = make_base(chosen, recipe, cache, _ignore).diff_id
        layers[recipe.name] = diff_id.removeprefix("sha256:")
    place = FOLDER / f"{distribution.name}.lock.json"
    place.write_bytes(BaseLock(layers=layers, packages=packages).document())
    sys.stdout.write(f"wrote {place}: {layers}\n")


def _ignore(_: str) -> None:
    pass


if __name__ == "__main__":
    bases = [word for word in sys.argv[1:] if word != "--refresh"]
    for base in bases or DISTRIBUTIONS:
        main(DISTRIBUTIONS[base], refresh="--refresh" in sys.argv[1:])
