"""The image documents of a bundle: a configuration and a manifest that say what the lock says.

Neither is ever given to an engine, since verification builds the image from the lock; but people
read them, other tools would run by them, and the manifest has the sizes that bound the unpacking of
layers. Both are functions of the lock and of the layers' names, digests and sizes: they are made
again from these and compared byte for byte. So there is no room for a variable, an entry point, a
user, a health check, a volume, a trigger or the address of a layer elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from capsule.bundle import run_bundle
from capsule.bundle.bundle import OpenedBundle
from capsule.bundle.claims import Claims, ImageClaim
from capsule.experiment.canonical import parse_canonical_json, sha256_hex
from capsule.experiment.lock import Lock
from capsule.host.errors import CapsuleError
from capsule.image.assembly.assemble import image_config, image_manifest
from capsule.image.assembly.making import ASSEMBLER_VERSION
from capsule.image.recipe import Recipe
from capsule.image.releases import recipe_of

PROJECT = "project"
MAX_IMAGE_DOCUMENT_BYTES = 1 << 20


@dataclass(frozen=True)
class LayerIdentity:
    """What a layer must unpack to.

    Attributes:
        sha256: Digest of the archive.
        size: Its size in bytes.
    """

    sha256: str
    size: int


def layer_identities(bundle: OpenedBundle, lock: Lock, claims: Claims) -> dict[str, LayerIdentity]:
    """Check the image documents of a bundle, and read off them what its layers must be.

    Returns:
        Layer name to identity. Without an image, of the source tree alone.

    Raises:
        CapsuleError: CAP-V040, a document is not what the lock and the claims make it.
    """
    project = lock.project and LayerIdentity(lock.project.sha256, lock.project.size)
    if claims.image is None:
        return {PROJECT: project} if project else {}
    layers = _layers(bundle, lock, claims.image)
    if layers["base"].sha256 != lock.image.base:
        raise _contradiction(run_bundle.IMAGE_MANIFEST, "the base layer is not the locked one")
    if layers.get(PROJECT) != project:
        raise _contradiction(run_bundle.IMAGE_MANIFEST, "the source tree is not the locked one")
    return layers


def _layers(bundle: OpenedBundle, lock: Lock, claim: ImageClaim) -> dict[str, LayerIdentity]:
    config = bundle.content(run_bundle.IMAGE_CONFIG, MAX_IMAGE_DOCUMENT_BYTES)
    manifest = bundle.content(run_bundle.IMAGE_MANIFEST, MAX_IMAGE_DOCUMENT_BYTES)
    if (digest := f"sha256:{sha256_hex(config)}") != claim.config:
        raise _contradiction(
            run_bundle.IMAGE_CONFIG, f"its digest is {digest}, not the claimed one"
        )
    try:
        names = _names(parse_canonical_json(config), lock)
        sizes = _sizes(parse_canonical_json(manifest))
        expected = image_manifest(config, list(zip(claim.layers, sizes, strict=True)))
        named = list(zip(names, claim.layers, strict=True))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _contradiction("an image document", f"it is of another form ({error})") from error
    if manifest != expected:
        raise _contradiction(
            run_bundle.IMAGE_MANIFEST, "it says more or other than the claimed layers do"
        )
    recipe = _known_recipe(lock)
    if recipe is not None and config != image_config(lock, recipe, named):
        raise _contradiction(
            run_bundle.IMAGE_CONFIG, "it is not the configuration that the lock gives"
        )
    return {
        name: LayerIdentity(diff_id.removeprefix("sha256:"), size)
        for (name, diff_id), size in zip(named, sizes, strict=True)
    }


def _known_recipe(lock: Lock) -> Recipe | None:
    """Return the lock's recipe if this Capsule makes images by the rules that the lock names.

    If not, nobody here can say what its configuration must be, and its image cannot be built
    (CAP-I102).
    """
    return recipe_of(lock.image) if lock.image.assembler == ASSEMBLER_VERSION else None


def _names(config: Any, lock: Lock) -> list[str]:
    """Return the layers' names, from the bottom up.

    Raises:
        ValueError: They are not those of an image of this lock.
    """
    names = [entry["created_by"].removeprefix("capsule ") for entry in config["history"]]
    top = ["code", PROJECT] if lock.project else ["code"]
    known = {wheel.name for wheel in lock.image.wheels} | {"wheels"}
    between = names[1 : -len(top)]
    if [*names[:1], *names[-len(top) :]] != ["base", *top] or len(set(names)) < len(names):
        raise ValueError("its layers are not in their order")
    if unknown := sorted(set(between) - known):
        raise ValueError(f"a layer is called {unknown[0]!a}")
    return names


def _sizes(manifest: Any) -> list[int]:
    sizes = [layer["size"] for layer in manifest["layers"]]
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError("the size of a layer is not one")
    return sizes


def _contradiction(path: str, what: str) -> CapsuleError:
    return CapsuleError(
        "CAP-V040",
        f"{path} contradicts the lock or the claims: {what}",
        fix="Do not trust this bundle; ask its signer for a consistent one.",
    )
