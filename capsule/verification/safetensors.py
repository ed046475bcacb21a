"""Reading safetensors files without a tensor library, and comparing two of them.

The format: a little-endian 64-bit length, a JSON header of that length, and the tensors' bytes,
which the header names by dtype, shape and place (https://huggingface.co/docs/safetensors,
"Format"). Files are mapped: a checkpoint takes no memory but for the piece that is looked at.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capsule.experiment.canonical import open_regular
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.verification.ulp import Distance, Width
from capsule.verification.verdict import TensorDifference

MAX_HEADER_BYTES = 1 << 24
MAX_TENSORS = 100_000
PIECE_BYTES = 1 << 20
_SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
_WIDTHS: Mapping[str, Width] = {"F32": 32, "F64": 64}


@dataclass(frozen=True)
class Tensor:
    """One tensor of a mapped file.

    Attributes:
        dtype: As the format calls it: ``F32``, ``I64``, …
        shape: Sizes of the dimensions.
        data: The elements, row-major, little-endian.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def map_tensors(path: Path) -> dict[str, Tensor]:
    """Map a file and return its tensors by name; it stays mapped while one of them is in use.

    Raises:
        CapsuleError: CAP-V072, it cannot be read, or breaks the format: the tensors must fill the
            file without gap or overlap.
    """
    try:
        with open_regular(path, os.O_NOFOLLOW) as stream:
            return _tensors(memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CapsuleError(
            "CAP-V072",
            f"{path.name} is not a well-formed safetensors file: {error}",
            fix="Take it from its run directory or bundle again; do not trust who gave it.",
            exit_code=ExitCode.TAMPERED,
        ) from error


def compare_tensors(first: Path, second: Path) -> tuple[TensorDifference, ...]:
    """Compare two files tensor by tensor; those that differ, most distant first.

    Raises:
        CapsuleError: CAP-V072.
    """
    left, right = map_tensors(first), map_tensors(second)
    names = dict.fromkeys([*left, *right])
    found = [_difference(name, left.get(name), right.get(name)) for name in names]
    differing = [item for item in found if item is not None]
    return tuple(sorted(differing, key=lambda item: -math.inf if item.ulp is None else -item.ulp))


def _difference(name: str, left: Tensor | None, right: Tensor | None) -> TensorDifference | None:
    if left is None or right is None or (left.dtype, left.shape) != (right.dtype, right.shape):
        elements = max(each.elements for each in (left, right) if each is not None)
        return TensorDifference(name=name, elements=elements, differing=elements)
    if left.data == right.data:
        return None
    width = _WIDTHS.get(left.dtype)
    if width is None:
        size = _SIZES[left.dtype]
        places = range(0, len(left.data), size)
        count = sum(left.data[at : at + size] != right.data[at : at + size] for at in places)
        return TensorDifference(name=name, elements=left.elements, differing=count)
    total = Distance()
    for start in range(0, len(left.data), PIECE_BYTES):
        pieces = left.data[start : start + PIECE_BYTES], right.data[start : start + PIECE_BYTES]
        total.add(*pieces, width)
    return TensorDifference(
        name=name,
        elements=total.elements,
        differing=total.differing,
        nonfinite=total.nonfinite,
        ulp=total.ulp,
        relative=total.relative,
    )


def _tensors(data: memoryview) -> dict[str, Tensor]:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(MAX_HEADER_BYTES, len(data) - 8):
        raise ValueError(f"a header of {length} bytes in {len(data)}")
    header = json.loads(bytes(data[8 : 8 + length]), object_pairs_hook=_unique)
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise ValueError(f"{len(header)} tensors")
    body = data[8 + length :]
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        if type(start) is not int or type(stop) is not int or start != end or stop > len(body):
            raise ValueError(f"tensor {name!r} at {start}:{stop}, after {end} of {len(body)} bytes")
        if stop - start != _size(entry):
            raise ValueError(f"tensor {name!r} has {stop - start} bytes, not {_size(entry)}")
        end = stop
    if end != len(body):
        raise ValueError(f"{len(body) - end} bytes belong to no tensor")
    return {name: _tensor(entry, body) for name, entry in header.items()}


def _tensor(entry: Mapping[str, Any], body: memoryview) -> Tensor:
    start, stop = entry["data_offsets"]
    return Tensor(entry["dtype"], tuple(entry["shape"]), body[start:stop])


def _size(entry: Mapping[str, Any]) -> int:
    if any(type(size) is not int or size < 0 for size in entry["shape"]):
        raise ValueError(f"shape {entry['shape']}")
    elements: int = math.prod(entry["shape"])
    return elements * _SIZES[entry["dtype"]]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name occurs twice")
    return dict(pairs)
