"""The canonical archive: a USTAR file whose every header byte follows from a name and a size.

POSIX.1-1988 ``ustar`` leaves a writer many choices and its readers many ways to disagree: links,
devices, extension headers, owners, dates, padding. A canonical archive leaves none: it has regular
files only, with mode 0644, no owner, no date and a padding of zeros, and ends with two zero blocks.
The reader never interprets a header: it computes the header that must stand there and compares 512
bytes. Any archiver unpacks the result, and nothing can hide in it.
"""

from __future__ import annotations

import io
import os
import re
import struct
from collections.abc import Callable, Iterable
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from capsule.experiment.files import (
    CREATE,
    NotRegularError,
    UnusableNameError,
    open_file,
    open_folder,
    open_regular,
)
from capsule.host.errors import CapsuleError
from capsule.host.streams import copy

BLOCK = 512
MAX_NAME = 100  # bytes of the ustar name field; the prefix field stays empty
MAX_SIZE = 8**11 - 1  # largest size of eleven octal digits: 8 GiB - 1
# What a reader accepts, in bytes. An archive is neither compressed nor sparse, so the size of the
# file bounds all it unpacks to.
MAX_ARCHIVE = 16 << 30
MAX_ENVELOPE = 1 << 20
MAX_MANIFEST = 16 << 20
# capsule.experiment.contract.MAX_OUTPUTS has to leave room below this for the other members.
MAX_FILES = 10_000
# A component starts with neither a dot (``..``, hidden files) nor a dash (options of tools).
NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*$"
ASK_AGAIN = "Do not use this copy: get the bundle again from its author and compare its SHA-256."

# The twelve bytes behind the last ustar field are laid out, too. Readers skip them, so they would
# otherwise be room for unsigned data in every header.
_LAYOUT = struct.Struct("100s 8s 8s 8s 12s 12s 8s 1s 100s 6s 2s 32s 32s 8s 8s 155s 12s")
_FIELDS = (
    *("name", "mode", "uid", "gid", "size", "mtime", "chksum", "typeflag", "linkname"),
    *("magic", "version", "uname", "gname", "devmajor", "devminor", "prefix", "padding"),
)
# Recognised only to name the mistake. Nothing is unwrapped here: the size of the file would no
# longer bound what it unpacks to.
_WRAPPINGS = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\x00": "xz",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
}
_SCHEMES = ("http:", "https:", "ftp:", "s3:", "hf:")

Data = bytes | Callable[[], BinaryIO]  # the bytes, or what opens a stream of them


class UntrustedError(CapsuleError):
    """A bundle that is intact, and not signed as its reader asks, or not the expected one."""


def tampered(code: str, message: str, fix: str = ASK_AGAIN) -> CapsuleError:
    """Return the error that rejects a bundle as altered or malformed (exit status 3)."""
    return CapsuleError(code, message, fix=fix)


def header(name: str, size: int) -> bytes:
    """Return the only header block a member of this name and size may have.

    Args:
        name: Relative path that matches ``NAME_PATTERN``, at most 100 bytes.
        size: Content size in bytes, at most ``MAX_SIZE``.

    Raises:
        ValueError: The name or the size has no canonical header.
    """
    # fullmatch(), since '$' in a pattern of Python's also matches before a newline at the end.
    if not re.fullmatch(NAME_PATTERN, name) or len(name) > MAX_NAME:
        raise ValueError(f"not a canonical member name: {name!a}")
    if not 0 <= size <= MAX_SIZE:
        raise ValueError(f"{name}: a size of {size} bytes does not fit a ustar header")
    # POSIX lets a number end in NUL or in a blank. Since headers are compared, there must be one
    # form.
    zero = b"%07o\0" % 0
    fields = [name.encode(), b"%07o\0" % 0o644, zero, zero, b"%011o\0" % size, b"%011o\0" % 0]
    tail = [b"0", b"", b"ustar\0", b"00", b"", b"", zero, zero, b"", b""]
    # POSIX has the checksum taken with its own field as blanks. Its ending, NUL and then a blank,
    # is what archivers write by tradition.
    checksum = sum(_LAYOUT.pack(*fields, b" " * 8, *tail))
    return _LAYOUT.pack(*fields, b"%06o\0 " % checksum, *tail)


def write(stream: BinaryIO, members: Iterable[tuple[str, int, Data]]) -> dict[str, str]:
    """Write a whole archive.

    Args:
        stream: Where the archive goes.
        members: Name, size in bytes and content of each member.

    Returns:
        The hexadecimal SHA-256 of each member's content as it was written.

    Raises:
        EOFError: A content is shorter than its size.
        ValueError: A name or size has no canonical header.
    """
    digests = {}
    for name, size, data in members:
        stream.write(header(name, size))
        with io.BytesIO(data) if isinstance(data, bytes) else data() as source:
            copied = copy(source, stream, size)
        if copied.size < size:
            raise EOFError
        digests[name] = copied.sha256
        stream.write(bytes(-size % BLOCK))
    stream.write(bytes(2 * BLOCK))
    return digests


def size_of(sizes: Iterable[int]) -> int:
    """Return the size in bytes of an archive whose members have these sizes."""
    return sum(BLOCK + size + -size % BLOCK for size in sizes) + 2 * BLOCK


def open_archive(path: Path) -> BufferedReader:
    """Open a bundle.

    Everything is read through the one descriptor that was checked, so replacing the path
    afterwards changes nothing.

    Raises:
        CapsuleError: CAP-B101 (cannot be opened, or is a folder) or CAP-B102 (not a regular file).
    """
    try:
        return open_regular(path)
    except OSError as error:
        raise _cannot_be_opened(path, error) from error


def _cannot_be_opened(path: Path, error: OSError) -> CapsuleError:
    if path.is_dir():
        return CapsuleError(
            "CAP-B101",
            f"{str(path)!r} is a folder",
            fix="Name the bundle (.capsule.tar, .capsule-study.tar) in it. 'capsule show' "
            "describes the folder of a run, and 'capsule study report' that of a study.",
        )
    if isinstance(error, NotRegularError):
        return tampered(
            "CAP-B102",
            f"{str(path)!r} is not a regular file",
            fix="Save the bundle as a plain file and give its path.",
        )
    if path.parts[0] in _SCHEMES:
        # pathlib has made one slash of the two that follow the scheme.
        address = path.as_posix().replace(":/", "://", 1)
        return CapsuleError(
            "CAP-B101",
            f"{address!a} is an address, and only files can be opened",
            fix=f"Download it first, then name the file: curl -LO {address}",
        )
    return CapsuleError(
        "CAP-B101",
        f"cannot open the bundle {str(path)!r}: {error.strerror}",
        fix="Give the path of a readable .capsule.tar file.",
    )


def create_file(root: Path, name: str) -> BinaryIO:
    """Create ``root/name`` for writing, following no link and replacing nothing.

    Raises:
        CapsuleError: CAP-B110, Windows has no file of this name.
        OSError: A component is a link or a file, or the file exists.
    """
    *parents, leaf = name.split("/")
    try:
        with open_folder(root, below=parents, make=True) as folder:
            return os.fdopen(open_file(leaf, CREATE, folder), "wb")
    except UnusableNameError as error:
        raise CapsuleError(
            "CAP-B110",
            f"Windows cannot store the file {name}, because it reserves such names",
            fix="Use the bundle on Linux or macOS.",
        ) from error


class ArchiveReader:
    """Reads one archive front to back; the caller says what must come next."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        size = os.fstat(stream.fileno()).st_size
        if size > MAX_ARCHIVE:
            raise _too_large(f"the bundle has {size} bytes", MAX_ARCHIVE)
        if size == 0:
            raise tampered("CAP-B104", "the bundle is an empty file")

    def read(self, name: str, limit: int) -> bytes:
        """Return the content of the next member, whose size only the archive knows.

        Args:
            name: The name it must have.
            limit: Largest size accepted, in bytes.

        Raises:
            CapsuleError: CAP-B103, B104, B105, B106, B107: any other member, or none.
        """
        found = self._block(name)
        # The size is the only thing taken from a header. One that is not plain octal (GNU's base
        # 256, signs, blanks) becomes 0 here, so that the comparison rejects the header.
        digits = found[124:135]
        size = int(digits, 8) if re.fullmatch(rb"[0-7]{11}", digits) else 0
        _compare(found, name, size)
        # Before the content is read: at this point the size is not authenticated.
        if size > limit:
            raise _too_large(f"member {name} has {size} bytes", limit)
        data = self._exactly(size, name)
        self._padding(name, size)
        return data

    def check(self, name: str, size: int, sha256: str) -> int:
        """Check the next member, and leave its content where it is.

        Args:
            name: The name it must have.
            size: The size it must have, in bytes.
            sha256: The hexadecimal SHA-256 its content must have.

        Returns:
            Where its content begins, in bytes from the start of the archive.

        Raises:
            CapsuleError: CAP-B103, B104, B106, B107, B108: any other member, content, or none.
        """
        _compare(self._block(name), name, size)
        offset = self._stream.tell()
        found = copy(self._stream, most=size)
        if found.size < size:
            raise _truncated(name)
        if found.sha256 != sha256:
            raise other_content(name, found.sha256, sha256)
        self._padding(name, size)
        return offset

    def finish(self) -> None:
        """Check that the archive ends here: two zero blocks, then nothing.

        Raises:
            CapsuleError: CAP-B104, B106 or B109: something else follows.
        """
        end = self._exactly(BLOCK, "its end")
        if any(end):
            raise tampered("CAP-B109", f"an unsigned member follows: {_name_in(end)}")
        if any(self._exactly(BLOCK, "its end")):
            raise tampered("CAP-B106", "the end of the archive is not two zero blocks")
        # Archivers stop at the zero blocks and would never show what follows. GNU tar's padding to
        # a full record is rejected for the same reason.
        if self._stream.read(1):
            raise tampered("CAP-B109", "data follows the end of the archive")

    def _block(self, name: str) -> bytes:
        block = self._stream.read(BLOCK)
        if len(block) != BLOCK:
            # A compressed bundle may be shorter than one block. It has another error.
            reject_wrapped(block)
            raise _truncated(name)
        return block

    def _exactly(self, size: int, name: str) -> bytes:
        data = self._stream.read(size)
        if len(data) != size:
            raise _truncated(name)
        return data

    def _padding(self, name: str, size: int) -> None:
        # Archivers skip the padding, so a signed bundle could carry anything in it unseen.
        if any(self._exactly(-size % BLOCK, name)):
            raise tampered("CAP-B106", f"the padding after {name} is not zero")


def other_content(name: str, found: str, signed: str) -> CapsuleError:
    """Return the error of a member whose content has another SHA-256 than was signed."""
    message = f"the content of {name} is not what was signed: SHA-256 {found}"
    return tampered("CAP-B108", f"{message}, signed {signed}")


def _compare(found: bytes, name: str, size: int) -> None:
    """Reject a header block that is not ``header(name, size)``, and name where it differs."""
    expected = header(name, size)
    if found == expected:
        return
    reject_wrapped(found)
    if not any(found):
        raise tampered("CAP-B104", f"the archive ends before {name}")
    pairs = zip(_FIELDS, _LAYOUT.unpack(found), _LAYOUT.unpack(expected), strict=True)
    wrong = [(field, a, b) for field, a, b in pairs if a != b]
    # The checksum follows from the other fields, so it says least about what is wrong.
    field, is_, must = min(wrong, key=lambda each: each[0] == "chksum")
    if field == "name":
        raise tampered("CAP-B107", f"{_name_in(found)} is in the place of member {name}")
    raise tampered(
        "CAP-B107", f"header field {field!r} of {name} is {_show(is_)}, must be {_show(must)}"
    )


def reject_wrapped(block: bytes) -> None:
    """Reject the beginning of a compressed file.

    Raises:
        CapsuleError: CAP-B103.
    """
    for magic, format_ in _WRAPPINGS.items():
        if block.startswith(magic):
            raise tampered(
                "CAP-B103",
                f"the bundle is wrapped in {format_}; a bundle is a plain tar file",
                fix=f"Remove the {format_} layer, then verify the .capsule.tar file itself.",
            )


def _name_in(block: bytes) -> str:
    return _show(block[:MAX_NAME])


def _show(field: bytes) -> str:
    """Return a header field as printable ASCII: it may hold terminal control sequences."""
    return ascii(field.rstrip(b"\0").decode("latin-1"))


def _truncated(name: str) -> CapsuleError:
    return tampered("CAP-B104", f"the archive is cut off at {name}")


def _too_large(what: str, limit: int) -> CapsuleError:
    return tampered(
        "CAP-B105",
        f"{what}, more than the limit of {limit}",
        fix="Do not use it: Capsule makes no bundle that is so large.",
    )
