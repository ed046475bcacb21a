"""The image layers that a bundle carries, unpacked within bounds: they come from a stranger."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, BinaryIO, Literal

from capsule.bundle import run_bundle
from capsule.bundle.bundle import OpenedBundle
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.lock import Lock
from capsule.image.assemble import Image
from capsule.image.embedded import described_image, unpack_image

MAX_LAYER_BYTES = 1 << 30
MAX_DOCUMENT_BYTES = 1 << 20
Name = Literal["base", "code"]
PROJECT = "project"


@contextmanager
def supplied_layers(bundle: OpenedBundle) -> Iterator[tuple[dict[Name, Path], Path | None]]:
    """Unpack every layer that the bundle carries, the source tree's apart; deleted at the end.

    Raises:
        CapsuleError: CAP-V004, one cannot be unpacked or is too large.
    """
    names: tuple[Name, ...] = ("base", "code")
    with ExitStack() as stack:
        supplied = {
            name: stack.enter_context(unpacked_layer(bundle, name))
            for name in names
            if run_bundle.LAYER.format(name=name) in bundle.files
        }
        has_project = run_bundle.LAYER.format(name=PROJECT) in bundle.files
        project = stack.enter_context(unpacked_layer(bundle, PROJECT)) if has_project else None
        yield supplied, project


@contextmanager
def unpacked_layer(bundle: OpenedBundle, name: str) -> Iterator[Path]:
    """Unpack one layer; it is deleted at the end.

    Raises:
        CapsuleError: CAP-B144 the bundle has none of that name, CAP-V004 it cannot be unpacked or
            is too large.
    """
    import zstandard

    member = run_bundle.LAYER.format(name=name)
    with tempfile.NamedTemporaryFile(prefix="capsule-layer-", suffix=".tar") as target:
        with bundle.member(member).open("rb") as packed:
            reader = zstandard.ZstdDecompressor().stream_reader(packed)
            try:
                _copy_bounded(reader, target.file, member)
            except zstandard.ZstdError as error:
                raise bad_layer(member, str(error)) from error
        target.flush()
        yield Path(target.name)


@contextmanager
def embedded_image(bundle: OpenedBundle, lock: Lock) -> Iterator[Image]:
    """Unpack the whole image that the bundle carries; its layers are deleted at the end.

    Raises:
        CapsuleError: CAP-V051 the bundle carries none; CAP-V052 to CAP-V054 it is refused
            (:mod:`capsule.image.embedded`).
    """
    if run_bundle.IMAGE_ARCHIVE not in bundle.files:
        raise CapsuleError(
            "CAP-V051",
            "--image embedded: the bundle carries no image",
            fix="Rebuild it from the lock (--image rebuilt), or ask the signer for a bundle made "
            "with 'capsule run --embed-image'.",
            exit_code=ExitCode.INCONCLUSIVE,
        )
    documents = (run_bundle.IMAGE_CONFIG, run_bundle.IMAGE_MANIFEST)
    config, manifest = (_head(bundle.member(name)) for name in documents)
    with tempfile.TemporaryDirectory(prefix="capsule-image-") as folder:
        image = described_image(config, manifest, lock, Path(folder))
        try:
            unpacked = unpack_image(bundle.member(run_bundle.IMAGE_ARCHIVE), image, lock)
        except OSError as error:
            raise CapsuleError(
                "CAP-B110",
                f"cannot unpack the embedded image for checking: {error.strerror}",
                fix="Set TMPDIR to a folder with room for the whole image.",
                exit_code=ExitCode.INCONCLUSIVE,
            ) from error
        yield unpacked


def _head(path: Path) -> bytes:
    """Read a document; the rest of one that is too long is missed by whoever parses it."""
    with path.open("rb") as stream:
        return stream.read(MAX_DOCUMENT_BYTES)


def bad_layer(member: str, reason: str) -> CapsuleError:
    """Return the error of a layer that is not one."""
    return CapsuleError(
        "CAP-V004",
        f"{member} cannot be unpacked: {reason}",
        fix="Do not trust this bundle; ask its signer for a sound one.",
        exit_code=ExitCode.TAMPERED,
    )


def _copy_bounded(reader: BinaryIO, out: IO[bytes], member: str) -> None:
    remaining = MAX_LAYER_BYTES
    while chunk := reader.read(1 << 20):
        remaining -= len(chunk)
        if remaining < 0:
            raise bad_layer(member, f"it unpacks to more than {MAX_LAYER_BYTES} bytes")
        out.write(chunk)
