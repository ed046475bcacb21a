"""Indexes of Debian's and Ubuntu's archives: ``InRelease``, which is signed, and ``Packages``.

They are read over HTTP. The signature is checked against the keys of the archive that come with
Capsule (``images/debian-archive-keyring.asc``, ``images/ubuntu-archive-keyring.asc``), and each
index against its SHA-256 in what is signed.
"""

from __future__ import annotations

import functools
import io
import lzma
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from capsule.experiment.canonical import sha256_hex
from capsule.experiment.files import write_atomic
from capsule.host.errors import CapsuleError
from capsule.host.reporter import Progress
from capsule.image.archives.deb import control_fields
from capsule.image.distribution import Distribution, Vendor
from capsule.image.recipe import data_file
from capsule.image.resolution.mirrors import Downloader, DownloadError, is_snapshot
from capsule.image.resolution.relations import Index, Stanza, version_key

_MAX_RELEASE_BYTES = 4 << 20
_MAX_INDEX_BYTES = 256 << 20


class RejectedIndexError(Exception):
    """An index from a mirror is not signed by the vendor, or is not what was signed."""


def read_archive(
    addresses: Iterable[str], distribution: Distribution, folder: Path, progress: Progress
) -> Index:
    """Read the packages of a release from mirrors.

    Snapshots are read only if there are no other mirrors: they are for versions that are gone.

    Args:
        addresses: The mirrors.
        distribution: The release.
        folder: Keeps the indexes for when there is no network; locked by the caller.
        progress: Told about each index that could not be read or is out of date.

    Raises:
        CapsuleError: CAP-L122 no mirror has a trusted index of the release itself.
    """
    addresses = list(addresses)
    current = [address for address in addresses if not is_snapshot(address)] or addresses
    texts, problems, released = [], list[str](), False
    with Downloader() as downloader:
        for address in current:
            reader = _Reader(downloader, address, distribution.vendor, folder, progress)
            for suite in suites(address, distribution):
                try:
                    texts += reader.read(suite)
                    # The suites of updates contain only what has changed, so they cannot replace
                    # the release.
                    released |= suite == distribution.codename
                except (DownloadError, RejectedIndexError) as error:
                    problems.append(str(error))
                    progress(f"the packages of {suite} are not used: {error}")
    if not released:
        raise CapsuleError(
            "CAP-L122",
            f"no package index of {distribution.title} could be read: {'; '.join(problems)}",
            fix=f"Connect to a mirror of {distribution.title}, or name one in "
            f"image.sources.debian or {distribution.vendor.variable}.",
        )
    return index_of(texts)


def suites(address: str, distribution: Distribution) -> list[str]:
    """Return the suites of a release that are read from a mirror.

    Debian's security updates have an archive of their own, ``debian-security``.
    """
    release = distribution.codename
    if "debian-security" in address.split("/"):
        return [f"{release}-security"]
    return [release, *(f"{release}-{update}" for update in distribution.vendor.updates)]


def index_of(texts: Iterable[str]) -> Index:
    """Return the packages of the contents of ``Packages`` files."""
    # An index describes tens of thousands of packages. Their fields are parsed only for those that
    # are asked for.
    blocks: dict[str, list[str]] = {}
    providers: dict[str, list[str]] = {}
    for text in texts:
        for block in text.split("\n\n"):
            if match := re.match(r"\s*Package: (\S+)", block):
                blocks.setdefault(match[1], []).append(block)
                if provided := re.search(r"^Provides: (.*)", block, re.MULTILINE):
                    for name in re.findall(r"(?:^|,)\s*([^\s,(]+)", provided[1]):
                        providers.setdefault(name, []).append(match[1])

    @functools.cache
    def candidate(name: str) -> Stanza | None:
        parsed = map(control_fields, blocks.get(name, ()))
        found = [Stanza(fields["Package"], fields["Version"], fields) for fields in parsed]
        return max(found, key=lambda each: version_key(each.version), default=None)

    def providers_of(name: str) -> Iterable[str]:
        return sorted(set(providers.get(name, ())))

    return Index(candidate, providers_of)


def signed_text(message: bytes, vendor: Vendor) -> str:
    """Return what the keys of an archive signed of an ``InRelease`` file, and nothing else.

    Raises:
        RejectedIndexError: It has no valid signature of theirs.
    """
    from pysequoia import verify

    try:
        signed: bytes = verify(message, store=lambda _: _keyring(vendor)).bytes or b""
        return signed.decode()
    except (RuntimeError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]  # below it, the library has a trace of its own
        raise RejectedIndexError(f"it is not signed by {vendor.name} ({reason})") from error


@functools.cache
def _keyring(vendor: Vendor) -> list[object]:
    from pysequoia import Cert

    return list(Cert.split_bytes(data_file("images", vendor.keyring).read_bytes()))


@dataclass(frozen=True)
class _Reader:
    """Reads the suites of one mirror."""

    downloader: Downloader
    address: str
    vendor: Vendor
    folder: Path
    progress: Progress

    def read(self, suite: str) -> list[str]:
        """Return the contents of a suite's ``Packages``, as its signed ``InRelease`` names them."""
        place = f"{self.address}/dists/{suite}"
        try:
            message, kept = self._release(suite)
            text = signed_text(message, self.vendor)
            _check_release(text, self.vendor, suite, place, self.progress)
            indexes = [self._index(suite, each, text) for each in self.vendor.components]
        except RejectedIndexError as error:
            raise RejectedIndexError(f"{place}: {error}") from error
        # Only what has passed every check replaces what is kept for use without a network.
        write_atomic(kept, message)
        return [lzma.decompress(index).decode() for index in indexes]

    def _release(self, suite: str) -> tuple[bytes, Path]:
        """Return a suite's ``InRelease``, the kept one without a network, and where it is kept."""
        kept = self._kept(f"dists/{suite}", "InRelease")
        try:
            message = self._get(f"dists/{suite}/InRelease", _MAX_RELEASE_BYTES)
        except DownloadError as error:
            if not kept.exists():
                raise
            self.progress(f"using the package index of the last resolution: {error}")
            message = kept.read_bytes()
        return message, kept

    def _index(self, suite: str, component: str, release: str) -> bytes:
        """Return the index of a component of a suite, downloaded only if it has changed."""
        digest = _index_digest(release, component)
        kept = self._kept(f"dists/{suite}/{component}", "Packages.xz")
        index = kept.read_bytes() if kept.exists() else b""
        if sha256_hex(index) != digest:
            index = self._download(f"dists/{suite}/{component}/binary-amd64", digest)
            write_atomic(kept, index)
        return index

    def _download(self, folder: str, digest: str) -> bytes:
        """Download an index by its name, or by its digest if it was replaced in the meantime."""
        for path in (f"{folder}/Packages.xz", f"{folder}/by-hash/SHA256/{digest}"):
            index = self._get(path, _MAX_INDEX_BYTES)
            if sha256_hex(index) == digest:
                return index
        raise RejectedIndexError(
            f"its {path} has another SHA-256 than the one that {self.vendor.name} signed"
        )

    def _get(self, path: str, limit: int) -> bytes:
        target = io.BytesIO()
        self.downloader.download(self.address, path, target, limit)
        return target.getvalue()

    def _kept(self, path: str, name: str) -> Path:
        return self.folder / f"{sha256_hex(f'{self.address}/{path}'.encode())[:16]}.{name}"


def _check_release(text: str, vendor: Vendor, suite: str, place: str, progress: Progress) -> None:
    """Check that a release is the one that was asked for; say if it is out of date."""
    found = control_fields(text)
    # The same keys sign other releases. A mirror could serve the index of one under this name.
    if (found.get("Origin"), found.get("Codename")) != (vendor.name, suite):
        raise RejectedIndexError(f"it is of {found.get('Origin')} {found.get('Codename')}")
    until = found.get("Valid-Until")
    if until is not None and parsedate_to_datetime(until) < datetime.now(UTC):
        progress(f"{place} was valid until {until}: later updates are not in it")


def _index_digest(text: str, component: str) -> str:
    name = f"{component}/binary-amd64/Packages.xz"
    section = text.partition("\nSHA256:\n")[2]
    match = re.search(rf"^ ([0-9a-f]{{64}}) +[0-9]+ {re.escape(name)}$", section, re.MULTILINE)
    if match is None:
        raise RejectedIndexError(f"it does not list {name}")
    return match[1]
