"""Wheels, unpacked into an image (PyPA binary distribution format, PEP 427).

Files are the same as after ``pip install --no-compile``, except that nothing is written that
depends on the installer: no ``INSTALLER``, no rewritten ``RECORD``, no generated console scripts.
"""

from __future__ import annotations

import base64
import binascii
import csv
import hashlib
import stat
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.utils import (
    InvalidWheelFilename,
    canonicalize_name,
    canonicalize_version,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from capsule.experiment.patterns import chosen
from capsule.host.errors import CapsuleError
from capsule.host.wording import counted
from capsule.image.archives.layers import CHUNK, Content, TarEntry, file_entry, rejected, safe_path
from capsule.image.requirements import read_requirement

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from capsule.experiment.lock import LockedWheel
    from capsule.image.distribution import Distribution

_ALGORITHMS = frozenset({"sha256", "sha384", "sha512"})  # the format forbids weaker ones
# RECORD cannot hold a digest of itself, nor of the signatures over it (PEP 427).
_UNRECORDED = frozenset({"RECORD", "RECORD.jws", "RECORD.p7s"})
_MAX_DOCUMENT_BYTES = 32 << 20  # of a file that is read as a whole; RECORD of torch has 1.5 MB
_MAX_REQUIREMENTS = 4_000  # of one wheel; each is compared with each extra that others ask for
# zipfile raises RuntimeError for encrypted members, NotImplementedError for unknown compression.
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError)


@dataclass(frozen=True)
class _Recorded:
    """The entry of one file in RECORD."""

    algorithm: str
    digest: bytes
    size: int | None


@dataclass(frozen=True)
class WheelContents:
    """The requirements and contents of a wheel.

    Attributes:
        requires: What it says it needs (``Requires-Dist`` of its METADATA).
        entry_points: Groups of its entry points, whose modules others may import.
        paths: Where its files go in an image.
    """

    requires: list[Requirement]
    entry_points: set[str]
    paths: list[str]


def check_filename(wheel: LockedWheel) -> None:
    """Check that a locked wheel is what its file's name says.

    Raises:
        CapsuleError: CAP-I305.
    """
    try:
        name, version, _, _ = parse_wheel_filename(wheel.filename)
    except InvalidWheelFilename:
        name, version = None, None
    if name != wheel.name or canonicalize_version(wheel.version) != canonicalize_version(
        str(version)
    ):
        raise CapsuleError(
            "CAP-I305",
            f"the lock says that {wheel.filename!r} is {wheel.name!r} {wheel.version!r}",
            fix="Lock again; do not trust a bundle that contains such a lock.",
        )


def open_wheel(path: Path, wheel: LockedWheel) -> zipfile.ZipFile:
    """Open a wheel; the caller closes it.

    Raises:
        CapsuleError: CAP-I105 it is no zip archive (a source distribution, for instance).
    """
    try:
        return zipfile.ZipFile(path)
    except _BROKEN as error:
        raise rejected("CAP-I105", f"{wheel.filename} is not a wheel: {error}") from error


def read_contents(
    archive: zipfile.ZipFile, wheel: LockedWheel, distribution: Distribution
) -> WheelContents:
    """Return what an open wheel needs and brings, without reading its files.

    Raises:
        CapsuleError: CAP-I105 malformed, or not the locked wheel; CAP-I107 to CAP-I109, as
            :func:`wheel_entries`.
    """
    members = _members(archive, wheel)
    info = _dist_info(members, wheel)
    document = _read(archive, members.get(f"{info}/METADATA"), wheel)
    fields = HeaderParser().parsestr(document.decode("utf-8", "replace"))
    texts = fields.get_all("Requires-Dist", [])
    if len(texts) > _MAX_REQUIREMENTS:
        raise rejected(
            "CAP-I105",
            f"{wheel.filename} has {len(texts):,} requirements, more than {_MAX_REQUIREMENTS:,}",
        )
    try:
        requires = [read_requirement(text) for text in texts]
    except ValueError as error:
        raise rejected("CAP-I105", f"{wheel.filename} has a malformed METADATA: {error}") from error
    stated = members.get(f"{info}/entry_points.txt")
    groups = b"" if stated is None else _read(archive, stated, wheel)
    lines = [line.strip() for line in groups.decode("utf-8", "replace").splitlines()]
    return WheelContents(
        requires,
        {line.lstrip("[").partition("]")[0].strip() for line in lines if line.startswith("[")},
        [_destination(name, info, wheel, distribution)[0] for name in members],
    )


def wheel_entries(
    archive: zipfile.ZipFile,
    wheel: LockedWheel,
    distribution: Distribution,
    prune: Sequence[str] = (),
) -> list[TarEntry]:
    """Return where the files of an open wheel go in an image.

    Every file must be in RECORD; its content is checked against it when it is read, so what is
    pruned is not read at all.

    Args:
        archive: The wheel, which must stay open as long as the entries are used.
        wheel: What the lock says it is.
        distribution: That of the image.
        prune: Patterns of files left out, as :class:`capsule.image.recipe.Recipe` explains.

    Raises:
        CapsuleError: CAP-I105 malformed, or not the locked wheel; CAP-I106 it disagrees with its
            RECORD; CAP-I107 an unsafe path; CAP-I108 a link or another special file; CAP-I109 a
            file in Capsule's own package.
    """
    members = _members(archive, wheel)
    info = _dist_info(members, wheel)
    _check_format(_read(archive, members.get(f"{info}/WHEEL"), wheel), wheel)
    record = _record(_read(archive, members.get(f"{info}/RECORD"), wheel), wheel)
    if missing := sorted(record.keys() - members.keys()):
        raise _record_error(wheel, f"{missing[0]} is recorded but not in it")
    entries = []
    for name, member in members.items():
        recorded = record.get(name)
        if name not in {f"{info}/{unrecorded}" for unrecorded in _UNRECORDED}:
            if recorded is None:
                raise _record_error(wheel, f"{name} is not recorded")
            if recorded.size not in {None, member.file_size}:
                raise _record_error(
                    wheel, f"{name} has {counted(member.file_size, 'byte')}, not {recorded.size:,}"
                )
        if not _pruned(name, prune):
            entries.append(_entry(archive, member, recorded, info, wheel, distribution))
    return entries


def _members(archive: zipfile.ZipFile, wheel: LockedWheel) -> dict[str, zipfile.ZipInfo]:
    """Return the plain files of the archive by their path."""
    members: dict[str, zipfile.ZipInfo] = {}
    for member in archive.infolist():
        name = safe_path(member.filename, wheel.filename)
        # Archives that were made on Windows have no Unix mode, so 0 stands for a plain file, too.
        kind = stat.S_IFMT(member.external_attr >> 16)
        if member.is_dir() and kind in {0, stat.S_IFDIR}:
            continue
        if kind not in {0, stat.S_IFREG}:
            raise rejected("CAP-I108", f"{wheel.filename}: {name} is a link or special file")
        if member.external_attr >> 16 & 0o6000:
            raise rejected("CAP-I108", f"{wheel.filename}: {name} is setuid or setgid")
        if member.flag_bits & 1:
            raise rejected("CAP-I105", f"{wheel.filename}: {name} is encrypted")
        if name in members:
            raise rejected("CAP-I105", f"{wheel.filename} contains {name} twice")
        members[name] = member
    return members


def _dist_info(members: dict[str, zipfile.ZipInfo], wheel: LockedWheel) -> str:
    """Return the name of the one ``.dist-info`` folder, which must name the locked version."""
    folders = {name.split("/")[0] for name in members if "/" in name}
    found = sorted(folder for folder in folders if folder.endswith(".dist-info"))
    if len(found) != 1:
        raise rejected(
            "CAP-I105", f"{wheel.filename} is not a wheel: its .dist-info folders are {found}"
        )
    name, _, version = found[0].removesuffix(".dist-info").partition("-")
    try:
        same = Version(version) == Version(wheel.version)
    except InvalidVersion:
        same = False
    if not same or canonicalize_name(name) != canonicalize_name(wheel.name):
        raise rejected(
            "CAP-I105",
            f"{wheel.filename} contains {found[0]}, the lock says {wheel.name} {wheel.version}",
            "Lock the spec again. This lock does not match its packages.",
        )
    return found[0]


def _check_format(document: bytes, wheel: LockedWheel) -> None:
    version = next(
        (
            line.partition(b":")[2].strip()
            for line in document.splitlines()
            if line.lower().startswith(b"wheel-version:")
        ),
        b"",
    )
    # PEP 427 has installers reject a greater major version, but not a greater minor one.
    if not version.startswith(b"1."):
        raise rejected(
            "CAP-I105", f"{wheel.filename} has the unknown wheel format {version[:16]!r}"
        )


def _record(document: bytes, wheel: LockedWheel) -> dict[str, _Recorded]:
    """Parse RECORD: ``path,algorithm=digest,size`` lines (CSV)."""
    record: dict[str, _Recorded] = {}
    try:
        for row in csv.reader(document.decode("utf-8").splitlines()):
            name, hashed, size = row
            if name.rpartition("/")[2] in _UNRECORDED and not hashed:
                continue
            algorithm, _, digest = hashed.partition("=")
            if algorithm not in _ALGORITHMS or name in record:
                raise _record_error(wheel, f"line {row} is not acceptable")
            record[name] = _Recorded(
                algorithm,
                # RECORD has URL-safe base64 without its padding (PEP 427).
                base64.b64decode(digest + "=" * (-len(digest) % 4), b"-_", validate=True),
                int(size) if size else None,
            )
    except (ValueError, csv.Error, binascii.Error) as error:
        raise _record_error(wheel, f"it cannot be read: {error}") from error
    return record


def _entry(
    archive: zipfile.ZipFile,
    member: zipfile.ZipInfo,
    recorded: _Recorded | None,
    info: str,
    wheel: LockedWheel,
    distribution: Distribution,
) -> TarEntry:
    name = safe_path(member.filename, wheel.filename)
    path, is_script = _destination(name, info, wheel, distribution)
    content = _content(archive, member, recorded, wheel)
    mode = 0o755 if is_script or member.external_attr >> 16 & 0o111 else 0o644
    # PEP 427 leaves it to the installer to put its interpreter into scripts that begin so.
    # This looks at bytes that are not checked yet. What becomes part of the image is read through
    # content(), which compares it with RECORD.
    start = next(_content(archive, member, None, wheel)(), b"") if is_script else b""
    if start.startswith(b"#!python"):
        _check_size(member, wheel)
        script = b"".join(content()).partition(b"\n")[2]
        interpreter = distribution.interpreter.encode()
        return file_entry(path, wheel.filename, b"#!%b\n%b" % (interpreter, script), mode)
    sha256 = recorded.digest.hex() if recorded and recorded.algorithm == "sha256" else None
    return TarEntry(path, wheel.filename, "file", mode, member.file_size, content, sha256=sha256)


def _destination(
    name: str, info: str, wheel: LockedWheel, distribution: Distribution
) -> tuple[str, bool]:
    """Return the path in the image, by Debian's local installation scheme; and if a script."""
    data = info.removesuffix(".dist-info") + ".data"
    site = distribution.site
    path, is_script = f"{site}/{name}", False
    if name.startswith(f"{data}/"):
        _, scheme, rest = (*name.split("/", 2), "")[:3]
        roots = {
            "purelib": site,
            "platlib": site,
            "scripts": "usr/local/bin",
            "headers": f"usr/local/include/python{distribution.python}/{wheel.name}",
            "data": "usr/local",
        }
        if scheme not in roots or not rest:
            raise rejected(
                "CAP-I105", f"{wheel.filename}: {name} belongs to no installation scheme"
            )
        path, is_script = f"{roots[scheme]}/{rest}", scheme == "scripts"
    if path.startswith(f"{site}/capsule/"):
        raise rejected(
            "CAP-I109", f"/{path} from {wheel.filename} would mix with Capsule's own code"
        )
    return path, is_script


def _content(
    archive: zipfile.ZipFile,
    member: zipfile.ZipInfo,
    recorded: _Recorded | None,
    wheel: LockedWheel,
) -> Content:
    def chunks() -> Iterator[bytes]:
        digest = hashlib.new(recorded.algorithm) if recorded else None
        try:
            with archive.open(member) as stream:
                while chunk := stream.read(CHUNK):
                    if digest:
                        digest.update(chunk)
                    yield chunk
        except _BROKEN as error:
            raise rejected(
                "CAP-I105", f"{wheel.filename}: {member.filename} is damaged: {error}"
            ) from error
        if digest and recorded and digest.digest() != recorded.digest:
            raise _record_error(wheel, f"{member.filename} has another {recorded.algorithm} digest")

    return chunks


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo | None, wheel: LockedWheel) -> bytes:
    if member is None:
        raise rejected(
            "CAP-I105", f"{wheel.filename} is not a wheel: it lacks WHEEL, METADATA or RECORD"
        )
    _check_size(member, wheel)
    return b"".join(_content(archive, member, None, wheel)())


def _check_size(member: zipfile.ZipInfo, wheel: LockedWheel) -> None:
    """Check the size of a file that is read as a whole. zipfile reads no more than is stated."""
    if member.file_size > _MAX_DOCUMENT_BYTES:
        raise rejected(
            "CAP-I105",
            f"{wheel.filename}: {member.filename} has {member.file_size:,} bytes, more than "
            f"{_MAX_DOCUMENT_BYTES:,}",
        )


def _pruned(name: str, patterns: Sequence[str]) -> bool:
    """Tell if ``name`` is left out: compiled caches always are, else the last match decides."""
    return "__pycache__" in name.split("/") or chosen(name, patterns)


def _record_error(wheel: LockedWheel, finding: str) -> CapsuleError:
    return rejected("CAP-I106", f"{wheel.filename} disagrees with its RECORD: {finding}")
