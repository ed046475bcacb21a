"""Reading layers that :func:`capsule.image.archives.layers.write_tar` wrote, and nothing else.

Untrusted bundles carry layers. These are never given to a general tar parser: each header block
is read, written again from what it says, and compared, so that an archive has one reading only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import BinaryIO

from capsule.host.errors import CapsuleError
from capsule.image.archives.layers import (
    BLOCK,
    MAX_PATH_BYTES,
    TYPES,
    TarEntry,
    rejected,
    safe_path,
    slice_of,
    tar_header,
)

_MAX_EXTENDED_BYTES = 2 * MAX_PATH_BYTES + 256  # of an extended header: two paths, and a number
_KINDS = {flag: kind for kind, flag in TYPES.items()}
_MODES = {"symlink": {0o777}, "directory": {0o755, 0o1777}, "file": set(range(0o1000))}
_RECORD = re.compile(rb"([0-9]{1,5}) (path|linkpath|size)=")


def read_layer(stream: BinaryIO, owner: str) -> Iterator[TarEntry]:
    """Yield the entries of a canonical layer archive that fills ``stream``.

    Contents are read from ``stream`` when asked for, so it must stay open.

    Args:
        stream: Can be sought in.
        owner: What to call the layer in messages.

    Raises:
        CapsuleError: CAP-I110 the archive is not what :func:`write_tar` writes, CAP-I107 an unsafe
            path.
    """
    end = stream.seek(0, os.SEEK_END)
    position, previous = 0, b""
    folders = {""}
    while True:
        stream.seek(position)
        entry, header = _entry(stream, owner)
        if entry is None:
            break
        path = entry.path.encode()
        # Strictly ascending: of a path that is there twice, some readers keep the first and others
        # the last.
        if path <= previous or safe_path(entry.path, owner) != entry.path:
            raise _not_canonical(owner, position)
        # write_tar() writes every parent before what is in it. If a parent could be missing, adding
        # those of long paths would take a thousand times the memory of the archive.
        if entry.path.rpartition("/")[0] not in folders:
            raise _not_canonical(owner, position)
        if entry.kind == "directory":
            folders.add(entry.path)
        previous = path
        content = position + header
        padding = -entry.size % BLOCK
        position = content + entry.size + padding
        # No stream can be sought to the position that an extended header may name.
        if position > end:
            raise _not_canonical(owner, content)
        stream.seek(position - padding)
        if any(stream.read(padding)):
            raise _not_canonical(owner, content)
        yield TarEntry(**{**vars(entry), "content": slice_of(stream, content, entry.size)})
    # The second zero block and nothing else, for archivers would ignore what follows.
    if stream.read(BLOCK + 1) != bytes(BLOCK):
        raise _not_canonical(owner, position)


def _entry(stream: BinaryIO, owner: str) -> tuple[TarEntry | None, int]:
    """Read one header; return its entry, None at the end, and its length in bytes."""
    start = stream.tell()
    header = block = stream.read(BLOCK)
    if block == bytes(BLOCK):
        return None, BLOCK
    try:
        records: dict[bytes, bytes] = {}
        if block[156:157] == b"x":
            size = _octal(block[124:135])
            if size > _MAX_EXTENDED_BYTES:
                raise ValueError(f"extended header of {size} bytes")
            extended = stream.read(size + -size % BLOCK)
            records = _records(extended[:size])
            block = stream.read(BLOCK)
            header += extended + block
        entry = _described(block, records, owner)
        if tar_header(entry) != header:
            raise ValueError("another header than these facts have")
    except (ValueError, KeyError) as error:
        raise _not_canonical(owner, start) from error
    return entry, len(header)


def _described(block: bytes, records: dict[bytes, bytes], owner: str) -> TarEntry:
    kind, mode = _KINDS[block[156:157]], _octal(block[100:107])
    if mode not in _MODES[kind]:
        raise ValueError(f"mode {mode:o}")
    name = records.get(b"path", block[:100].rstrip(b"\0")).decode()
    target = records.get(b"linkpath", block[157:257].rstrip(b"\0")).decode()
    size = int(records[b"size"]) if b"size" in records else _octal(block[124:135])
    if (kind == "symlink") != bool(target) or "\0" in target:
        raise ValueError(f"a {kind} with the target {target[:100]!a}")
    if len(target.encode()) >= MAX_PATH_BYTES:
        raise ValueError("a target longer than any path")
    if kind != "file" and size:
        raise ValueError(f"a {kind} of {size} bytes")
    path = name.removesuffix("/") if kind == "directory" else name
    return TarEntry(path, owner, kind, mode, size, target=target)


def _octal(digits: bytes) -> int:
    if not re.fullmatch(rb"[0-7]+", digits):
        raise ValueError(f"not octal: {digits!r}")
    return int(digits, 8)


def _records(data: bytes) -> dict[bytes, bytes]:
    """Return the records of an extended header (IEEE Std 1003.1-2017, pax)."""
    records, position = {}, 0
    while position < len(data):
        found = _RECORD.match(data, position)
        if found is None:
            raise ValueError("not a record")
        end = position + int(found[1])
        records[found[2]] = data[found.end() : end - 1]
        # A record may state a length shorter than itself, which must not keep the loop from
        # advancing. The comparison of headers rejects it afterwards.
        position = max(end, found.end())
    return records


def _not_canonical(owner: str, position: int) -> CapsuleError:
    return rejected(
        "CAP-I110",
        f"{owner} is not in canonical form at byte {position}",
        "Ask for an unmodified bundle, or build the image from the lock alone.",
    )
