"""Images to and from a registry.

A pushed image has its layers as Capsule makes them, uncompressed. So its manifest is the one that a
bundle has, and every digest in the registry follows from the lock. An image that another tool
pushed has compressed layers and the same configuration; it is unpacked to the same layers.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from capsule.host.errors import CapsuleError
from capsule.host.reporter import Progress
from capsule.host.streams import copy
from capsule.image.assembly.assemble import Image
from capsule.image.assembly.making import Layer
from capsule.image.registry.client import MAX_DOCUMENT_BYTES, Descriptor, Repository
from capsule.image.registry.reference import Reference

MAX_IMAGE_BYTES = 64 << 30  # of all layers, unpacked
_WINDOW_BYTES = 128 << 20  # what other tools' compression with Zstandard may need
_CHUNK = 1 << 20


def push_image(image: Image, reference: Reference, progress: Progress) -> Reference:
    """Upload an image, and return its name with its digest.

    Blobs that the repository has are not sent again. Without a tag, the image gets the first
    twelve digits of its identity.

    Raises:
        CapsuleError: CAP-I401, the reference has a digest; CAP-I402 to CAP-I404 of the registry.
    """
    if reference.digest is not None:
        raise CapsuleError(
            "CAP-I401",
            f"{reference} names an image by its digest, which follows from the image",
            fix="Name the repository and perhaps a tag: REGISTRY/NAME[:TAG].",
        )
    tag = reference.tag or image.config_digest.removeprefix("sha256:")[:12]
    with Repository(reference) as repository, ExitStack() as stack:
        for layer in {layer.diff_id: layer for layer in image.layers}.values():
            blob = Descriptor(layer.diff_id, layer.size)
            if not repository.has_blob(blob):
                progress(f"pushing layer {layer.name} ({layer.size >> 20} MiB)")
                repository.push_blob(blob, stack.enter_context(layer.path.open("rb")))
        config = Descriptor(image.config_digest, len(image.config))
        if not repository.has_blob(config):
            repository.push_blob(config, image.config)
        # The manifest comes last: a registry may reject one whose blobs it does not have.
        digest = repository.push_manifest(image.manifest, tag)
    return reference._replace(tag=tag, digest=digest)


def pull_image(
    reference: Reference, folder: Path, progress: Progress, expected: Image | None = None
) -> Image:
    """Download an image, and unpack its layers into a folder.

    Args:
        reference: Its name, with a tag or a digest.
        folder: An empty folder, in which the layers stay.
        progress: Told about each layer.
        expected: What the image has to be: nothing else is downloaded or unpacked.

    Returns:
        The image with uncompressed layers, and the reference as its name if that has a tag.

    Raises:
        CapsuleError: CAP-I401, the reference has neither a tag nor a digest; CAP-I402 to CAP-I404,
            the registry fails; CAP-I405, it is no image for Linux, its layers are not those of its
            configuration, or it is not the expected one.
    """
    if reference.tag is None and reference.digest is None:
        raise CapsuleError(
            "CAP-I401",
            f"{reference} has neither a tag nor a digest",
            fix="Add the tag or the digest that 'capsule push' printed.",
        )
    with Repository(reference) as repository:
        config, blobs = _content(repository, reference, expected)
        left = MAX_IMAGE_BYTES if expected is None else sum(each.size for each in expected.layers)
        layers = []
        for number, (blob, media_type, diff_id) in enumerate(blobs):
            progress(f"pulling layer {number + 1} of {len(blobs)} ({blob.size >> 20} MiB)")
            packed, path = folder / "packed", folder / diff_id.removeprefix("sha256:")
            if blob.size > left + _CHUNK:  # compression makes nothing much larger
                raise _other_image(reference, f"a layer has {blob.size} bytes, more than {left}")
            if not path.exists():  # equal layers are one blob
                with packed.open("wb") as stream:
                    stream.writelines(repository.blob(blob))
                _unpack(packed, media_type, path, left, diff_id, reference)
                packed.unlink(missing_ok=True)
            size = path.stat().st_size
            left -= size
            name = f"layer {number}" if expected is None else expected.layers[number].name
            layers.append(Layer(name, diff_id, path, size))
    tagged = None if reference.tag is None else str(reference._replace(digest=None))
    return Image(config, tuple(layers), tagged)


def _content(
    repository: Repository, reference: Reference, expected: Image | None
) -> tuple[bytes, tuple[tuple[Descriptor, str, str], ...]]:
    """Return an image's configuration, and its layers with their media types and diff ids."""
    try:
        manifest = json.loads(repository.manifest())
        config_blob = _descriptor(manifest["config"])
        if expected is not None and config_blob.digest != expected.config_digest:
            raise _other_image(
                reference, f"it is {config_blob.digest}, not {expected.config_digest}"
            )
        if config_blob.size > MAX_DOCUMENT_BYTES:
            raise ValueError("the configuration is too large")
        config = b"".join(repository.blob(config_blob))
        facts = json.loads(config)
        diff_ids = facts["rootfs"]["diff_ids"]
        layers = tuple(
            (_descriptor(layer), str(layer["mediaType"]), _digest(diff_id))
            for layer, diff_id in zip(manifest["layers"], diff_ids, strict=True)
        )
        if facts["os"] != "linux":
            raise ValueError(f"it is for {facts['os']!a}")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _other_image(reference, f"it is not an image of one platform: {error}") from error
    return config, layers


def _descriptor(entry: Any) -> Descriptor:
    size = entry["size"]
    # isinstance() would take true and false for numbers.
    if type(size) is not int or size < 0:
        raise ValueError("a size is not a number")
    return Descriptor(_digest(entry["digest"]), size)


def _digest(text: Any) -> str:
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", str(text)):
        raise ValueError(f"{text!a} is not a SHA-256 digest")
    return str(text)


def _unpack(
    packed: Path, media_type: str, path: Path, limit: int, diff_id: str, reference: Reference
) -> None:
    """Unpack a layer of at most ``limit`` bytes, and check that it is the one of its diff id."""
    from zstandard import ZstdError

    try:
        with _opened(packed, media_type) as source, path.open("wb") as target:
            # However much a hostile layer would unpack to, no more than the limit is written.
            found = copy(source, target, limit)
            is_longer = bool(source.read(1))
    except (gzip.BadGzipFile, EOFError, zlib.error, ZstdError, ValueError) as error:
        raise _other_image(reference, f"a layer cannot be unpacked: {error}") from error
    if is_longer or f"sha256:{found.sha256}" != diff_id:
        raise _other_image(reference, f"a layer is not the one of its diff id {diff_id}")


def _opened(packed: Path, media_type: str) -> gzip.GzipFile | BinaryIO:
    from zstandard import ZstdDecompressor

    if media_type.endswith((".tar", "+tar")):
        return packed.open("rb")
    # OCI's media types end in tar+gzip, and Docker's in tar.gzip.
    if media_type.endswith(("+gzip", ".gzip")):
        return gzip.open(packed, "rb")
    if media_type.endswith("+zstd"):
        # Other tools may write several frames. By default the library may stop after the first.
        decompressor = ZstdDecompressor(max_window_size=_WINDOW_BYTES)
        return decompressor.stream_reader(packed.open("rb"), read_across_frames=True)
    raise ValueError(f"its media type {media_type!a} is unknown")


def _other_image(reference: Reference, reason: str) -> CapsuleError:
    return CapsuleError(
        "CAP-I405",
        f"{reference} is not the image: {reason}",
        fix="Name an image that 'capsule push' or 'docker push' made of the same lock.",
    )
