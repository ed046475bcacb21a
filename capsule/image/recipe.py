"""Recipes: what an image holds besides the packages that a spec names.

A recipe is a declarative file in ``images/``, on top of the file of its base, and that on top of
``common.yaml``. Joined, they are part of a lock, by digest.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from capsule.experiment.canonical import canonical_json
from capsule.experiment.fields import DebianName, DigestedModel, Requirement
from capsule.experiment.spec import Spec
from capsule.experiment.spec.image import Base
from capsule.host.errors import CapsuleError

_PACKAGE = Path(__file__).resolve().parents[1]

AbsolutePath = Annotated[str, Field(pattern=r"^(/[A-Za-z0-9._-]+)+$")]


class Recipe(DigestedModel):
    """One kind of image."""

    name: Literal["cpu", "cuda"]
    base: Base
    debian: tuple[DebianName, ...] = Field(description="Packages of the base in every image.")
    packages: tuple[Requirement, ...] = Field(
        description="Python packages (PEP 508) that Capsule's training code imports."
    )
    prune: dict[str, tuple[str, ...]] = Field(
        description="Distribution (or '*', first) to patterns of files left out: '*' matches any "
        "characters, '!' keeps, the last match wins."
    )
    environment: dict[str, str] = Field(description="Variables common to every image.")
    files: dict[AbsolutePath, str] = Field(description="Small files written as they stand.")

    def prune_patterns(self, distribution: str) -> tuple[str, ...]:
        """Return the patterns that apply to ``distribution`` (PEP 503 name), in order."""
        return self.prune.get("*", ()) + self.prune.get(distribution, ())


@functools.cache
def load_recipe(name: str, base: str) -> Recipe:
    """Read the recipe ``name`` (``cpu`` or ``cuda``) on ``base`` that comes with Capsule.

    Raises:
        CapsuleError: CAP-I101 there is no such recipe, or it is not one.
    """
    from ruamel.yaml.error import YAMLError

    try:
        tree = functools.reduce(_joined, map(_read, ("common", base, name))) | {"base": base}
        # JSON mode turns YAML's lists into the model's tuples; everything else stays strict.
        return Recipe.model_validate_json(canonical_json(tree))
    except (OSError, YAMLError, LookupError, TypeError, ValueError) as error:
        raise CapsuleError(
            "CAP-I101",
            f"recipe {name!r} on {base!r} cannot be read: {error}",
            fix="Reinstall Capsule.",
        ) from error


def recipe_for(spec: Spec) -> Recipe:
    """Return the recipe of the image of a spec. The error is that of :func:`load_recipe`."""
    return load_recipe(spec.accelerator.kind, spec.image.base)


def _read(name: str) -> dict[str, Any]:
    from ruamel.yaml import YAML

    return dict(YAML(typ="safe", pure=True).load(data_file("images", f"{name}.yaml").read_bytes()))


def _joined(base: Any, own: Any) -> Any:
    """Put a recipe on top of its base: mappings and lists grow, other values are replaced."""
    if isinstance(base, dict) and isinstance(own, dict):
        # The order of this set of keys differs between processes. It reaches no digest, because the
        # joined tree is written as canonical JSON before it is validated.
        shared = {key: _joined(base[key], own[key]) for key in base.keys() & own.keys()}
        return base | own | shared
    return base + own if isinstance(base, list) else own


def data_file(kind: Literal["images", "specs"], name: str) -> Path:
    """Locate a data file: in the installed package, else in the source checkout around it.

    The file need not exist.
    """
    installed = _PACKAGE / "data" / kind / name
    return installed if installed.exists() else _PACKAGE.parent / kind / name
