"""The tensors of a checkpoint, digested without a tensor library and in little memory."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from capsule.experiment import contract
from capsule.experiment.canonical import MAX_SAFE_INTEGER
from capsule.experiment.files import open_regular
from capsule.host.errors import CapsuleError
from capsule.host.wording import counted

MAX_HEADER_BYTES = 4 << 20
MAX_DIMENSIONS = 16
_CHUNK = 1 << 20
_LENGTH_BYTES = 8
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


class TensorEntry(NamedTuple):
    """An entry of the header; ``start`` and ``end`` in bytes from its end."""

    start: int
    end: int
    name: str
    dtype: str
    shape: tuple[int, ...]


def tensor_digests(path: Path) -> dict[str, str]:
    """Digest every tensor of a safetensors file: :func:`digests_of`."""
    with open_regular(path) as stream:
        return digests_of(stream, path.stat().st_size, path.name)


def digests_of(stream: BinaryIO, size: int, name: str) -> dict[str, str]:
    """Digest every tensor of a stream in the safetensors format.

    The tensors must lie one behind the other and fill the file, as the format has it. So each byte
    is read once.

    Args:
        stream: Stands at the beginning.
        size: How many bytes it holds.
        name: What to call it in an error.

    Returns:
        Tensor name to SHA-256 over dtype, shape and little-endian bytes, as
        :class:`capsule.experiment.contract.Checkpoint` defines it.

    Raises:
        CapsuleError: CAP-V011, not a well-formed safetensors file.
    """
    with _rejected(name):
        return {tensor.name: _digest(tensor, stream) for tensor in _entries(stream, size)}


def tensors_of(stream: BinaryIO, size: int, name: str) -> list[TensorEntry]:
    """Return the tensors of a stream in the order of their places, which follow upon each other.

    Afterwards the stream is at the first one; :func:`digests_of` has the arguments.

    Raises:
        CapsuleError: CAP-V011, not a well-formed safetensors file.
    """
    with _rejected(name):
        return _entries(stream, size)


@contextmanager
def _rejected(name: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise CapsuleError(
            "CAP-V011",
            f"{name} is not a well-formed safetensors file: {error}",
            fix="Do not trust this bundle; ask its signer for a consistent one.",
        ) from error


def _entries(stream: BinaryIO, size: int) -> list[TensorEntry]:
    length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
    # Eight bytes can announce 16 EiB, so this stands before the read that would allocate them.
    if length > min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
        raise ValueError(f"header of {length} bytes")
    # Entries are sorted by start and then by end, so that an empty tensor comes before the one that
    # begins at the same place.
    tensors = sorted(_tensors(stream.read(length)))
    _check_tiling(tensors, size - _LENGTH_BYTES - length)
    return tensors


def _tensors(header: bytes) -> list[TensorEntry]:
    if not header.startswith(b"{"):
        raise ValueError("its header is not an object")
    entries: dict[str, Any] = json.loads(header, object_pairs_hook=_without_duplicates)
    return [_tensor(name, entry) for name, entry in entries.items() if name != "__metadata__"]


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Python keeps the last of two equal names and other readers may keep the first: one file would
    # be two checkpoints.
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("its header has a name twice")
    return entries


def _tensor(name: str, entry: Any) -> TensorEntry:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!a} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    # A tuple, because a dictionary would hash what it looks for, and a list from the file has no
    # hash.
    if dtype not in tuple(_BITS) or not _are_sizes(shape) or not _are_sizes(offsets):
        raise ValueError(f"{name!a} has a dtype, shape or offset that does not exist")
    if len(offsets) != 2 or len(shape) > MAX_DIMENSIONS:
        sizes = f"{counted(len(offsets), 'offset')} and {counted(len(shape), 'dimension')}"
        raise ValueError(f"{name!a} has {sizes}")
    start, end = offsets
    # Offsets that run backwards give a negative number, which no shape has.
    if (end - start) * 8 != math.prod(shape) * _BITS[dtype]:
        raise ValueError(f"{name!a} has {counted(end - start, 'byte')}, unlike its dtype and shape")
    return TensorEntry(start, end, name, dtype, tuple(shape))


def _are_sizes(value: Any) -> bool:
    # By type, because isinstance would take true and false for numbers.
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item <= MAX_SAFE_INTEGER for item in value
    )


def _check_tiling(tensors: list[TensorEntry], size: int) -> None:
    # Gaps would be bytes that no digest covers, and overlaps bytes that several tensors share.
    position = 0
    for tensor in tensors:
        if tensor.start != position:
            raise ValueError(f"{tensor.name!a} begins at {tensor.start}, not at {position}")
        position = tensor.end
    if position != size:
        raise ValueError(f"its tensors end at {position:,} of {counted(size, 'byte')}")


def _digest(tensor: TensorEntry, stream: BinaryIO) -> str:
    digest = hashlib.sha256(contract.tensor_header(tensor.dtype, tensor.shape))
    missing = tensor.end - tensor.start
    while missing:
        chunk = stream.read(min(missing, _CHUNK))
        if not chunk:
            raise ValueError("it is cut off")
        digest.update(chunk)
        missing -= len(chunk)
    return digest.hexdigest()
