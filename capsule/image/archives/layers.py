"""Layers: deterministic tar archives of files, directories and symbolic links.

Equal entries always give equal bytes: POSIX ustar headers (IEEE Std 1003.1-2017,
``pax``), a pax record only where ustar cannot say it, sorted by UTF-8 path, one fixed time, owner
0:0, directories 0755 (or 1777), no hard links, no devices, no setuid or setgid bits.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Literal

from capsule.experiment.files import open_regular
from capsule.host.encoding import is_utf8
from capsule.host.errors import CapsuleError
from capsule.host.wording import counted

EPOCH = 1_577_836_800  # 2020-01-01T00:00:00Z: the time of every file in every image
CHUNK = 1 << 20
MAX_PATH_BYTES, MAX_NAME_BYTES = 4096, 255  # PATH_MAX and NAME_MAX of Linux

Kind = Literal["file", "symlink", "directory"]
TYPES: dict[Kind, bytes] = {"file": b"0", "symlink": b"2", "directory": b"5"}
BLOCK = 512
_USTAR_LIMIT = 8**11  # first size that eleven octal digits cannot hold

Content = Callable[[], Iterator[bytes]]
Write = Callable[[bytes], object]


def _empty() -> Iterator[bytes]:
    return iter(())


@dataclass(frozen=True)
class TarEntry:
    """One path of a layer.

    Attributes:
        path: Relative POSIX path, as :func:`safe_path` returns it.
        owner: What brings it, for messages: a package's file name, ``recipe`` or ``capsule``.
        kind: What it is.
        mode: Permission bits.
        size: Bytes of a file's content.
        content: Yields a file's content; may raise at its end, if it is not what was recorded.
        target: Where a symbolic link points.
        sha256: Digest that ``content`` itself checks, if it does.
    """

    path: str
    owner: str
    kind: Kind
    mode: int = 0o755
    size: int = 0
    content: Content = _empty
    target: str = ""
    sha256: str | None = None


def file_entry(path: str, owner: str, data: bytes, mode: int = 0o644) -> TarEntry:
    """Return the entry of a small file."""
    return TarEntry(path, owner, "file", mode, len(data), lambda: iter((data,)))


def safe_path(name: str, owner: str) -> str:
    """Return ``name`` as a plain relative path; ``""`` is the root itself.

    Raises:
        CapsuleError: CAP-I107, it is not one (:func:`plain_path`).
    """
    try:
        return plain_path(name)
    except ValueError as error:
        raise rejected("CAP-I107", f"{owner} contains the unsafe path {name!r}: {error}") from error


def plain_path(name: str) -> str:
    """Return ``name`` as a plain relative path; ``""`` is the root itself.

    Raises:
        ValueError: ``name`` is absolute, climbs out, is not UTF-8, holds a NUL or a line break, or
            is too long for a file system.
    """
    parts = name.removeprefix("./").rstrip("/").split("/")
    if parts in ([""], ["."]) and not name.startswith("/"):
        return ""
    if any(part in {"", ".", ".."} for part in parts):
        raise ValueError("it is not a plain relative path")
    if any(character in name for character in "\0\n\r"):
        raise ValueError("it has a NUL character or a line break")
    if not is_utf8(name):
        raise ValueError("it is not UTF-8")
    if len(name.encode()) > MAX_PATH_BYTES:
        raise ValueError(f"it has more than {MAX_PATH_BYTES:,} bytes")
    if any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
        raise ValueError(f"a name in it has more than {MAX_NAME_BYTES} bytes")
    return "/".join(parts)


def write_tar(entries: Iterable[TarEntry], write: Write) -> dict[str, str]:
    """Write one layer.

    Args:
        entries: In any order; parent directories may be left out; what several packages bring
            alike is written once.
        write: Takes the bytes of the tar archive, piece by piece.

    Returns:
        Path to fact (``directory``, ``symlink TARGET`` or ``file MODE SHA256``), for
        :func:`reject_collisions` between layers.

    Raises:
        CapsuleError: CAP-I109 two packages bring the same path differently; and whatever an
            entry's content raises.
    """
    facts: dict[str, str] = {}
    for entry in _merged(entries):
        write(tar_header(entry))
        facts[entry.path] = _write_content(entry, write)
    # Two blocks of zeros end a tar archive (IEEE Std 1003.1-2017, pax).
    write(bytes(2 * BLOCK))
    return facts


def tar_header(entry: TarEntry) -> bytes:
    """Return the header block of ``entry``, behind a pax header where ustar falls short."""
    name = entry.path + ("/" if entry.kind == "directory" else "")
    records = {}
    if _too_long(name):
        records["path"] = name
    if _too_long(entry.target):
        records["linkpath"] = entry.target
    if entry.size >= _USTAR_LIMIT:
        records["size"] = str(entry.size)
    extended = b"".join(_pax_record(key, value) for key, value in sorted(records.items()))
    header = _ustar(name, entry.mode, entry.size, TYPES[entry.kind], entry.target)
    if not extended:
        return header
    # Other archivers put a process number or the path into this name, which carries no meaning.
    return _ustar("PaxHeader", 0o644, len(extended), b"x", "") + padded(extended) + header


def padded(data: bytes) -> bytes:
    """Return ``data`` filled with zeros to a whole number of tar blocks."""
    return data + bytes(-len(data) % BLOCK)


def read_tar(stream: BinaryIO, owner: str) -> Iterator[TarEntry]:
    """Yield the entries of an uncompressed tar archive that starts where ``stream`` stands.

    Hard links become copies. Contents are read from ``stream`` when asked for, so it must stay
    open.

    Raises:
        CapsuleError: CAP-I104 not a tar archive, CAP-I107 an unsafe path, CAP-I108 a device,
            FIFO, sparse file, setuid or setgid file, or a hard link that leads nowhere.
    """
    files: dict[str, TarEntry] = {}
    try:
        # "r:" takes an uncompressed tar only. "r" would try every compression on untrusted bytes.
        with tarfile.open(fileobj=stream, mode="r:", encoding="utf-8", errors="strict") as archive:
            for info in archive:
                path = safe_path(info.name, owner)
                if not path:
                    continue
                entry = _entry_of(info, path, owner, stream, files)
                if entry.kind == "file":
                    files[path] = entry
                yield entry
    except (tarfile.TarError, UnicodeError, EOFError, ValueError, OverflowError) as error:
        raise rejected("CAP-I104", f"{owner} contains a malformed tar archive: {error}") from error


def reject_collisions(layers: Iterable[tuple[str, dict[str, str]]]) -> None:
    """Check that layers on top of each other agree on every path that they share.

    Args:
        layers: Layer name and facts, as :func:`write_tar` returns them.

    Raises:
        CapsuleError: CAP-I109 two layers bring the same path differently.
    """
    seen: dict[str, tuple[str, str]] = {}
    for name, facts in layers:
        for path, fact in facts.items():
            # An upper layer hides the files of a lower one without a word, and which of two files
            # runs must not depend on how wheels are spread over layers.
            other, known = seen.setdefault(path, (name, fact))
            if known != fact:
                raise _collision(path, f"layer {other}", f"layer {name}")


def rejected(code: str, message: str, fix: str = "") -> CapsuleError:
    """Return a failed build; by default the fix is another version of the package."""
    return CapsuleError(
        code,
        message,
        fix=fix or "Lock another version of that package. Capsule does not install such packages.",
    )


def _merged(entries: Iterable[TarEntry]) -> list[TarEntry]:
    """Return one entry per path, every parent included, sorted by UTF-8 path."""
    merged: dict[str, TarEntry] = {}
    for entry in entries:
        known = merged.get(entry.path)
        if known is None:
            merged[entry.path] = entry
        elif known.kind == entry.kind == "directory":
            # The larger mode is 1777, of /tmp: it must not depend on the order of packages.
            merged[entry.path] = replace(known, mode=max(known.mode, entry.mode))
        elif _fact(known) != _fact(entry):
            raise _collision(entry.path, known.owner, entry.owner)
    for entry in list(merged.values()):
        for parent in PurePosixPath(entry.path).parents[:-1]:
            above = merged.setdefault(
                str(parent), TarEntry(str(parent), entry.owner, "directory", 0o755)
            )
            if above.kind != "directory":
                raise _collision(above.path, above.owner, entry.owner)
    return sorted(merged.values(), key=lambda entry: entry.path.encode())


def _collision(path: str, first: str, second: str) -> CapsuleError:
    return rejected(
        "CAP-I109",
        f"/{path} differs between {first} and {second}",
        "Remove one of the two from the spec, or pin versions that do not share the path.",
    )


def _fact(entry: TarEntry) -> str:
    return _write_content(entry, lambda _: None)


def _write_content(entry: TarEntry, write: Write) -> str:
    """Write the content of ``entry`` and its padding; return its fact."""
    if entry.kind != "file":
        return "directory" if entry.kind == "directory" else f"symlink {entry.target}"
    digest = None if entry.sha256 else hashlib.sha256()
    size = 0
    for chunk in entry.content():
        size += len(chunk)
        if digest:
            digest.update(chunk)
        write(chunk)
    if size != entry.size:
        raise rejected(
            "CAP-I104",
            f"{entry.owner}: {entry.path} has {counted(size, 'byte')}, not {entry.size:,}",
        )
    write(bytes(-size % BLOCK))
    return f"file {entry.mode:04o} {digest.hexdigest() if digest else entry.sha256}"


def _entry_of(
    info: tarfile.TarInfo, path: str, owner: str, stream: BinaryIO, files: dict[str, TarEntry]
) -> TarEntry:
    if info.isdir():
        return TarEntry(path, owner, "directory", 0o1777 if info.mode & 0o1000 else 0o755)
    # Folders are not rejected for such bits, because the mode of a folder is not kept.
    if info.mode & 0o6000:
        raise rejected("CAP-I108", f"{owner}: {path} is setuid or setgid (mode {info.mode:04o})")
    if info.issym():
        if not info.linkname or any(c in info.linkname for c in "\0\n\r"):
            raise rejected(
                "CAP-I107", f"{owner}: {path} links to the unsafe path {info.linkname!r}"
            )
        return TarEntry(path, owner, "symlink", 0o777, target=info.linkname)
    if info.islnk():
        target = files.get(safe_path(info.linkname, owner))
        if target is None:
            raise rejected(
                "CAP-I108", f"{owner}: {path} is a hard link to {info.linkname!r}, not in it"
            )
        return replace(target, path=path)
    if not info.isreg() or info.issparse():
        raise rejected("CAP-I108", f"{owner}: {path} is a special file (tar type {info.type!r})")
    content = slice_of(stream, info.offset_data, info.size)
    return TarEntry(path, owner, "file", info.mode & 0o777, info.size, content)


def file_chunks(path: Path) -> Iterator[bytes]:
    """Yield what a regular file holds, if ``path`` is no link.

    Raises:
        OSError: It cannot be read.
    """
    with open_regular(path, follow=False) as stream:
        while chunk := stream.read(CHUNK):
            yield chunk


def unchanged_chunks(
    path: Path, size: int, refuse: Callable[[str], CapsuleError]
) -> Iterator[bytes]:
    """Yield what a regular file holds that had a size before it was read.

    Raises:
        CapsuleError: What ``refuse`` returns for the reason, if the file has another size or cannot
            be read.
    """
    try:
        for chunk in file_chunks(path):
            size -= len(chunk)
            yield chunk
    except OSError as error:
        raise refuse(f"cannot be read: {error.strerror}") from error
    if size:
        raise refuse("changed while it was read")


def slice_of(stream: BinaryIO, offset: int, size: int) -> Content:
    """Return the content of ``size`` bytes that begins at ``offset`` of a stream."""

    def chunks() -> Iterator[bytes]:
        position = offset
        while position < offset + size:
            stream.seek(position)  # other entries are read from the same stream
            chunk = stream.read(min(CHUNK, offset + size - position))
            # The stream ends early. _write_content() compares the size and rejects the entry.
            if not chunk:
                return
            position += len(chunk)
            yield chunk

    return chunks


def _too_long(name: str) -> bool:
    # Longer names would fit if ustar's prefix field were used, but a path can be split between the
    # two fields at several slashes. A pax record has one form.
    return len(name) > 100 or not name.isascii()


def _pax_record(key: str, value: str) -> bytes:
    """Return a line ``LENGTH KEY=VALUE``, where the length counts its own digits."""
    rest = f" {key}={value}\n".encode()
    length = len(rest) + 1
    while length != len(str(length)) + len(rest):
        length = len(str(length)) + len(rest)
    return str(length).encode() + rest


def _ustar(name: str, mode: int, size: int, kind: bytes, target: str) -> bytes:
    """Return one 512-byte ustar header; the text fields hold what ASCII and 100 bytes allow."""

    def text(value: str) -> bytes:
        return value.encode("ascii", "replace")[:100].ljust(100, b"\0")

    fields = (
        text(name),
        b"%07o\0" % mode,
        b"%07o\0" % 0,  # owner
        b"%07o\0" % 0,  # group
        b"%011o\0" % (size if size < _USTAR_LIMIT else 0),
        b"%011o\0" % EPOCH,
        b" " * 8,  # the checksum counts itself as blanks
        kind,
        text(target),
        b"ustar\x0000",
        bytes(32 + 32),  # names of owner and group
        b"%07o\0" % 0,  # device major
        b"%07o\0" % 0,  # device minor
        bytes(155 + 12),
    )
    header = b"".join(fields)
    return header[:148] + b"%06o\0 " % sum(header) + header[156:]
