"""The image that a bundle may carry whole, read back only in the form that Capsule writes.

An image's archive follows from its configuration and its layers
(:func:`capsule.image.assembly.assemble.archive_chunks`), and the configuration follows from the
lock and the layers' names and digests. So nothing of the untrusted archive is interpreted: what
must be there is computed, and every byte is compared. There is no place left for a second image,
another name for it, a foreign URL, or an unreferenced blob. What the engine is given is written
anew from what was read.

The layers are the signer's, except for the source tree and Capsule's training code, which the lock
names by digest. They are accepted only in the canonical form of a layer: no device, no setuid
program, no hard link, no whiteout.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from capsule.experiment.lock import Lock
from capsule.host.errors import CapsuleError
from capsule.host.streams import copy
from capsule.image.archives.layers import reject_collisions
from capsule.image.assembly.assemble import (
    Image,
    archive_head,
    check_code_layer,
    layer_header,
)
from capsule.image.assembly.base import canonical_layer
from capsule.image.assembly.making import Layer

MAX_ARCHIVE_BYTES = 32 << 30
MAX_RATIO = 50  # of all bytes to compressed bytes; wheels and libraries have less than ten

_WINDOW_BYTES = 1 << 23  # that the compression level of bundles may need
_WHITEOUT = ".wh."  # OCI image-spec, layer.md


def unpack_image(packed: Path, image: Image, lock: Lock) -> Image:
    """Unpack an image's archive into the files that its layers name.

    Args:
        packed: The archive, compressed with Zstandard.
        image: What it must hold: what ``image_of`` makes of the lock and the claimed layers.
        lock: The lock, for the training code.

    Returns:
        The image without a name, so that an engine which loads it names nothing by it.

    Raises:
        CapsuleError: CAP-V053, a byte is not what it must be, or a layer holds what none may hold;
            CAP-V054, it would unpack to too much.
    """
    import zstandard

    _check_size(packed, image)
    with packed.open("rb") as compressed:
        reader = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).stream_reader(compressed)
        try:
            _read_archive(reader, image)
        except zstandard.ZstdError as error:
            raise _malformed(f"it cannot be unpacked: {error}") from error
    check_layers(image, lock)
    return replace(image, reference=None)


def check_layers(image: Image, lock: Lock) -> None:
    """Check the layers of an image that was not assembled here.

    Args:
        image: The image, whose layers have the digests that their names state.
        lock: The lock, for the training code.

    Raises:
        CapsuleError: CAP-V053, a layer holds what none may hold.
    """
    try:
        reject_collisions((layer.name, _layer_facts(layer, lock)) for layer in image.layers)
    except CapsuleError as error:
        # The readers of layers also serve packages and suggest another version of one. Here the
        # bundle is at fault.
        raise error if error.code == "CAP-V053" else _malformed(error.message) from error


def _check_size(packed: Path, image: Image) -> None:
    """Reject an archive that would unpack to more bytes than an image may have."""
    size = sum(layer.size for layer in image.layers)
    limit = min(MAX_ARCHIVE_BYTES, MAX_RATIO * packed.stat().st_size)
    if size > limit:
        raise CapsuleError(
            "CAP-V054",
            f"the embedded image claims to unpack to {size} bytes, more than {limit}",
            fix="Do not trust this bundle, or rebuild its image from the lock (--image rebuilt).",
        )


def _read_archive(reader: BinaryIO, image: Image) -> None:
    _expect(reader, archive_head(image), "its documents")
    for layer in {layer.diff_id: layer for layer in image.layers}.values():
        _expect(reader, layer_header(layer), f"the header of layer {layer.name}")
        _copy(reader, layer)
        _expect(reader, bytes(-layer.size % 512), f"the end of layer {layer.name}")
    _expect(reader, bytes(1024), "its end")
    if reader.read(1):
        raise _malformed("something follows its end")


def _expect(reader: BinaryIO, expected: bytes, what: str) -> None:
    if reader.read(len(expected)) != expected:
        raise _malformed(f"{what} is not what Capsule writes")


def _copy(reader: BinaryIO, layer: Layer) -> None:
    with layer.path.open("wb") as target:
        found = copy(reader, target, layer.size).sha256
    if f"sha256:{found}" != layer.diff_id:
        raise _malformed(f"layer {layer.name} is not the one of its digest")


def _layer_facts(layer: Layer, lock: Lock) -> dict[str, str]:
    _, facts = canonical_layer(layer.path, layer.name)
    for path in facts:
        if any(part.startswith(_WHITEOUT) for part in path.split("/")):
            raise _malformed(
                f"layer {layer.name} contains {path!a}, which would remove another file"
            )
    if layer.name == "code":
        check_code_layer(layer.path, lock)
    return facts


def _malformed(what: str) -> CapsuleError:
    return CapsuleError(
        "CAP-V053",
        f"the signer's image was rejected: {what}",
        fix="Do not trust this bundle, or rebuild its image from the lock (--image rebuilt).",
    )
