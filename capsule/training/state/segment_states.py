"""Saving the states with which segments of a run begin (:mod:`capsule.experiment.states`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from capsule.experiment import contract
from capsule.experiment.errors import CapsuleError
from capsule.experiment.files import open_atomic, remove_unfinished
from capsule.experiment.states import BLOCK_BYTES, StateFile, StateIndex
from capsule.training.state.run_directory import write_document

_OF_EVALUATION = ("networks", "evaluation.json")  # not kept, because segments are not evaluated


def keep_state(directory: Path, step: int) -> None:
    """Keep a copy of the run directory's folder ``state`` as the state at ``step``.

    First the pack and then the index appear by atomic rename. A run that is killed in between keeps
    the state when it is resumed. If the index exists, nothing is done.

    Raises:
        CapsuleError: CAP-T161 or CAP-T131, a file cannot be written.
    """
    folder = directory / contract.SEGMENT_STATES
    name = contract.checkpoint_name(step)
    if (folder / f"{name}.json").exists():
        return
    try:
        folder.mkdir(exist_ok=True)
        remove_unfinished(folder)
        index = _pack(directory / contract.STATE, folder, step)
    except OSError as error:
        raise CapsuleError(
            "CAP-T161",
            f"the state at step {step} cannot be kept: {error.strerror}",
            fix="Free disk space or raise limits.disk_mb, then run again; or set "
            "recording.segment_states to false.",
        ) from error
    write_document(folder / f"{name}.json", index)


def _pack(state: Path, folder: Path, step: int) -> StateIndex:
    """Write the pack of a state, and return its index."""
    known = _known_blocks(folder)
    packed: list[str] = []
    files: dict[str, StateFile] = {}
    with open_atomic(folder / f"{contract.checkpoint_name(step)}.blocks") as pack:
        for path in _files(state):
            with path.open("rb") as stream:
                digests = list(_add(stream, pack, known, packed))
                file = StateFile(size=stream.tell(), blocks=tuple(digests))
            files[path.relative_to(state).as_posix()] = file
    return StateIndex(step=step, files=files, packed=tuple(packed))


def _add(stream: BinaryIO, pack: BinaryIO, known: set[str], packed: list[str]) -> Iterator[str]:
    """Yield the digest of each block of a file, and write new blocks to the pack."""
    while block := stream.read(BLOCK_BYTES):
        digest = hashlib.sha256(block).hexdigest()
        if digest not in known:
            # Added at once, because another file of this state may have the same block.
            known.add(digest)
            packed.append(digest)
            pack.write(block)
        yield digest


def _known_blocks(folder: Path) -> set[str]:
    """Return the digests of the blocks in the packs of the states kept before."""
    indexes = (StateIndex.model_validate_json(path.read_bytes()) for path in folder.glob("*.json"))
    return {digest for index in indexes for digest in index.packed}


def _files(state: Path) -> list[Path]:
    """Return the files of a state, sorted by path, without those of the evaluation."""
    return [
        path
        for path in sorted(state.rglob("*"))
        if path.is_file() and path.relative_to(state).parts[0] not in _OF_EVALUATION
    ]
