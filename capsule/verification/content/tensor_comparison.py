"""Comparing the tensors of two checkpoints, in little memory: files are mapped, not read."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from capsule.experiment.files import open_regular
from capsule.host.errors import coded
from capsule.verification.content.ulp import Distance, Width
from capsule.verification.integrity.tensors import tensors_of
from capsule.verification.verdict import TensorDifference

PIECE_BYTES = 1 << 20
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
    """Map a safetensors file; it stays mapped while one of its tensors is in use.

    Raises:
        CapsuleError: CAP-V011, it breaks the format; CAP-V072, it cannot be mapped.
    """
    what, fix = f"{path.name} cannot be read", "Copy it from its bundle or run directory again."
    with coded("CAP-V072", what, fix=fix), open_regular(path, follow=False) as stream:
        size = os.fstat(stream.fileno()).st_size
        entries = tensors_of(stream, size, path.name)
        data = memoryview(mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_READ))
        body = data[stream.tell() :]
    return {
        each.name: Tensor(each.dtype, each.shape, body[each.start : each.end]) for each in entries
    }


def compare_tensors(first: Path, second: Path) -> tuple[TensorDifference, ...]:
    """Compare two files tensor by tensor; those that differ, most distant first.

    Raises:
        CapsuleError: CAP-V011, CAP-V072.
    """
    left, right = map_tensors(first), map_tensors(second)
    names = dict.fromkeys([*left, *right])
    found = [compare_tensor(name, left.get(name), right.get(name)) for name in names]
    differing = [item for item in found if item is not None]
    # Tensors without a distance, for example of another shape, come before all others.
    return tuple(sorted(differing, key=lambda item: -math.inf if item.ulp is None else -item.ulp))


def compare_tensor(name: str, left: Tensor | None, right: Tensor | None) -> TensorDifference | None:
    """Compare two tensors of one name, one of which may be missing; None if they are equal."""
    if left is None or right is None or (left.dtype, left.shape) != (right.dtype, right.shape):
        elements = max(each.elements for each in (left, right) if each is not None)
        return TensorDifference(name=name, elements=elements, differing=elements)
    if left.data == right.data:
        return None
    width = _WIDTHS.get(left.dtype)
    if width is None:
        # There is at least one element: the data of empty tensors are equal.
        size = len(left.data) // left.elements
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
