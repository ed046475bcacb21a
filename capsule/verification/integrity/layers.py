"""The image layers that a bundle carries, unpacked within bounds: they come from a stranger.

What a layer unpacks to is known before: its size and digest are in the lock or the image manifest.
So the work is bounded by what was signed, and that is bounded too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, BinaryIO, Literal

from capsule.bundle import run_bundle
from capsule.bundle.bundle import OpenedBundle
from capsule.experiment.lock import Lock
from capsule.host.errors import CapsuleError
from capsule.host.owner import temporary_folder
from capsule.image.assembly.assemble import Image, image_of
from capsule.image.assembly.embedded import unpack_image
from capsule.image.assembly.making import Layer
from capsule.verification.integrity.image_documents import PROJECT, LayerIdentity

MAX_LAYER_BYTES = 1 << 30
MAX_WINDOW_BYTES = 8 << 20  # what every decoder must have (RFC 8878, section 3.1.1.1.2)
_CHUNK = 1 << 20
Name = Literal["base", "code"]


@contextmanager
def supplied_layers(
    bundle: OpenedBundle,
    identities: Mapping[str, LayerIdentity],
    names: Collection[Name] = ("base", "code"),
) -> Iterator[tuple[dict[Name, Path], Path | None]]:
    """Unpack layers that the bundle carries, the source tree's apart; deleted at the end.

    Args:
        bundle: The bundle.
        identities: What each must unpack to, by name.
        names: Which are wanted beside the source tree.

    Raises:
        CapsuleError: CAP-V004, one cannot be unpacked, is too large or is another.
    """
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
    check_size(member, packed.stat().st_size, identity.size)
    with temporary_folder("capsule-layer-") as folder:
        layer = folder / "layer.tar"
        with packed.open("rb") as source, layer.open("wb") as target:
            digest = unpack(source, target, identity.size, member)
        if digest != identity.sha256 and not compared:
            raise bad_layer(member, f"it is not the layer with SHA-256 {identity.sha256}")
        yield layer


def check_layer(bundle: OpenedBundle, name: str, identity: LayerIdentity) -> None:
    """Check where it lies that a layer unpacks to what it must be.

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
    """Decompress what must be ``size`` bytes; not more than a piece beyond that is made.

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
    digest, found = hashlib.sha256(), 0
    try:
        with decompressor.stream_reader(source, read_across_frames=True, closefd=False) as reader:
            while found <= size and (chunk := reader.read(_CHUNK)):
                found += len(chunk)
                digest.update(chunk)
                if target is not None:
                    target.write(chunk)
    except zstandard.ZstdError as error:
        raise bad_layer(member, str(error)) from error
    if found != size:
        more = "more" if found > size else "less"
        raise bad_layer(member, f"it unpacks to {more} than the {size} bytes of the layer")
    return digest.hexdigest()


@contextmanager
def embedded_image(
    bundle: OpenedBundle, lock: Lock, identities: Mapping[str, LayerIdentity]
) -> Iterator[Image]:
    """Unpack the whole image that the bundle carries; its layers are deleted at the end.

    Args:
        bundle: The bundle.
        lock: What the image is said to be made of.
        identities: What each layer must be, by name, from the bottom up.

    Raises:
        CapsuleError: CAP-V051 the bundle carries none; CAP-V053 or CAP-V054 it is refused
            (:mod:`capsule.image.assembly.embedded`); CAP-I102 the lock needs another Capsule.
    """
    if run_bundle.IMAGE_ARCHIVE not in bundle.files:
        raise CapsuleError(
            "CAP-V051",
            "--image embedded: the bundle carries no image",
            fix="Rebuild it from the lock (--image rebuilt), or ask the signer for a bundle made "
            "with 'capsule run --embed-image'.",
        )
    with temporary_folder("capsule-image-") as folder:
        layers = tuple(
            Layer(name, f"sha256:{layer.sha256}", folder / layer.sha256, layer.size)
            for name, layer in identities.items()
        )
        image = image_of(lock, layers)
        try:
            unpacked = unpack_image(bundle.member(run_bundle.IMAGE_ARCHIVE), image, lock)
        except OSError as error:
            raise CapsuleError(
                "CAP-B110",
                f"cannot unpack the embedded image for checking: {error.strerror}",
                fix="Set TMPDIR to a folder with room for the whole image.",
            ) from error
        yield unpacked


def bad_layer(member: str, reason: str) -> CapsuleError:
    """Return the error of a layer that is not one."""
    return CapsuleError(
        "CAP-V004",
        f"{member} cannot be unpacked: {reason}",
        fix="Do not trust this bundle; ask its signer for a valid one.",
    )


def check_size(member: str, packed: int, size: int) -> None:
    """Refuse to unpack what would be too large, before the first byte."""
    if size > MAX_LAYER_BYTES:
        raise bad_layer(member, f"it has {size} bytes, more than {MAX_LAYER_BYTES}")
    if size > run_bundle.largest_unpacked(packed):
        raise bad_layer(member, f"{packed} bytes would become {size}, which no tree does")
