"""Choosing by the bytes of two files in which format they are compared."""

from __future__ import annotations

import lzma
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator

from capsule.verification.content import (
    arrays,
    events,
    gzips,
    pickles,
    texts,
    zips,
)
from capsule.verification.content.binary import compare_binary
from capsule.verification.content.parts import (
    MAX_DEPTH,
    Comparison,
    Context,
    Data,
    NotComparableError,
)

Compare = Callable[[Data, Data, Context], Comparison]

_BY_MAGIC: tuple[tuple[bytes, Compare], ...] = (
    (zips.MAGIC, zips.compare_zip),
    (gzips.MAGIC, gzips.compare_gzip),
    (arrays.NUMPY_MAGIC, arrays.compare_numpy),
    (b"\x80", pickles.compare_pickle),
    (b"{", texts.compare_json),
    (b"[", texts.compare_json),
    # This comes after compare_json, which rejects a text of several objects.
    (b"{", texts.compare_json_lines),
)
_BY_SUFFIX: dict[str, Compare] = {".csv": texts.compare_csv}
# These are ordered from the strictest form to the loosest: nearly every file in UTF-8 is a text.
_BY_TRIAL: tuple[Compare, ...] = (
    arrays.compare_safetensors,
    events.compare_events,
    texts.compare_text,
)
# What a parser raises at a file that is not of its format. RecursionError is a RuntimeError, which
# zipfile also raises at an encrypted member.
_REFUSALS = (
    NotComparableError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    lzma.LZMAError,
    EOFError,
    NotImplementedError,
    OSError,
    OverflowError,
    RuntimeError,
    ValueError,
)


def compare_content(name: str, left: Data, right: Data, context: Context) -> Comparison:
    """Compare two files with different bytes, in the most telling format that both are of.

    Args:
        name: What the file is called; its suffix tells tables from texts.
        left: The recorded file.
        right: That of the re-execution.
        context: When the runs took place, and how much may be unpacked.
    """
    if context.depth <= MAX_DEPTH:
        for compare in _candidates(name, left, right):
            try:
                return compare(left, right, context)
            except _REFUSALS:
                continue
    return compare_binary(left, right, context)


def _candidates(name: str, left: Data, right: Data) -> Iterator[Compare]:
    for magic, compare in _BY_MAGIC:
        if left[: len(magic)] == magic == right[: len(magic)]:
            yield compare
    for suffix, compare in _BY_SUFFIX.items():
        if name.endswith(suffix):
            yield compare
    yield from _BY_TRIAL
