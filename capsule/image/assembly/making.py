"""Making layers: from packages in the cache to archives, several at a time.

A layer is kept under a key that covers everything its bytes depend on, so it is made once.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capsule.experiment.canonical import canonical_json, sha256_file, sha256_hex
from capsule.experiment.files import write_atomic
from capsule.host.reporter import Progress
from capsule.image.archives.layers import TarEntry, rejected, write_tar
from capsule.image.cache import Cache, file_state

# The number is raised when the rules change by which a lock becomes bytes. Otherwise older bundles
# would be reported as tampered with (CONTRIBUTING.md).
ASSEMBLER_VERSION = 3

SUPPLY_FIX = "Ask for an unmodified bundle, or build the image from the lock alone."

_MAKERS = 4  # layers made at a time, at most


@dataclass(frozen=True)
class Layer:
    """One layer: an uncompressed tar archive on this machine.

    Attributes:
        name: ``base``, a large wheel's distribution name, ``wheels``, ``code`` or ``project``.
        diff_id: ``sha256:`` and the digest of the archive.
        path: The archive.
        size: Its size in bytes.
    """

    name: str
    diff_id: str
    path: Path
    size: int


Made = tuple[Layer, dict[str, str]]  # with its facts, as layers.write_tar returns them


@dataclass(frozen=True)
class Plan:
    """How to make one layer; ``key`` covers everything that its bytes depend on."""

    name: str
    key: str
    entries: Callable[[ExitStack], Iterable[TarEntry]]

    @property
    def file(self) -> str:
        """The name of the layer in the cache."""
        return f"{self.key}.layer.tar"


def layer_key(kind: str, inputs: Any) -> str:
    """Return the key of a layer: the digest of all that its bytes depend on."""
    document = {"assembler": ASSEMBLER_VERSION, "kind": kind, "inputs": inputs}
    return sha256_hex(canonical_json(document))


def make_layers(plans: list[Plan], cache: Cache, progress: Progress) -> list[Made]:
    """Return every layer with its facts: from the cache, or made, several at a time.

    Making one is hashing and decompression, during which Python runs other threads.
    """
    layers = {plan.key: _cached(plan, cache) for plan in plans}
    missing = [plan for plan in plans if layers[plan.key] is None]
    stop = threading.Event()
    with ThreadPoolExecutor(min(_MAKERS, len(os.sched_getaffinity(0)))) as pool:
        futures = [pool.submit(_make, plan, cache, stop) for plan in missing]
        try:
            for plan, future in zip(missing, futures, strict=True):
                progress(f"assembling layer {plan.name}")
                layers[plan.key] = future.result()
        except BaseException:  # an interrupt too: the pool waits for its threads
            stop.set()
            raise
    return [layer for plan in plans if (layer := layers[plan.key])]


def find_layer(plan: Plan, cache: Cache) -> Layer | None:
    """Return a layer that was made before and not written to since. Nothing is written here."""
    # Cache.folder() would make the folder and open the file that locks the cache.
    found = _recorded(plan, cache.root / "derived")
    return found[0] if found is not None and found[2] else None


def _cached(plan: Plan, cache: Cache) -> Made | None:
    """Return a layer that was made before. It is hashed again if it was written to since."""
    found = _recorded(plan, cache.folder("derived"))
    if found is None:
        return None
    layer, facts, unchanged = found
    # A cache that was copied or restored has other inodes and times, so the bytes decide.
    if not unchanged:
        if layer.diff_id != f"sha256:{sha256_file(layer.path)}":
            return None
        _record(layer, facts)
    return layer, facts


def _recorded(plan: Plan, folder: Path) -> tuple[Layer, dict[str, str], bool] | None:
    """Return a layer that was made before, its facts, and whether it was not written to since."""
    blob = folder / plan.file
    try:
        made = json.loads(_record_of(blob).read_bytes())
        layer = Layer(plan.name, made["diff_id"], blob, made["size"])
        return layer, made["facts"], made["state"] == file_state(blob)
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None


def _make(plan: Plan, cache: Cache, stop: threading.Event) -> Made:
    """Write a layer and, after it, the record that makes it count."""
    blob = cache.folder("derived") / plan.file
    digest = hashlib.sha256()
    try:
        with ExitStack() as stack:
            target = stack.enter_context(cache.scratch()) / blob.name
            stream = stack.enter_context(target.open("wb"))

            def write(data: bytes) -> None:
                # A thread cannot be interrupted, so each piece asks whether the layer is still
                # wanted.
                if stop.is_set():
                    raise InterruptedError("another layer failed")
                digest.update(data)
                stream.write(data)

            facts = write_tar(plan.entries(stack), write)
            size = stream.tell()
            # All bytes are written before the file gets its name, and it gets that before the
            # scratch folder is removed.
            stream.close()
            target.replace(blob)
        layer = Layer(plan.name, f"sha256:{digest.hexdigest()}", blob, size)
        _record(layer, facts)
    # An InterruptedError of write() ends here, too. It is never reported: make_layers() has raised
    # the error of the other layer by then.
    except OSError as error:
        raise rejected(
            "CAP-I111",
            f"layer {plan.name} cannot be written to {blob.parent}: {error.strerror or error}",
            "Free some space there, or set CAPSULE_CACHE to another folder.",
        ) from error
    return layer, facts


def _record(layer: Layer, facts: dict[str, str]) -> None:
    document = {
        "diff_id": layer.diff_id,
        "size": layer.size,
        "state": file_state(layer.path),
        "facts": facts,
    }
    write_atomic(_record_of(layer.path), json.dumps(document).encode())


def _record_of(blob: Path) -> Path:
    return blob.with_suffix(".json")
