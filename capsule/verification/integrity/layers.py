"""The image that a bundle carries: its documents, and its layers, unpacked within bounds.

The configuration and the manifest are never given to an engine, since verification builds the image
from the lock. But people read them, other tools would run by them, and the manifest has the sizes
that bound the unpacking of layers. Both are functions of the lock and of the layers' names, digests
and sizes: they are made again from these and compared byte for byte. So there is no room for a
variable, an entry point, a user, a health check, a volume, a trigger or the address of a layer
elsewhere.

The layers are untrusted. What each must unpack to is known before it is unpacked, so the work is
bounded by what was signed, and that is bounded too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal

from capsule.bundle import run_bundle
from capsule.bundle.bundle import OpenedBundle
from capsule.bundle.claims import ImageClaim
from capsule.bundle.run_bundle import RecordedRun
from capsule.experiment.canonical import parse_canonical_json, sha256_hex
from capsule.experiment.lock import Lock
from capsule.host.errors import CapsuleError, coded
from capsule.host.owner import temporary_folder
from capsule.host.reporter import Progress
from capsule.host.streams import copy
from capsule.image.assembly.assemble import Image, image_config, image_manifest, image_of
from capsule.image.assembly.embedded import check_layers, unpack_image
from capsule.image.assembly.making import ASSEMBLER_VERSION, Layer
from capsule.image.registry.images import pull_image
from capsule.image.registry.reference import Reference
from capsule.image.releases import recipe_of

PROJECT = "project"
MAX_IMAGE_DOCUMENT_BYTES = 1 << 20
MAX_LAYER_BYTES = 1 << 30
MAX_WINDOW_BYTES = 8 << 20  # what every decoder must have (RFC 8878, section 3.1.1.1.2)
Name = Literal["base", "code"]


@dataclass(frozen=True)
class LayerIdentity:
    """The archive that a layer must unpack to."""

    sha256: str
    size: int


def layer_identities(run: RecordedRun) -> dict[str, LayerIdentity]:
    """Check the image documents of a bundle, and read off them what its layers must be.

    Returns:
        Layer name to identity. Without an image, of the source tree alone.

    Raises:
        CapsuleError: CAP-V040, a document is not what the lock and the claims make it.
    """
    lock = run.lock
    project = lock.project and LayerIdentity(lock.project.sha256, lock.project.size)
    if run.claims.image is None:
        return {PROJECT: project} if project else {}
    layers = _layers(run.bundle, lock, run.claims.image)
    if layers["base"].sha256 != lock.image.base:
        raise contradiction(run_bundle.IMAGE_MANIFEST, "the base layer is not the locked one")
    if layers.get(PROJECT) != project:
        raise contradiction(run_bundle.IMAGE_MANIFEST, "the source tree is not the locked one")
    return layers


def _layers(bundle: OpenedBundle, lock: Lock, claim: ImageClaim) -> dict[str, LayerIdentity]:
    config = bundle.content(run_bundle.IMAGE_CONFIG, MAX_IMAGE_DOCUMENT_BYTES)
    manifest = bundle.content(run_bundle.IMAGE_MANIFEST, MAX_IMAGE_DOCUMENT_BYTES)
    # Compared before it is parsed: what the parser sees is at least what was claimed.
    if (digest := f"sha256:{sha256_hex(config)}") != claim.config:
        raise contradiction(run_bundle.IMAGE_CONFIG, f"its digest is {digest}, not the claimed one")
    try:
        names = _names(parse_canonical_json(config), lock)
        # Of the manifest only the sizes are free. They bound the unpacking of the layers, which
        # must then have exactly these sizes.
        sizes = _sizes(parse_canonical_json(manifest))
        expected = image_manifest(config, list(zip(claim.layers, sizes, strict=True)))
        named = list(zip(names, claim.layers, strict=True))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        # No model describes these documents, so one of another form raises any of these.
        raise contradiction("an image document", f"it has an unexpected form ({error})") from error
    if manifest != expected:
        raise contradiction(
            run_bundle.IMAGE_MANIFEST, "it is not the manifest of the claimed layers"
        )
    # By the rules of another assembler the image cannot be built here either (CAP-I102).
    recipe = recipe_of(lock) if lock.image.assembler == ASSEMBLER_VERSION else None
    if recipe is not None and config != image_config(lock, recipe, named):
        raise contradiction(
            run_bundle.IMAGE_CONFIG, "it is not the configuration that the lock gives"
        )
    return {
        name: LayerIdentity(diff_id.removeprefix("sha256:"), size)
        for (name, diff_id), size in zip(named, sizes, strict=True)
    }


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
        raise ValueError("the size of a layer is not a whole number of bytes")
    return sizes


def contradiction(path: str, what: str) -> CapsuleError:
    """Return the error of a member that is not what the lock and the claims make it."""
    return CapsuleError(
        "CAP-V040",
        f"{path} contradicts the lock or the claims: {what}",
        fix="Do not trust this bundle; ask its signer for a consistent one.",
    )


@contextmanager
def supplied_layers(
    run: RecordedRun, names: Collection[Name] = ("base", "code")
) -> Iterator[tuple[dict[Name, Path], Path | None]]:
    """Unpack layers that the bundle carries, the source tree's apart; deleted at the end.

    Args:
        run: The recorded run.
        names: The layers to unpack besides the source tree.

    Raises:
        CapsuleError: CAP-V004, one cannot be unpacked, is too large or is another; CAP-V040 of
            :func:`layer_identities`.
    """
    bundle, identities = run.bundle, layer_identities(run)
    with ExitStack() as stack:
        supplied = {
            name: stack.enter_context(unpacked_layer(bundle, name, identities[name]))
            for name in names
            if run_bundle.LAYER.format(name=name) in bundle.files and name in identities
        }
        project = None
        if run_bundle.LAYER.format(name=PROJECT) in bundle.files and PROJECT in identities:
            project = stack.enter_context(unpacked_layer(bundle, PROJECT, identities[PROJECT]))
        yield supplied, project


@contextmanager
def unpacked_layer(
    bundle: OpenedBundle, name: str, identity: LayerIdentity, *, compared: bool = False
) -> Iterator[Path]:
    """Unpack one layer; it is deleted at the end.

    Args:
        bundle: The bundle.
        name: The layer's.
        identity: What it must unpack to.
        compared: The caller compares what it holds, and can name the file that differs.

    Raises:
        CapsuleError: CAP-B144 the bundle has none of that name, CAP-V004 it cannot be unpacked,
            is too large or is another.
    """
    member = run_bundle.LAYER.format(name=name)
    packed = bundle.member(member)
    # The sizes are compared before a byte is unpacked.
    check_size(member, packed.stat().st_size, identity.size)
    with temporary_folder("capsule-layer-") as folder:
        layer = folder / "layer.tar"
        with packed.open("rb") as source, layer.open("wb") as target:
            digest = unpack(source, target, identity.size, member)
        if digest != identity.sha256 and not compared:
            raise bad_layer(member, f"it is not the layer with SHA-256 {identity.sha256}")
        yield layer


def check_layer(bundle: OpenedBundle, name: str, identity: LayerIdentity) -> None:
    """Check, without a copy, that a layer unpacks to what it must be.

    Raises:
        CapsuleError: CAP-B144 the bundle has none of that name, CAP-V004 it cannot be unpacked,
            is too large or is another.
    """
    member = run_bundle.LAYER.format(name=name)
    with bundle.open(member) as source:
        check_size(member, bundle.files.signed(member).size, identity.size)
        if unpack(source, None, identity.size, member) != identity.sha256:
            raise bad_layer(member, f"it is not the layer with SHA-256 {identity.sha256}")


def unpack(source: BinaryIO, target: IO[bytes] | None, size: int, member: str) -> str:
    """Decompress a layer of ``size`` bytes, and nothing beyond them.

    Args:
        source: The packed layer.
        target: Where the bytes go; None if only the digest is wanted.
        size: How many bytes it must be.
        member: What to call it in an error.

    Returns:
        Its hexadecimal SHA-256.

    Raises:
        CapsuleError: CAP-V004, it is not that many bytes.
    """
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    try:
        # A file of Zstandard may have several frames, and the library may stop after the first
        # unless it is told otherwise. What the others hold has to be counted, too.
        with decompressor.stream_reader(source, read_across_frames=True, closefd=False) as reader:
            found = copy(reader, target, size)
            is_longer = bool(reader.read(1))
    except zstandard.ZstdError as error:
        raise bad_layer(member, str(error)) from error
    if is_longer or found.size < size:
        more = "more" if is_longer else "less"
        raise bad_layer(member, f"it unpacks to {more} than the {size} bytes of the layer")
    return found.sha256


@contextmanager
def embedded_image(run: RecordedRun) -> Iterator[Image]:
    """Unpack the whole image that the bundle carries; its layers are deleted at the end.

    Raises:
        CapsuleError: CAP-V040 of :func:`layer_identities`; CAP-V051, the bundle carries none;
            CAP-V053 or CAP-V054, it is rejected (:mod:`capsule.image.assembly.embedded`);
            CAP-I102, the lock needs another Capsule.
    """
    if run_bundle.IMAGE_ARCHIVE not in run.bundle.files:
        raise CapsuleError(
            "CAP-V051",
            "--image embedded: the bundle carries no image",
            fix="Rebuild it from the lock (--image rebuilt), or ask the signer for a bundle made "
            "with 'capsule run --embed-image'.",
        )
    with temporary_folder("capsule-image-") as folder:
        claimed = _claimed_image(run, folder)
        with _unpacking():
            image = unpack_image(run.bundle.member(run_bundle.IMAGE_ARCHIVE), claimed, run.lock)
        yield image


@contextmanager
def registry_image(run: RecordedRun, reference: Reference, progress: Progress) -> Iterator[Image]:
    """Take the claimed image from a registry; its layers are deleted at the end.

    Raises:
        CapsuleError: CAP-V040 of :func:`layer_identities`; CAP-I401 to CAP-I405, it is not
            available, or another one; CAP-V053, a layer holds what none may hold; CAP-I102, the
            lock needs another Capsule.
    """
    with temporary_folder("capsule-image-") as folder:
        claimed = _claimed_image(run, folder)
        with _unpacking():
            pull_image(reference, folder, progress, claimed)
            check_layers(claimed, run.lock)
        # Loaded without a name, the signer's image cannot take the name of an image of the user.
        yield replace(claimed, reference=None)


_unpacking = partial(
    coded,
    "CAP-B110",
    "cannot unpack the signer's image for checking",
    fix="Set TMPDIR to a folder with room for the whole image.",
)


def _claimed_image(run: RecordedRun, folder: Path) -> Image:
    """Return the image that the bundle claims, with layers that are to be written to a folder."""
    layers = tuple(
        Layer(name, f"sha256:{layer.sha256}", folder / layer.sha256, layer.size)
        for name, layer in layer_identities(run).items()
    )
    return image_of(run.lock, layers)


def bad_layer(member: str, reason: str) -> CapsuleError:
    """Return the error of a layer that cannot be unpacked."""
    return CapsuleError(
        "CAP-V004",
        f"{member} cannot be unpacked: {reason}",
        fix="Do not trust this bundle; ask its signer for a valid one.",
    )


def check_size(member: str, packed: int, size: int) -> None:
    """Reject a layer that would become too large, before any of it is unpacked."""
    if size > MAX_LAYER_BYTES:
        raise bad_layer(member, f"it has {size} bytes, more than {MAX_LAYER_BYTES}")
    check_ratio(member, packed, size)


def check_ratio(member: str, packed: int, size: int) -> None:
    """Reject an archive that would grow more than one of files can, before it is unpacked."""
    if size > run_bundle.largest_unpacked(packed):
        sizes = f"{packed} bytes would unpack to {size}"
        raise bad_layer(member, f"{sizes}, more than any tree of files gives")
