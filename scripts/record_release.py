# ruff: noqa: INP001
"""Add this version's training code, recipes and base layers to images/releases.json.

Later versions read this list. Its entries are never removed or changed. ``scripts/release.sh`` runs
this script.

usage: python scripts/record_release.py [--check]

With --check nothing is written, and the status is 1 if the list does not contain this version with
these digests.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import get_args

from capsule import __version__
from capsule.experiment.lock import LockedImage
from capsule.image.assembly.base import shipped_layer
from capsule.image.assembly.making import ASSEMBLER_VERSION
from capsule.image.code import training_code_digest
from capsule.image.distribution import DISTRIBUTIONS
from capsule.image.recipe import load_recipe
from capsule.image.releases import Releases, base_inputs, releases
from capsule.image.resolution.debian import shipped_base

PLACE = Path(__file__).parents[1] / "images" / "releases.json"


def with_this_version(listed: Releases) -> Releases:
    """Return the releases including this version.

    Raises:
        SystemExit: This version was released with other training code.
    """
    code = training_code_digest()
    if __version__ in listed.code.values() and listed.code.get(code) != __version__:
        raise SystemExit(f"Capsule {__version__} was released with other training code")
    recipes, bases = dict(listed.recipes), dict(listed.bases)
    names = get_args(LockedImage.model_fields["recipe"].annotation)
    for name, distribution in itertools.product(names, DISTRIBUTIONS.values()):
        recipe = load_recipe(name, distribution.name)
        shipped = shipped_base(distribution).packages
        debian = tuple(package for package in shipped if package.name in recipe.debian)
        layer = shipped_layer(debian, recipe)
        if layer is None:
            raise SystemExit(
                f"recipe {name}: images/{distribution.name}.lock.json has no base layer"
            )
        recipes[recipe.digest()] = recipe
        bases[base_inputs(ASSEMBLER_VERSION, recipe.digest(), debian)] = layer
    return Releases(code={**listed.code, code: __version__}, recipes=recipes, bases=bases)


def main(*, check: bool) -> None:
    """Write or check the file."""
    found = with_this_version(releases())
    if check:
        raise SystemExit(int(found != releases()))
    PLACE.write_bytes(found.document())
    sys.stdout.write(f"{PLACE}: {__version__}, training code {training_code_digest()}\n")


if __name__ == "__main__":
    main(check="--check" in sys.argv[1:])
