"""The image that a bundle may carry whole, read back only in the form that Capsule writes.

An image's archive is a pure function of its configuration and its layers
(:func:`capsule.image.assemble.archive_chunks`), and the configuration of the lock and the layers'
digests. So nothing of a stranger's archive is interpreted: what must stand there is computed, and
every byte is compared. There is no place left for a second image, another name for it, a foreign
URL, a blob that nobody refers to, or a variable, volume or health check in the configuration. What
the engine is given is written anew from what was read.

The layers are the stranger's, but for the source tree and Capsule's training code, which the lock
names by digest. They are accepted only in the canonical form of a layer: no device, no setuid
program, no hard link, no whiteout.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from capsule.experiment.canonical import canonical_json, parse_canonical_json
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.lock import Lock
from capsule.image.assemble import (
    Image,
    Layer,
    archive_head,
    canonical_layer,
    check_code_layer,
    image_of,
    layer_header,
)
from capsule.image.layers import CHUNK, refuse_collisions

MAX_ARCHIVE_BYTES = 32 << 30
MAX_RATIO = 50  # of all bytes to compressed bytes; wheels and libraries have less than ten

_WINDOW_BYTES = 1 << 23  # that the compression level of bundles may need
_WHITEOUT = ".wh."  # OCI image-spec, layer.md
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PREFIX = "capsule "  # of what the configuration's history calls a layer


def described_image(config: bytes, manifest: bytes, lock: Lock, folder: Path) -> Image:
    """Return the image that two documents describe, if ``lock`` can have no other of that kind.

    Args:
        config: OCI image configuration.
        manifest: OCI image manifest.
        lock: What the image is said to be made of.
        folder: Where its layers are going to be.

    Raises:
        CapsuleError: CAP-V052 naming the first field that Capsule would have written otherwise;
            CAP-I102, the lock needs another Capsule.
    """
    try:
        given, listed = parse_canonical_json(config), parse_canonical_json(manifest)
        sizes = [int(layer["size"]) for layer in listed["layers"]]
        names = [str(step["created_by"]).removeprefix(_PREFIX) for step in given["history"]]
        digests = [str(digest) for digest in given["rootfs"]["diff_ids"]]
        facts = list(zip(names, digests, sizes, strict=True))
        if not all(map(_DIGEST.fullmatch, digests)):
            raise ValueError("a layer's digest is none")
        if min(sizes, default=0) < 0:
            raise ValueError("a layer's size is negative")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _not_ours(f"cannot be read: {error}") from error
    _check_names(names, lock)
    layers = tuple(
        Layer(name, digest, folder / f"{digest.removeprefix('sha256:')}.tar", size)
        for name, digest, size in facts
    )
    image = image_of(lock, layers)
    for found, expected in ((config, image.config), (manifest, image.manifest)):
        if found != expected:
            field = _difference(parse_canonical_json(found), parse_canonical_json(expected))
            raise _not_ours(f"has another {field} than the lock gives it")
    if lock.project is not None and digests[-1] != f"sha256:{lock.project.sha256}":
        raise _not_ours("has another source tree than the lock")
    return image


def unpack_image(packed: Path, image: Image, lock: Lock) -> Image:
    """Unpack an image's archive into the files that its layers name.

    Args:
        packed: The archive, compressed with Zstandard.
        image: What it must hold; of :func:`described_image`.
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
    try:
        refuse_collisions((layer.name, _layer_facts(layer, lock)) for layer in image.layers)
    except CapsuleError as error:
        raise error if error.code == "CAP-V053" else _malformed(error.message) from error
    return replace(image, reference=None)


def _check_names(names: list[str], lock: Lock) -> None:
    """Check that the layers are called what ``assemble`` calls them, in its order."""
    wheels = sorted(wheel.name for wheel in lock.image.wheels)
    top = ["code"] + ["project"] * (lock.project is not None)
    order = ["base", *wheels, "wheels", *top]
    known = [name for name in order if name in names]
    if names != known or names[:1] != ["base"] or names[-len(top) :] != top:
        raise _not_ours("has other layers than the lock gives it")


def _check_size(packed: Path, image: Image) -> None:
    """Refuse, before a byte is unpacked, what would unpack to more than it can be."""
    size = sum(layer.size for layer in image.layers)
    limit = min(MAX_ARCHIVE_BYTES, MAX_RATIO * packed.stat().st_size)
    if min(layer.size for layer in image.layers) < 0 or size > limit:
        raise CapsuleError(
            "CAP-V054",
            f"the embedded image says that it unpacks to {size} bytes, more than {limit}",
            fix="Do not trust this bundle; or rebuild its image from the lock (--image rebuilt).",
            exit_code=ExitCode.TAMPERED,
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
    digest = hashlib.sha256()
    left = layer.size
    with layer.path.open("wb") as target:
        while left and (chunk := reader.read(min(CHUNK, left))):
            digest.update(chunk)
            target.write(chunk)
            left -= len(chunk)
    if left or f"sha256:{digest.hexdigest()}" != layer.diff_id:
        raise _malformed(f"layer {layer.name} is not the one of its digest")


def _layer_facts(layer: Layer, lock: Lock) -> dict[str, str]:
    _, facts = canonical_layer(layer.path, layer.name)
    for path in facts:
        if any(part.startswith(_WHITEOUT) for part in path.split("/")):
            raise _malformed(f"layer {layer.name} holds {path!a}, which would remove another file")
    if layer.name == "code":
        check_code_layer(layer.path, lock)
    return facts


def _difference(found: Any, expected: Any, path: str = "") -> str:
    """Return the path of the first field in which two JSON values differ."""
    if not isinstance(found, dict) or not isinstance(expected, dict):
        return path or "form"
    return next(
        _difference(found.get(key), expected.get(key), f"{path}.{key}".lstrip("."))
        for key in sorted({*found, *expected})
        if canonical_json(found.get(key)) != canonical_json(expected.get(key))
    )


def _not_ours(what: str) -> CapsuleError:
    return CapsuleError(
        "CAP-V052",
        f"the configuration of the embedded image {what}",
        fix="Do not trust this bundle; or rebuild its image from the lock (--image rebuilt).",
        exit_code=ExitCode.TAMPERED,
    )


def _malformed(what: str) -> CapsuleError:
    return CapsuleError(
        "CAP-V053",
        f"the embedded image is refused: {what}",
        fix="Do not trust this bundle; or rebuild its image from the lock (--image rebuilt).",
        exit_code=ExitCode.TAMPERED,
    )
