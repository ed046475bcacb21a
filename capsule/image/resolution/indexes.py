"""Indexes of the Debian archive, read over HTTP: ``InRelease``, which is signed, and ``Packages``.

The signature is checked against the keys of Debian's archive that come with Capsule
(``images/debian-archive-keyring.asc``), and the index against its SHA-256 in what is signed.
"""

from __future__ import annotations

import functools
import io
import lzma
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from capsule.experiment.canonical import sha256_hex, write_atomic
from capsule.host.errors import CapsuleError
from capsule.image.distribution import Distribution
from capsule.image.recipe import data_file
from capsule.image.resolution.mirrors import Downloader, DownloadError, is_snapshot, suites
from capsule.image.resolution.relations import Index, Stanza, version_key

_INDEX = "main/binary-amd64/Packages.xz"
_MAX_RELEASE_BYTES = 4 << 20
_MAX_INDEX_BYTES = 256 << 20

Progress = Callable[[str], None]


class RejectedIndexError(Exception):
    """An index from a mirror is not signed by Debian, or is not what was signed."""


def read_archive(
    addresses: Iterable[str], distribution: Distribution, folder: Path, progress: Progress
) -> Index:
    """Read the packages of a release of Debian from mirrors.

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
            for suite in suites(address, distribution.codename):
                try:
                    texts.append(_read_suite(downloader, address, suite, folder, progress))
                    # The suites of updates contain only what has changed, so they cannot replace
                    # the release.
                    released |= suite == distribution.codename
                except (DownloadError, RejectedIndexError) as error:
                    problems.append(str(error))
                    progress(f"the Debian packages of {suite} are not used: {error}")
    if not released:
        raise CapsuleError(
            "CAP-L122",
            f"no package index of {distribution.title} could be read: {'; '.join(problems)}",
            fix=f"Connect to a mirror of {distribution.title}, or name one in "
            "image.sources.debian or CAPSULE_DEBIAN_MIRROR.",
        )
    return index_of(texts)


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
        found = [_stanza(block) for block in blocks.get(name, ())]
        return max(found, key=lambda each: version_key(each.version), default=None)

    def providers_of(name: str) -> Iterable[str]:
        return sorted(set(providers.get(name, ())))

    return Index(candidate, providers_of)


def fields(block: str) -> dict[str, str]:
    """Parse a paragraph of control data (deb822), first lines of fields only."""
    lines = (line.split(":", 1) for line in block.splitlines() if line[:1] not in ("", " ", "\t"))
    return {field[0]: field[1].strip() for field in lines if len(field) == 2}


def signed_text(message: bytes) -> str:
    """Return what Debian's archive keys signed of an ``InRelease`` file, and nothing else.

    Raises:
        RejectedIndexError: It has no valid signature of theirs.
    """
    from pysequoia import verify

    try:
        signed: bytes = verify(message, store=lambda _: _keyring()).bytes or b""
        return signed.decode()
    except (RuntimeError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]  # below it, the library has a trace of its own
        raise RejectedIndexError(f"it is not signed by Debian ({reason})") from error


@functools.cache
def _keyring() -> list[object]:
    from pysequoia import Cert

    return list(Cert.split_bytes(data_file("images", "debian-archive-keyring.asc").read_bytes()))


def _read_suite(
    downloader: Downloader, address: str, suite: str, folder: Path, progress: Progress
) -> str:
    """Return the contents of a suite's ``Packages``, as its signed ``InRelease`` describes it."""
    place = f"{address}/dists/{suite}"
    name = sha256_hex(place.encode())[:16]
    kept, kept_index = folder / f"{name}.InRelease", folder / f"{name}.Packages.xz"
    try:
        message = _get(downloader, address, f"dists/{suite}/InRelease", _MAX_RELEASE_BYTES)
    except DownloadError as error:
        if not (kept.exists() and kept_index.exists()):
            raise
        progress(f"using the package index of the last resolution: {error}")
        message = kept.read_bytes()
    try:
        text = signed_text(message)
        _check_release(text, suite, place, progress)
        digest = _index_digest(text)
        index = kept_index.read_bytes() if kept_index.exists() else b""
        if sha256_hex(index) != digest:
            index = _download_index(downloader, address, suite, digest)
            write_atomic(kept_index, index)
        # Only what has passed every check replaces what is kept for use without a network.
        write_atomic(kept, message)
        return lzma.decompress(index).decode()
    except RejectedIndexError as error:
        raise RejectedIndexError(f"{place}: {error}") from error


def _check_release(text: str, suite: str, place: str, progress: Progress) -> None:
    """Check that a release is the one that was asked for; say if it is out of date."""
    found = fields(text)
    # The same keys sign other releases. A mirror could serve the index of one under this name.
    if (found.get("Origin"), found.get("Codename")) != ("Debian", suite):
        raise RejectedIndexError(f"it is of {found.get('Origin')} {found.get('Codename')}")
    until = found.get("Valid-Until")
    if until is not None and parsedate_to_datetime(until) < datetime.now(UTC):
        progress(f"{place} was valid until {until}: later updates are not in it")


def _index_digest(text: str) -> str:
    section = text.partition("\nSHA256:\n")[2]
    match = re.search(rf"^ ([0-9a-f]{{64}}) +[0-9]+ {re.escape(_INDEX)}$", section, re.MULTILINE)
    if match is None:
        raise RejectedIndexError(f"it does not list {_INDEX}")
    return match[1]


def _download_index(downloader: Downloader, address: str, suite: str, digest: str) -> bytes:
    """Download an index by its name, or by its digest if it was replaced in the meantime."""
    folder = f"dists/{suite}/{_INDEX.rpartition('/')[0]}"
    for path in (f"dists/{suite}/{_INDEX}", f"{folder}/by-hash/SHA256/{digest}"):
        index = _get(downloader, address, path, _MAX_INDEX_BYTES)
        if sha256_hex(index) == digest:
            return index
    raise RejectedIndexError(f"its {_INDEX} has another SHA-256 than the one that Debian signed")


def _get(downloader: Downloader, address: str, path: str, limit: int) -> bytes:
    target = io.BytesIO()
    downloader.download(address, path, target, limit)
    return target.getvalue()


def _stanza(block: str) -> Stanza:
    found = fields(block)
    return Stanza(found["Package"], found["Version"], found)
