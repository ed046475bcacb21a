"""Arrays: files of numpy, and safetensors files."""

from __future__ import annotations

import json
import math
import re
import struct
from typing import Any, BinaryIO, cast

from capsule.host.errors import CapsuleError
from capsule.host.wording import agreeing, counted
from capsule.verification.content.parts import (
    Comparison,
    Context,
    Data,
    Findings,
    NotComparableError,
)
from capsule.verification.content.reading import Window
from capsule.verification.content.tensor_comparison import Tensor, compare_tensor
from capsule.verification.content.values import compare_values
from capsule.verification.integrity.tensors import MAX_HEADER_BYTES, tensors_of

NUMPY_MAGIC = b"\x93NUMPY"
_NUMPY_VERSIONS = (b"\1\0", b"\2\0", b"\3\0")
_MAX_NUMPY_HEADER = 64 << 10
# The header is a literal of Python, and is matched instead of evaluated. The pattern has only what
# numpy writes for plain types; that of objects ('|O') has no size and does not match.
_HEADER = re.compile(
    rb"\{'descr': '([<>|])([a-zA-Z])(\d{1,4})', 'fortran_order': (?:True|False), "
    rb"'shape': \(((?:\d{1,19}, ?)*\d{0,19})\), ?\} *\n"
)
_KINDS = {"f": "F", "i": "I", "u": "U", "b": "BOOL"}


def compare_numpy(left: Data, right: Data, _context: Context) -> Comparison:
    """Compare two files in the format of numpy (NEP 1)."""
    found = Findings("numpy array")
    (head, array), (other_head, other) = _array(left), _array(right)
    if head != other_head:
        heads = head.decode("latin-1").strip(), other_head.decode("latin-1").strip()
        found.differs("header", heads)
    else:
        note_tensors("elements", array, other, found)
    return found.comparison()


def compare_safetensors(left: Data, right: Data, context: Context) -> Comparison:
    """Compare two safetensors files, tensor by tensor, and their metadata."""
    found = Findings("safetensors")
    before, after = _tensors(left), _tensors(right)
    for name in dict.fromkeys([*before, *after]):
        note_tensors(name, before.get(name), after.get(name), found)
    metadata = _metadata(left), _metadata(right)
    if metadata[0] != metadata[1]:
        compare_values("metadata", *metadata, found, context)
    return found.comparison()


def note_tensors(name: str, left: Tensor | None, right: Tensor | None, found: Findings) -> None:
    """Note two tensors of one name as equal or not, with how far apart they are."""
    if left is None or right is None or (left.dtype, left.shape) != (right.dtype, right.shape):
        found.differs(name, (_described(left), _described(right)))
        return
    difference = compare_tensor(name, left, right)
    if difference is None:
        found.same(name)
        return
    size = "" if difference.ulp is None else f", up to {difference.ulp:,} ulp apart"
    differ = agreeing(difference.differing, "differs", "differ")
    elements = counted(difference.elements, "element")
    apart = f"{difference.differing:,} of {elements} {differ}{size}"
    found.differs(name, (_described(left), apart))


def _described(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _array(data: Data) -> tuple[bytes, Tensor]:
    """Return header and elements of a file of numpy."""
    # An array that is stored in two versions of the format is the same. No reader takes others.
    if data[:6] != NUMPY_MAGIC or data[6:8] not in _NUMPY_VERSIONS or len(data) < 12:
        raise NotComparableError("no such file")
    # NEP 1: the length has two bytes in version 1 of the format, and four in later ones.
    width = 2 if data[6] == 1 else 4
    length = int.from_bytes(data[8 : 8 + width], "little")
    head = data[8 + width : 8 + width + min(length, _MAX_NUMPY_HEADER)]
    match = _HEADER.fullmatch(head)
    if match is None:
        raise NotComparableError("an array of a structured type, or of objects")
    order, kind, size = match[1].decode(), match[2].decode(), int(match[3])
    shape = tuple(int(part) for part in match[4].split(b",") if part.strip())
    # The file may be mapped and large, so this is a view.
    body = memoryview(data)[8 + width + length :]
    if len(body) != math.prod(shape) * size:
        raise NotComparableError("cut off")
    # The names are those of safetensors, so that floats get a distance. Big-endian numbers have a
    # name of their own, and no distance.
    name = _KINDS.get(kind, kind) + ("" if kind == "b" else str(size * 8))
    return head, Tensor(name if order != ">" else f"{name}, big-endian", shape, body)


def _tensors(data: Data) -> dict[str, Tensor]:
    with Window(data) as stream:
        try:
            entries = tensors_of(cast("BinaryIO", stream), len(data), "file")
        except CapsuleError as error:
            raise NotComparableError(error.message) from error
        body = memoryview(data)[stream.tell() :]
    return {
        each.name: Tensor(each.dtype, each.shape, body[each.start : each.end]) for each in entries
    }


def _metadata(data: Data) -> Any:
    # By now _tensors() has checked this header: it has no name twice.
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + min(length, MAX_HEADER_BYTES)]).get("__metadata__", {})
