"""Pickles, read opcode by opcode: nothing is ever unpickled."""

from __future__ import annotations

import pickletools
import re
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, BinaryIO, NamedTuple, cast

from capsule.verification.content.parts import (
    SHOWN_CHARACTERS,
    Comparison,
    Context,
    Data,
    Findings,
    NotComparableError,
)
from capsule.verification.content.reading import Window
from capsule.verification.content.values import compare_leaves

MAX_OPCODES = 2_000_000
# Pickles of protocols 0 and 1 have no such beginning by which they could be recognised.
_PROTOCOLS = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))
# Their arguments, a length and a version, are no part of the value.
_FRAMING = frozenset({"FRAME", "PROTO"})
_FRAME_BYTES = 9  # of the opcode and its length
_PLAIN = re.compile(  # opcodes whose argument is a value; that of others selects one
    r"INT|BININT[12]?|LONG[14]?|(BIN)?FLOAT|(SHORT_)?(BIN)?STRING|(SHORT_)?(BIN)?UNICODE8?"
)
_STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
}


class _Opcode(NamedTuple):
    name: str
    argument: Any
    place: int


def compare_pickle(left: Data, right: Data, context: Context) -> Comparison:
    """Compare two pickles opcode by opcode, as long as both have the same ones."""
    found = Findings("pickle")
    label = "the beginning"
    pairs = zip_longest(_opcodes(left), _opcodes(right))
    for a, b in pairs:
        if a is None or b is None or a.name != b.name:
            found.differs(f"structure after {label}", (_described(a), _described(b)))
            break
        # The representations tell 0.0 from -0.0, and NaN is equal to itself.
        if repr(a.argument) != repr(b.argument) and a.name not in _FRAMING:
            where = f"{_kind(a.argument)} after {label}"
            if _PLAIN.fullmatch(a.name):
                compare_leaves(where, (a.argument, b.argument), found, context)
            else:
                found.differs(where, (a.argument, b.argument))
        # In a dictionary, the key comes before the value, and so names it.
        if isinstance(a.argument, str) and a.argument == b.argument:
            label = repr(a.argument[:SHOWN_CHARACTERS])
    return found.comparison()


def storage_types(data: Data) -> dict[str, str]:
    """Return the type of each storage that the pickle of a torch file refers to, by its key.

    Such a pickle refers to a storage by the tuple ('storage', torch.FloatStorage, key, place,
    elements), in protocol 2.
    """
    types: dict[str, str] = {}
    memo: dict[int, str] = {}
    last = ""  # type whose GLOBAL or GET was the last of all opcodes that name one
    named = ""  # type that awaits its key
    for opcode in _opcodes(data):
        if opcode.name == "GLOBAL":
            last = named = _STORAGES.get(str(opcode.argument).removeprefix("torch "), "")
        elif opcode.name in ("BINPUT", "LONG_BINPUT") and last:
            memo[opcode.argument] = last
        elif opcode.name in ("BINGET", "LONG_BINGET") and opcode.argument in memo:
            named = memo[opcode.argument]
        elif opcode.name == "BINUNICODE" and named:
            types[opcode.argument], named = named, ""
        if opcode.name != "GLOBAL":
            last = ""
    return types


def _opcodes(data: Data) -> Iterator[_Opcode]:
    """Yield the opcodes of a file that is one pickle.

    Raises:
        ValueError: It is not a pickle.
        NotComparableError: It has more than :data:`MAX_OPCODES`, frames that no reader accepts, or
            something else behind it.
    """
    if data[:2] not in _PROTOCOLS:
        raise NotComparableError("not a pickle")
    place = frame = 0  # where the last opcode begins, and where its frame ends
    stream = cast("BinaryIO", Window(data))
    for count, (opcode, argument, at) in enumerate(pickletools.genops(stream), 1):
        if count > MAX_OPCODES:
            raise NotComparableError(f"more than {MAX_OPCODES:,} opcodes")
        # A reader loads frames as a whole (PEP 3154), and stops at one that ends within an opcode,
        # within another frame or behind the file.
        last, place = place, at or 0
        if last < frame < place or (opcode.name == "FRAME" and place < frame):
            raise NotComparableError("a frame that ends elsewhere")
        if opcode.name == "FRAME":
            frame = place + _FRAME_BYTES + int(argument or 0)
        yield _Opcode(opcode.name, argument, place)
    # The last opcode is STOP, of one byte.
    if place + 1 != len(data):
        raise NotComparableError("bytes behind the pickle")
    if frame > len(data):
        raise NotComparableError("a frame that ends elsewhere")


def _described(opcode: _Opcode | None) -> str:
    return "end" if opcode is None else f"{opcode.name} at byte {opcode.place:,}"


def _kind(argument: Any) -> str:
    return {str: "text", int: "number", float: "number", bytes: "bytes"}.get(
        type(argument), "value"
    )
