"""Debian binary packages: an ar archive of a control and a data archive (deb(5)).

Packages are unpacked, not installed: no maintainer script is run. The control file of a package is
kept in ``/var/lib/dpkg/status.d``, where SBOM scanners look for it.
"""

from __future__ import annotations

import io
import lzma
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from capsule.image.archives.layers import TarEntry, file_entry, read_tar, rejected

if TYPE_CHECKING:
    from capsule.experiment.lock import LockedDebianPackage

_AR_MAGIC = b"!<arch>\n"
_AR_HEADER = 60
_READ = 1 << 16
# Debian keeps these as links into /usr. From Debian 13 on they are part of a package.
_MERGED = frozenset({"bin", "lib", "lib32", "lib64", "libx32", "sbin"})


@dataclass(frozen=True)
class ArMember:
    """One member of an ar archive: where its content lies in the file, in bytes."""

    name: str
    offset: int
    size: int


def deb_entries(path: Path, package: LockedDebianPackage, scratch: BinaryIO) -> list[TarEntry]:
    """Unpack a package.

    Args:
        path: The ``.deb`` file.
        package: What the lock says it is.
        scratch: A binary file, open for reading and writing, that takes the unpacked data and must
            stay open as long as the entries are used.

    Returns:
        Its files under merged ``/usr``, and its control file.

    Raises:
        CapsuleError: CAP-I104 malformed, or not the locked package; CAP-I107, CAP-I108 as
            :func:`capsule.image.archives.layers.read_tar`.
    """
    owner = package.pool.rpartition("/")[2]
    if zipfile.is_zipfile(path):  # a file that an index of wheels may have brought into the cache
        raise rejected("CAP-I104", f"{owner} is also a zip archive")
    with path.open("rb") as stream:
        _, control_member, data_member = _deb_members(stream, owner)
        control = _control(_unpacked(stream, control_member, scratch, owner), owner)
        _reject_package(control, package, owner)
        data = _unpacked(stream, data_member, scratch, owner)
    status = f"var/lib/dpkg/status.d/{package.name}"
    return [file_entry(status, owner, control), *map(_merge_usr, data)]


def deb_control(path: Path, package: LockedDebianPackage) -> dict[str, str]:
    """Return the fields of a package's control file.

    Raises:
        CapsuleError: CAP-I104 malformed, or not the locked package.
    """
    owner = package.pool.rpartition("/")[2]
    with path.open("rb") as stream:
        _, member, _ = _deb_members(stream, owner)
        control = _control(_unpacked(stream, member, io.BytesIO(), owner), owner)
    _reject_package(control, package, owner)
    return control_fields(control.decode("utf-8", "replace"))


def control_fields(block: str) -> dict[str, str]:
    """Parse a paragraph of control data (deb822), first lines of fields only."""
    lines = (line.split(":", 1) for line in block.splitlines() if line[:1] not in ("", " ", "\t"))
    return {field[0]: field[1].strip() for field in lines if len(field) == 2}


def ar_members(stream: BinaryIO, owner: str) -> list[ArMember]:
    """Read the index of an ar archive (common format; deb(5) allows no long names).

    Raises:
        CapsuleError: CAP-I104 malformed or truncated.
    """
    end = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    if stream.read(len(_AR_MAGIC)) != _AR_MAGIC:
        raise rejected("CAP-I104", f"{owner} is not a Debian package: no ar archive")
    members = []
    position = len(_AR_MAGIC)
    while position < end:
        stream.seek(position)
        header = stream.read(_AR_HEADER)
        size = header[48:58].rstrip(b" ")
        if len(header) < _AR_HEADER or header[58:] != b"`\n" or not size.isdigit():
            raise rejected("CAP-I104", f"{owner} has a malformed ar header at byte {position}")
        name = header[:16].rstrip(b" ").removesuffix(b"/").decode("ascii", "replace")
        member = ArMember(name, position + _AR_HEADER, int(size))
        if member.offset + member.size > end:
            raise rejected("CAP-I104", f"{owner} ends inside its member {name!r}")
        members.append(member)
        # Members of an ar archive begin at even offsets.
        position = member.offset + member.size + member.size % 2
    return members


def _deb_members(stream: BinaryIO, owner: str) -> tuple[ArMember, ArMember, ArMember]:
    """Return the version, control and data members, in the order that deb(5) demands."""
    # deb(5) has readers pass over members whose names begin with an underscore: these are
    # additions.
    members = [m for m in ar_members(stream, owner) if not m.name.startswith("_")]
    stems = [member.name.partition(".tar")[0] for member in members]
    if stems[:3] != ["debian-binary", "control", "data"]:
        names = [member.name for member in members]
        raise rejected("CAP-I104", f"{owner} is not a Debian package: its members are {names}")
    stream.seek(members[0].offset)
    version = stream.read(members[0].size)
    if not version.startswith(b"2.") or not version.endswith(b"\n"):
        raise rejected("CAP-I104", f"{owner} has the unknown package format {version[:16]!r}")
    return members[0], members[1], members[2]


def _unpacked(stream: BinaryIO, member: ArMember, scratch: BinaryIO, owner: str) -> list[TarEntry]:
    """Decompress a tar member to the end of ``scratch`` and return its entries from there."""
    decompressor, errors = _decompressor(member.name, owner)
    start = scratch.seek(0, io.SEEK_END)
    stream.seek(member.offset)
    left = member.size
    try:
        while left and not decompressor.eof:
            chunk = stream.read(min(left, _READ))
            left -= len(chunk)
            scratch.write(decompressor.decompress(chunk))
    except errors as error:
        raise rejected(
            "CAP-I104", f"{owner}: {member.name} cannot be decompressed: {error}"
        ) from error
    # Data behind the compressed stream has no use but to make two readers see different packages.
    if left or not decompressor.eof or decompressor.unused_data:
        raise rejected(
            "CAP-I104", f"{owner}: {member.name} does not end where its compression ends"
        )
    scratch.seek(start)
    return list(read_tar(scratch, owner))


def _decompressor(name: str, owner: str) -> tuple[Any, type[Exception]]:
    """Return a streaming decompressor and what it raises."""
    suffix = name.partition(".tar")[2]
    if suffix == ".xz":
        return lzma.LZMADecompressor(lzma.FORMAT_XZ), lzma.LZMAError
    if suffix == ".gz":
        # The largest window, 15, and 16 for the header and the checksum of gzip.
        return zlib.decompressobj(wbits=31), zlib.error
    if suffix == ".zst":
        import zstandard

        return zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError
    raise rejected("CAP-I104", f"{owner}: {name} is neither .xz, .gz nor .zst")


def _control(entries: list[TarEntry], owner: str) -> bytes:
    for entry in entries:
        if entry.path == "control":
            return b"".join(entry.content())
    raise rejected("CAP-I104", f"{owner} has no control file")


def _reject_package(control: bytes, package: LockedDebianPackage, owner: str) -> None:
    fields = control_fields(control.decode("utf-8", "replace"))
    for field, locked in (
        ("Package", package.name),
        ("Version", package.version),
        ("Architecture", package.architecture),
    ):
        if fields.get(field) != locked:
            raise rejected(
                "CAP-I104",
                f"{owner} says {field} {fields.get(field)!r}, the lock says {locked!r}",
                "Lock the spec again. This lock does not match its packages.",
            )


def _merge_usr(entry: TarEntry) -> TarEntry:
    # A real folder /bin or /lib could not stand beside the link of that name in the base layer.
    is_link = entry.kind == "symlink" and entry.target == f"usr/{entry.path}"
    if entry.path.split("/")[0] not in _MERGED or is_link:
        return entry
    return replace(entry, path=f"usr/{entry.path}")
