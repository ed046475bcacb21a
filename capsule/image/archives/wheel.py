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
    opened = _OpenWheel(archive, wheel)
    fields = HeaderParser().parsestr(opened.read("METADATA").decode("utf-8", "replace"))
    texts = fields.get_all("Requires-Dist", [])
    if len(texts) > _MAX_REQUIREMENTS:
        raise opened.malformed(f"has {len(texts):,} requirements, more than {_MAX_REQUIREMENTS:,}")
    try:
        requires = [read_requirement(text) for text in texts]
    except ValueError as error:
        raise opened.malformed(f"has a malformed METADATA: {error}") from error
    stated = f"{opened.info}/entry_points.txt" in opened.members
    groups = opened.read("entry_points.txt").decode("utf-8", "replace") if stated else ""
    lines = [line.strip() for line in groups.splitlines()]
    return WheelContents(
        requires,
        {line.lstrip("[").partition("]")[0].strip() for line in lines if line.startswith("[")},
        [opened.destination(name, distribution)[0] for name in opened.members],
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
    opened = _OpenWheel(archive, wheel)
    opened.check_format()
    record = opened.record()
    if missing := sorted(record.keys() - opened.members.keys()):
        raise opened.contradicts_record(f"{missing[0]} is recorded but not in it")
    unrecorded = {f"{opened.info}/{name}" for name in _UNRECORDED}
    entries = []
    for name, member in opened.members.items():
        recorded = record.get(name)
        if name not in unrecorded:
            if recorded is None:
                raise opened.contradicts_record(f"{name} is not recorded")
            if recorded.size not in {None, member.file_size}:
                size = counted(member.file_size, "byte")
                raise opened.contradicts_record(f"{name} has {size}, not {recorded.size:,}")
        if not _pruned(name, prune):
            entries.append(opened.entry(name, recorded, distribution))
    return entries


class _OpenWheel:
    """The files of an open wheel.

    Attributes:
        members: Its plain files, by their paths.
        info: The name of its one ``.dist-info`` folder.
    """

    def __init__(self, archive: zipfile.ZipFile, wheel: LockedWheel) -> None:
        self._archive, self._wheel = archive, wheel
        self.members = dict(self._plain_files())
        self.info = self._dist_info()

    def malformed(self, what: str, fix: str = "") -> CapsuleError:
        """Return the error of a file that is no valid wheel, or not the locked one."""
        return rejected("CAP-I105", f"{self._wheel.filename} {what}", fix)

    def contradicts_record(self, finding: str) -> CapsuleError:
        """Return the error of a wheel that is not what its RECORD says."""
        finding = f"{self._wheel.filename} disagrees with its RECORD: {finding}"
        return rejected("CAP-I106", finding)

    def _plain_files(self) -> Iterator[tuple[str, zipfile.ZipInfo]]:
        seen = set()
        for member in self._archive.infolist():
            name = safe_path(member.filename, self._wheel.filename)
            # Archives that were made on Windows have no Unix mode, so 0 stands for a plain file,
            # too.
            kind = stat.S_IFMT(member.external_attr >> 16)
            if member.is_dir() and kind in {0, stat.S_IFDIR}:
                continue
            place = f"{self._wheel.filename}: {name}"
            if kind not in {0, stat.S_IFREG}:
                raise rejected("CAP-I108", f"{place} is a link or special file")
            if member.external_attr >> 16 & 0o6000:
                raise rejected("CAP-I108", f"{place} is setuid or setgid")
            if member.flag_bits & 1:
                raise rejected("CAP-I105", f"{place} is encrypted")
            if name in seen:
                raise self.malformed(f"contains {name} twice")
            seen.add(name)
            yield name, member

    def _dist_info(self) -> str:
        """Return the name of the one ``.dist-info`` folder, which must name the locked version."""
        wheel = self._wheel
        folders = {name.split("/")[0] for name in self.members if "/" in name}
        found = sorted(folder for folder in folders if folder.endswith(".dist-info"))
        if len(found) != 1:
            raise self.malformed(f"is not a wheel: its .dist-info folders are {found}")
        name, _, version = found[0].removesuffix(".dist-info").partition("-")
        try:
            same = Version(version) == Version(wheel.version)
        except InvalidVersion:
            same = False
        if not same or canonicalize_name(name) != canonicalize_name(wheel.name):
            raise self.malformed(
                f"contains {found[0]}, the lock says {wheel.name} {wheel.version}",
                "Lock the spec again. This lock does not match its packages.",
            )
        return found[0]

    def check_format(self) -> None:
        """Check the version of the format, which the file WHEEL states."""
        lines = self.read("WHEEL").splitlines()
        stated = (line for line in lines if line.lower().startswith(b"wheel-version:"))
        version = next(stated, b"").partition(b":")[2].strip()
        # PEP 427 has installers reject a greater major version, but not a greater minor one.
        if not version.startswith(b"1."):
            raise self.malformed(f"has the unknown wheel format {version[:16]!r}")

    def record(self) -> dict[str, _Recorded]:
        """Parse RECORD: ``path,algorithm=digest,size`` lines (CSV)."""
        document = self.read("RECORD")
        record: dict[str, _Recorded] = {}
        try:
            for row in csv.reader(document.decode("utf-8").splitlines()):
                name, hashed, size = row
                if name.rpartition("/")[2] in _UNRECORDED and not hashed:
                    continue
                algorithm, _, digest = hashed.partition("=")
                if algorithm not in _ALGORITHMS or name in record:
                    raise self.contradicts_record(f"line {row} is not acceptable")
                record[name] = _Recorded(
                    algorithm,
                    # RECORD has URL-safe base64 without its padding (PEP 427).
                    base64.b64decode(digest + "=" * (-len(digest) % 4), b"-_", validate=True),
                    int(size) if size else None,
                )
        except (ValueError, csv.Error, binascii.Error) as error:
            raise self.contradicts_record(f"it cannot be read: {error}") from error
        return record

    def entry(self, name: str, recorded: _Recorded | None, distribution: Distribution) -> TarEntry:
        """Return the entry of a file in an image."""
        member, owner = self.members[name], self._wheel.filename
        path, is_script = self.destination(name, distribution)
        content = self._content(member, recorded)
        mode = 0o755 if is_script or member.external_attr >> 16 & 0o111 else 0o644
        # PEP 427 leaves it to the installer to put its interpreter into scripts that begin so.
        # This looks at bytes that are not checked yet. What becomes part of the image is read
        # through content(), which compares it with RECORD.
        start = next(self._content(member, None)(), b"") if is_script else b""
        if start.startswith(b"#!python"):
            self._check_size(member)
            script = b"".join(content()).partition(b"\n")[2]
            interpreter = distribution.interpreter.encode()
            return file_entry(path, owner, b"#!%b\n%b" % (interpreter, script), mode)
        sha256 = recorded.digest.hex() if recorded and recorded.algorithm == "sha256" else None
        return TarEntry(path, owner, "file", mode, member.file_size, content, sha256=sha256)

    def destination(self, name: str, distribution: Distribution) -> tuple[str, bool]:
        """Return the path in the image, by Debian's local installation scheme; and if a script."""
        data = self.info.removesuffix(".dist-info") + ".data"
        site = distribution.site
        path, is_script = f"{site}/{name}", False
        if name.startswith(f"{data}/"):
            _, scheme, rest = (*name.split("/", 2), "")[:3]
            roots = {
                "purelib": site,
                "platlib": site,
                "scripts": "usr/local/bin",
                "headers": f"usr/local/include/python{distribution.python}/{self._wheel.name}",
                "data": "usr/local",
            }
            if scheme not in roots or not rest:
                place = f"{self._wheel.filename}: {name}"
                raise rejected("CAP-I105", f"{place} belongs to no installation scheme")
            path, is_script = f"{roots[scheme]}/{rest}", scheme == "scripts"
        if path.startswith(f"{site}/capsule/"):
            whose = f"/{path} from {self._wheel.filename}"
            raise rejected("CAP-I109", f"{whose} would mix with Capsule's own code")
        return path, is_script

    def _content(self, member: zipfile.ZipInfo, recorded: _Recorded | None) -> Content:
        def chunks() -> Iterator[bytes]:
            digest = hashlib.new(recorded.algorithm) if recorded else None
            try:
                with self._archive.open(member) as stream:
                    while chunk := stream.read(CHUNK):
                        if digest:
                            digest.update(chunk)
                        yield chunk
            except _BROKEN as error:
                place = f"{self._wheel.filename}: {member.filename}"
                raise rejected("CAP-I105", f"{place} is damaged: {error}") from error
            if digest and recorded and digest.digest() != recorded.digest:
                what = f"{member.filename} has another {recorded.algorithm} digest"
                raise self.contradicts_record(what)

        return chunks

    def read(self, name: str) -> bytes:
        """Return a small file of the ``.dist-info`` folder."""
        member = self.members.get(f"{self.info}/{name}")
        if member is None:
            raise self.malformed("is not a wheel: it lacks WHEEL, METADATA or RECORD")
        self._check_size(member)
        return b"".join(self._content(member, None)())

    def _check_size(self, member: zipfile.ZipInfo) -> None:
        """Check the size of a file that is read as a whole. zipfile reads no more than stated."""
        if member.file_size > _MAX_DOCUMENT_BYTES:
            raise rejected(
                "CAP-I105",
                f"{self._wheel.filename}: {member.filename} has {member.file_size:,} bytes, more "
                f"than {_MAX_DOCUMENT_BYTES:,}",
            )


def _pruned(name: str, patterns: Sequence[str]) -> bool:
    """Tell if ``name`` is left out: compiled caches always are, else the last match decides."""
    return "__pycache__" in name.split("/") or chosen(name, patterns)
