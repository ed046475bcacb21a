"""The states that a bundle's segments begin with: read, checked and laid out within bounds.

They are untrusted. Nothing in a state is taken on trust: its index must fit a closed model, its
blocks their digests, its tensors the claimed checkpoint, its place in the trace the recorded chain
and its random streams the claimed keys. What no claim covers (the replay memory, the
environments) is what the training code makes of it, inside the container; that an honest run
reaches it from the state before is shown by executing the segment that ends with it. The digest of
the replay memory in a state is XXH3-128, for which anyone can compute another memory of the same
digest: that the memory is the one reached is therefore shown by the SHA-256 of its files' blocks.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from capsule.bundle.archive import create_file
from capsule.bundle.manifest import parse_document
from capsule.bundle.run_bundle import STREAMS, RecordedRun, state_members
from capsule.experiment import contract
from capsule.experiment.beneath import open_beneath
from capsule.experiment.canonical import MAX_DOCUMENT_BYTES, sha256_hex
from capsule.experiment.contract import Checkpoint, StreamProfiles
from capsule.experiment.states import BLOCK_BYTES, RESUME, ResumeState, StateFile, StateIndex
from capsule.experiment.trace import Mark
from capsule.host.errors import CapsuleError
from capsule.verification.integrity.layers import MAX_WINDOW_BYTES
from capsule.verification.integrity.tensors import tensor_digests

REPLAY = "replay/"  # the folder of a state with the files of the replay memory
Places = dict[str, list[tuple[str, int]]]  # digest of a block to path and offset of each copy


def lay_out(
    run: RecordedRun,
    steps: Sequence[int],
    directory: Path,
    *,
    only: Container[str] | None = None,
) -> None:
    """Write the files of a state into a folder.

    Args:
        run: The recorded run. The disk limit of its lock bounds what is written.
        steps: Agent steps of all states from the first to this one, in order.
        directory: An existing, empty, private folder.
        only: The files to write; None: all of them.

    Raises:
        CapsuleError: CAP-V061 (exit status 3), the state is malformed; CAP-B144, a member is
            missing or no canonical document of its kind.
    """
    members = [state_members(step) for step in steps]
    indexes = [run.bundle.read(index, StateIndex) for index, _ in members]
    name, index = members[-1][0], indexes[-1]
    if [each.step for each in indexes] != list(steps):
        raise bad_state(name, "or an earlier one is of another step")
    # This is checked before a file is made, and for the whole state even if only a part of it is
    # wanted.
    if index.size > run.lock.spec.limits.disk_mb << 20:
        raise bad_state(name, f"has {index.size} bytes, more than limits.disk_mb")
    files = {path: file for path, file in index.files.items() if only is None or path in only}
    _make_files(files, name, directory)
    places = _places(files)
    for (_, pack), each in zip(members, indexes, strict=True):
        # A pack has only blocks that no earlier one has, so this state's may be in any of them.
        # Those with none of its blocks are not unpacked.
        if places.keys() & {*each.packed}:
            _unpack(run.bundle.member(pack), pack, each, places, directory)
    if places:
        raise bad_state(name, f"lacks block {min(places)}")


def read_resume(directory: Path, name: str) -> ResumeState:
    """Read the document of a state in a folder.

    Raises:
        CapsuleError: CAP-V061, there is none, or it is malformed.
    """
    path = directory / RESUME
    if not path.is_file() or path.stat().st_size > MAX_DOCUMENT_BYTES:
        raise bad_state(name, f"has no {RESUME}, or one of more than {MAX_DOCUMENT_BYTES} bytes")
    return parse_document(path.read_bytes(), ResumeState, f"{RESUME} of {name}", "CAP-V061")


def other_memory(run: RecordedRun, step: int, directory: Path) -> Iterator[str]:
    """Yield the files of the replay memory in a state that are not those that an execution left.

    Args:
        run: The recorded run.
        step: The state's.
        directory: The run directory of the execution, which ended at this step.
    """
    index = run.bundle.read(state_members(step)[0], StateIndex)
    for path, file in index.files.items():
        if path.startswith(REPLAY) and not _is_file(file, directory, f"{contract.STATE}/{path}"):
            yield path


def _is_file(file: StateFile, directory: Path, path: str) -> bool:
    try:
        with open_beneath(directory, path) as stream:
            equal = all(sha256_hex(stream.read(BLOCK_BYTES)) == block for block in file.blocks)
            return equal and not stream.read(1)
    except OSError:
        return False


def check_state(
    run: RecordedRun,
    checkpoints: tuple[Checkpoint, ...],
    mark: Mark,
    directory: Path,
) -> None:
    """Check that a state in a folder is that of the last of ``checkpoints``.

    Args:
        run: The recorded run.
        checkpoints: The claimed ones, in order, up to the state's.
        mark: The end of the recorded trace at that checkpoint.
        directory: The state.

    Raises:
        CapsuleError: CAP-V061, it is of another spec, step, place in the trace, random streams or
            tensors.
    """
    checkpoint = checkpoints[-1]
    name, _ = state_members(checkpoint.step)
    resume = read_resume(directory, name)
    tensors = directory / f"tensors-{checkpoint.step}.safetensors"
    if not tensors.is_file():
        raise bad_state(name, f"has no {tensors.name}")
    place = {"head": mark.head, "offset": mark.offset, "records": mark.records}
    try:
        content = tensor_digests(tensors)
    except CapsuleError as error:
        raise bad_state(name, f"has a malformed file: {error.message}") from error
    # Keys are looked up by the names in the state. A name that is not claimed gets None, and so
    # differs.
    profiles = run.bundle.read(STREAMS, StreamProfiles).streams
    keys = {profile.name: profile.key for profile in profiles}
    facts: dict[str, tuple[Any, Any]] = {
        "spec": (run.lock.spec.digest(), resume.spec),
        "step": (checkpoint.step, resume.step),
        "checkpoints": (checkpoints, resume.checkpoints),
        "trace head": (checkpoint.trace_head, mark.head),
        "place in the trace": (place, {key: resume.trace.get(key) for key in place}),
        "keys of random streams": (
            {stream: keys.get(stream) for stream in resume.streams},
            {stream: state.get("key") for stream, state in resume.streams.items()},
        ),
        "tensors": (checkpoint.tensors, resume.tensors),
        f"content of {tensors.name}": (checkpoint.tensors, content),
    }
    for fact, (claimed, found) in facts.items():
        if claimed != found:
            raise bad_state(
                name, f"is not of the claimed checkpoint at step {checkpoint.step}: another {fact}"
            )


def _make_files(files: Mapping[str, StateFile], name: str, directory: Path) -> None:
    """Make every file with its size and without content."""
    for path, file in files.items():
        try:
            with create_file(directory, path) as stream:
                # A hole takes no space on the disk, and the sum of the sizes was bounded before.
                stream.truncate(file.size)
        except (FileExistsError, NotADirectoryError) as error:
            raise bad_state(name, f"has {path!a} as a file and as a folder") from error


def _places(files: Mapping[str, StateFile]) -> Places:
    """Return path and offset of every place of each block."""
    places: Places = {}
    for path, file in files.items():
        for number, digest in enumerate(file.blocks):
            places.setdefault(digest, []).append((path, number * BLOCK_BYTES))
    return places


def _unpack(pack: Path, member: str, index: StateIndex, places: Places, directory: Path) -> None:
    """Write the blocks of a pack to their places, and remove these from ``places``."""
    sizes = index.block_sizes()
    # Every block of a pack is read and checked, also those that belong to other files.
    wanted = [(digest, sizes[digest]) for digest in index.packed]
    for digest, block in _blocks(pack, member, wanted):
        for path, offset in places.pop(digest, ()):
            with (directory / path).open("r+b") as stream:
                stream.seek(offset)
                stream.write(block)


def _blocks(
    path: Path, member: str, wanted: Sequence[tuple[str, int]]
) -> Iterator[tuple[str, bytes]]:
    """Yield digest and content of blocks of these digests and sizes: all blocks of a pack."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    with path.open("rb") as packed, decompressor.stream_reader(packed) as reader:
        try:
            for digest, size in wanted:
                block = reader.read(size)
                if len(block) != size or sha256_hex(block) != digest:
                    raise bad_state(member, f"contains something other than block {digest}")
                yield digest, block
            # The index announces every byte of the pack.
            if reader.read(1):
                raise bad_state(member, "continues after its last block")
        except zstandard.ZstdError as error:
            raise bad_state(member, f"cannot be unpacked: {error}") from error


def bad_state(member: str, reason: str) -> CapsuleError:
    """Return the error of a state that is not the claimed one."""
    return CapsuleError(
        "CAP-V061",
        f"{member} {reason}",
        fix="Do not trust this bundle; ask its signer for a valid one.",
    )
