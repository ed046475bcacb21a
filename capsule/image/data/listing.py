"""The listing of a data set: every path in it, with what is there.

A listing is a JSON object of path to fact: ``file SIZE SHA256``, ``folder`` or ``symlink TARGET``.
The SHA-256 of its canonical form (RFC 8785) is the digest of the data set. Modes, owners and times
are no part of it. A data set that is one file is listed like a folder with that file in it.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from capsule.experiment.beneath import MAX_ENTRIES, UnboundedError, entries_beneath
from capsule.experiment.canonical import canonical_json, parse_canonical_json, sha256_hex
from capsule.experiment.lock import LockedData
from capsule.host.encoding import is_utf8
from capsule.host.errors import CapsuleError
from capsule.host.reporter import Progress
from capsule.host.wording import counted
from capsule.image.archives.layers import file_chunks, plain_path

Listing = dict[str, str]
FOLDER = "folder"
MAX_LISTING_BYTES = 64 << 20

_FACT = re.compile(r"folder|file (?:0|[1-9][0-9]{0,15}) [0-9a-f]{64}|symlink [^\0\n\r]{1,4096}")
_TELL_SECONDS = 5.0
_EVERYONE_READS, _EVERYONE_ENTERS = stat.S_IROTH, stat.S_IROTH | stat.S_IXOTH


class Meter:
    """Says every few seconds how much of a data set was read or downloaded so far."""

    def __init__(self, what: str, progress: Progress, total: int | None = None) -> None:
        """Begin at zero.

        Args:
            what: The beginning of each line, e.g. ``hashing the data set mnist``.
            progress: Told each line.
            total: Bytes of all, if that is known.
        """
        self._what, self._progress = what, progress
        self._of = "" if total is None else f" of {_mebibytes(total)}"
        self._done, self._told = 0, time.monotonic()

    def add(self, size: int) -> None:
        """Count bytes."""
        self._done += size
        if time.monotonic() - self._told >= _TELL_SECONDS:
            self._told = time.monotonic()
            self._progress(f"{self._what}: {_mebibytes(self._done)}{self._of}")

    def sha256(self, path: Path) -> str:
        """Hash a regular file, and count its bytes."""
        digest = hashlib.sha256()
        # A file that was listed may have been replaced by a link or a pipe by now, which this
        # rejects.
        for chunk in file_chunks(path):
            digest.update(chunk)
            self.add(len(chunk))
        return digest.hexdigest()


def list_data(
    name: str,
    place: Path,
    sha256: Callable[[Path], str],
    *,
    called: str | None = None,
    for_everyone: bool = False,
) -> Listing:
    """List the data set that lies at ``place``.

    Args:
        name: Its name, for messages.
        place: A folder, or a file.
        sha256: Hashes a file.
        called: What a file is listed as; its own name by default.
        for_everyone: Reject what users other than its owner cannot read. Runs of root have another
            user.

    Raises:
        CapsuleError: CAP-L302, something in it cannot be part of a data set; CAP-L303, it holds no
            file; CAP-L304, it has too many files or too long paths; CAP-L305, it cannot be read.
    """
    try:
        listing = dict(sorted(_facts(name, place, sha256, called, for_everyone=for_everyone)))
        _check_size(listing)
    except UnboundedError as error:
        raise CapsuleError(
            "CAP-L304",
            f"the data set {name!r} at {place} is too large: {error}",
            fix=f"Pack it into archives: at most {MAX_ENTRIES:,} files and folders are pinned one "
            "by one.",
        ) from error
    except OSError as error:
        raise CapsuleError(
            "CAP-L305",
            f"the data set {name!r} at {place} cannot be read: {error.strerror}"
            + (f": {error.filename}" if isinstance(error.filename, str) else ""),
            fix="Let your user read all of it.",
        ) from error
    if all(fact == FOLDER for fact in listing.values()):
        raise CapsuleError(
            "CAP-L303",
            f"the data set {name!r} at {place} contains no file",
            fix=f"Correct data.{name}.path, or remove the data set from the spec.",
        )
    return listing


def _check_size(listing: Listing) -> None:
    """Reject a listing that no reader of bundles would accept."""
    document = listing_document(listing)
    if len(document) > MAX_LISTING_BYTES:
        raise UnboundedError(f"its listing has more than {MAX_LISTING_BYTES >> 20} MiB")
    try:
        parse_listing(document)
    except ValueError as error:
        raise UnboundedError(f"its listing has {error}") from error


def listing_document(listing: Listing) -> bytes:
    """Return a listing as it is stored and digested."""
    return canonical_json(listing)


def digests_of(listing: Listing) -> tuple[str, ...]:
    """Return the SHA-256 by which a spec can name a data set: of its only file, of its listing."""
    facts = [fact.split() for fact in listing.values()]
    files = [words[-1] for words in facts if words[0] == "file"]
    return (*(files if len(facts) == 1 else ()), pin_of(listing).sha256)


def pin_of(listing: Listing) -> LockedData:
    """Return what a lock says of a data set with this listing."""
    sizes = [int(fact.split()[1]) for fact in listing.values() if fact.startswith("file ")]
    return LockedData(
        sha256=sha256_hex(listing_document(listing)), files=len(sizes), size=sum(sizes)
    )


def size_text(pin: LockedData) -> str:
    """Return the size of a data set as text, e.g. ``3 files, 12,345 bytes``."""
    return f"{counted(pin.files, 'file')}, {counted(pin.size, 'byte')}"


def parse_listing(data: bytes) -> Listing:
    """Read a stored listing.

    Raises:
        ValueError: It is not one, or has a path that leads elsewhere.
    """
    listing = parse_canonical_json(data)
    if not isinstance(listing, dict):
        raise ValueError("it is not an object")  # noqa: TRY004 - callers expect one kind of error
    for path, fact in listing.items():
        if not isinstance(fact, str) or not _FACT.fullmatch(fact):
            raise ValueError(f"{path!a} has the fact {str(fact)[:100]!a}")
        if not _is_plain(path):
            raise ValueError(f"{path!a} is not a plain path")
    return listing


def _is_plain(path: str) -> bool:
    try:
        return path != "" and plain_path(path) == path
    except ValueError:
        return False


def first_difference(pinned: Listing, found: Listing) -> str:
    """Describe the first path, in order, in which two unequal listings differ."""
    path = min(path for path in {*pinned, *found} if pinned.get(path, "") != found.get(path, ""))
    here, there = found.get(path), pinned.get(path)
    if here is None:
        return f"{path} is missing"
    if there is None:
        return f"{path} was added"
    kinds = here.split()[0], there.split()[0]
    if kinds != ("file", "file"):
        return f"{path} is now a {here}, and was a {there}"
    (_, size, digest), (_, old_size, old_digest) = here.split(), there.split()
    if size != old_size:
        return f"{path} now has {counted(int(size), 'byte')}, and had {int(old_size):,}"
    return f"{path} now has the SHA-256 {digest}, and had {old_digest}"


def _facts(
    name: str,
    place: Path,
    sha256: Callable[[Path], str],
    called: str | None,
    *,
    for_everyone: bool,
) -> Iterator[tuple[str, str]]:
    """Yield each path of a data set with its fact."""
    reads, enters = (_EVERYONE_READS, _EVERYONE_ENTERS) if for_everyone else (0, 0)
    if not place.is_dir():
        facts = place.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise _not_taken(name, str(place), "is a pipe, socket or device")
        _check_mode(name, place, place, facts.st_mode, reads)
        listed = _listed_path(name, called or place.name)
        # The place of a single file may be a link, and the files of a listing are opened without
        # following one.
        yield listed, f"file {facts.st_size} {sha256(place.resolve())}"
        return
    _check_mode(name, place, place, place.stat().st_mode, enters)
    for entry in entries_beneath(place):
        path, mode = place / entry.path, entry.facts.st_mode
        listed = _listed_path(name, entry.path)
        if stat.S_ISDIR(mode):
            _check_mode(name, place, path, mode, enters)
            yield listed, FOLDER
        elif stat.S_ISLNK(mode):
            yield listed, f"symlink {_target(name, place, entry.path)}"
        elif stat.S_ISREG(mode):
            _check_mode(name, place, path, mode, reads)
            yield listed, f"file {entry.facts.st_size} {sha256(path)}"
        else:
            raise _not_taken(name, entry.path, "is a pipe, socket or device")


def _listed_path(name: str, path: str) -> str:
    """Return a path as it is listed."""
    try:
        return plain_path(path)
    except ValueError as error:
        raise CapsuleError(
            "CAP-L302",
            f"the data set {name!r} has the unsafe path {path!a}: {error}",
            fix="Rename it.",
        ) from error


def _check_mode(name: str, place: Path, path: Path, mode: int, needed: int) -> None:
    if mode & needed != needed:
        raise CapsuleError(
            "CAP-L305",
            f"the data set {name!r}: {path} has mode {stat.S_IMODE(mode):04o}. Capsule runs as "
            "root, so the run has another user, who could not read it",
            fix=f"Let everyone read the data set: chmod -R a+rX {place}",
        )


def _target(name: str, place: Path, path: str) -> str:
    """Return where a symbolic link points, if that is inside the data set."""
    target = str((place / path).readlink())
    # Each link of a chain may stay inside while the chain leads outside, so all are followed.
    lands = Path(os.path.realpath(place / path))
    if target.startswith("/") or not lands.is_relative_to(place.resolve()):
        raise _not_taken(name, path, f"is a link to {target!r}, outside of the data set")
    if any(character in target for character in "\0\n\r") or not is_utf8(target):
        raise _not_taken(name, path, f"is a link to the unsafe path {target!r}")
    return target


def _not_taken(name: str, path: str, reason: str) -> CapsuleError:
    return CapsuleError(
        "CAP-L302",
        f"the data set {name!r}: {path} {reason}, which cannot be pinned",
        fix="Remove it from the folder, or replace it by the file itself.",
    )


def _mebibytes(size: int) -> str:
    return f"{size >> 20:,} MiB"
