"""Where data sets lie on this machine.

A data set is never copied: a run sees it where it lies. The cache remembers by its digest where it
was seen last, and keeps its listing, so that the first file that changed can be named. It also
holds what was downloaded, and what a bundle carried. All of that is hashed before it is used.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from capsule.experiment.canonical import sha256_hex
from capsule.experiment.fields import Model
from capsule.experiment.files import write_atomic
from capsule.experiment.lock import Lock, LockedData
from capsule.host.encoding import is_utf8
from capsule.host.errors import CapsuleError
from capsule.host.folders import user_path
from capsule.host.reporter import Progress
from capsule.image.cache import Cache
from capsule.image.data.listing import (
    MAX_LISTING_BYTES,
    Listing,
    Meter,
    first_difference,
    list_data,
    listing_document,
    parse_listing,
    pin_of,
    size_text,
)

_PLACES, _UNPACKED = "places", "unpacked"  # folders of the store


class _Place(Model):
    """Where a data set was seen last."""

    path: str
    url: str | None = None


class FoundData(NamedTuple):
    """A data set on this machine.

    Attributes:
        path: Where it lies: a folder, or a file.
        url: Where it was downloaded from, if it was.
        listing: What is in it, as its lock pins it.
        cache: Remembers where it lies.
    """

    path: Path
    url: str | None
    listing: Listing
    cache: Cache

    @property
    def below(self) -> str:
        """What a run sees it as, below its name: the name of a file; ``""`` for a folder."""
        return "" if self.path.is_dir() else next(iter(self.listing))

    def check(self, name: str, progress: Progress) -> LockedData:
        """Hash all of it, and return what was found, which is what is pinned.

        Where it lies is remembered only now: the user may have named another place by mistake.

        Args:
            name: Its name in the spec.
            progress: Told how far that is, every few seconds.

        Raises:
            CapsuleError: CAP-E044, it is not the pinned one; CAP-L305, it cannot be read.
        """
        try:
            found = _listed(name, self.path, pin_of(self.listing), self.listing, progress)
        except CapsuleError as error:
            if error.code == "CAP-L305":  # it may be the pinned one, but cannot be read
                raise
            # A bundle may list what no spec can pin.
            raise self._differs(name, error.message) from error
        if found == self.listing:
            remember(self.cache, self.listing, self.path, self.url)
            return pin_of(found)
        raise self._differs(name, first_difference(self.listing, found))

    def _differs(self, name: str, what: str) -> CapsuleError:
        error = _differs(name, self.path, what)
        if self.path != unpacked_place(self.cache, pin_of(self.listing)):
            return error
        fix = f"Delete {self.path}: it is unpacked again from a bundle that contains the data set."
        return CapsuleError(error.code, error.message, fix=fix)


def parse_places(texts: Sequence[str]) -> dict[str, Path]:
    """Parse ``NAME=PATH`` of the option ``--data``.

    Raises:
        CapsuleError: CAP-E045, anything else, or a name twice.
    """
    places: dict[str, Path] = {}
    for text in texts:
        name, separator, path = text.partition("=")
        if not (name and separator and path) or name in places:
            wrong = "names a data set twice" if name in places else "is not NAME=PATH"
            raise CapsuleError(
                "CAP-E045",
                f"--data {text!r} {wrong}",
                fix="Write, for example, --data mnist=/datasets/mnist, once for each data set.",
            )
        try:
            places[name] = user_path(path)
        except ValueError as error:
            raise CapsuleError(
                "CAP-E045", f"--data {text!r}: {error}", fix="Write the whole path."
            ) from error
    return places


def check_places(given: Mapping[str, Path], names: Collection[str]) -> None:
    """Check where the user says that data sets are.

    Args:
        given: The places.
        names: The data sets of the spec or of its lock.

    Raises:
        CapsuleError: CAP-E045, a path does not exist, or there is no data set of that name.
    """
    for name, path in given.items():
        if name not in names:
            reason = f"the data sets of the lock are {', '.join(names) or 'none'}"
        elif not path.exists():
            reason = "the path does not exist"
        else:
            continue
        raise CapsuleError(
            "CAP-E045",
            f"--data {name}={path}: {reason}",
            fix="Name a data set of the lock, and the file or folder with its content.",
        )


def find_data(
    lock: Lock, cache: Cache, progress: Progress, given: Mapping[str, Path] | None = None
) -> dict[str, FoundData]:
    """Find the data sets of a lock. They are hashed here only if their listing is not known.

    Args:
        lock: The locked experiment.
        cache: Remembers where data sets were seen.
        progress: Told how far hashing is.
        given: Where the user says that some are.

    Raises:
        CapsuleError: CAP-E044, a data set is not what the lock pins; CAP-E045, a given path does
            not exist, or the lock has no data set of that name; CAP-E046, a data set is not on
            this machine.
    """
    pins, given = lock.data or {}, given or {}
    check_places(given, pins)
    return {name: _find(name, pin, cache, progress, given.get(name)) for name, pin in pins.items()}


def _find(
    name: str, pin: LockedData, cache: Cache, progress: Progress, given: Path | None
) -> FoundData:
    known = _remembered(pin, cache)
    path = given.resolve() if given is not None else _place_of(known, pin, cache)
    if path is None or not path.exists():
        raise CapsuleError(
            "CAP-E046",
            f"the data set {name!r} ({size_text(pin)}, SHA-256 {pin.sha256}) is not on this machine"
            + ("" if path is None else f": {path} does not exist any more"),
            fix=f"Name its file or folder with --data {name}=PATH, or ask for a "
            "bundle that contains it (capsule run --embed-data).",
        )
    # A copy of the user was not downloaded from where the data set once was.
    url = known.url if known is not None and Path(known.path) == path else None
    listing = read_listing(pin.sha256, cache)
    if listing is None:
        listing = _listed(name, path, pin, None, progress)
        if (found := pin_of(listing)) != pin:
            what = f"its digest is {found.sha256}, and the lock has {pin.sha256}"
            raise _differs(name, path, what)
        remember(cache, listing, path, url)
    return FoundData(path, url, listing, cache)


def _place_of(known: _Place | None, pin: LockedData, cache: Cache) -> Path | None:
    """Return where a data set was seen last, or what a bundle carried if that is gone."""
    seen = None if known is None else Path(known.path)
    unpacked = unpacked_place(cache, pin)
    return unpacked if unpacked.exists() and (seen is None or not seen.exists()) else seen


def _listed(
    name: str, path: Path, pin: LockedData, pinned: Listing | None, progress: Progress
) -> Listing:
    """Hash a data set, and return its listing."""
    meter = Meter(f"hashing the data set {name!r}", progress, pin.size)
    # A data set of one file may lie under another name than it was pinned with.
    called = next(iter(pinned)) if pinned is not None and len(pinned) == 1 else None
    return list_data(name, path, meter.sha256, called=called, for_everyone=os.getuid() == 0)


def _differs(name: str, path: Path, what: str) -> CapsuleError:
    return CapsuleError(
        "CAP-E044",
        f"the data set {name!r} at {path} is not what the lock pins: {what}",
        fix=f"Restore it, or name an unchanged copy with --data {name}=PATH. If it changed on "
        "purpose, run 'capsule lock --refresh-data'.",
    )


def remember(cache: Cache, listing: Listing, path: Path, url: str | None = None) -> None:
    """Keep the listing of a data set, and where it lies.

    What a bundle carried is found by its digest, and may be deleted with the cache. So its place is
    not remembered, and that of a copy of the user is kept.
    """
    digest = keep_listing(cache, listing)
    if path.resolve() == unpacked_place(cache, pin_of(listing)).resolve():
        return
    if not is_utf8(str(path)):  # such a place cannot be noted
        return
    place = _Place(path=str(path), url=url)
    write_atomic(cache.data.folder(_PLACES) / digest, place.document())


def keep_listing(cache: Cache, listing: Listing) -> str:
    """Keep the listing of a data set, wherever that lies, and return its digest."""
    document = listing_document(listing)
    digest = sha256_hex(document)
    if not cache.data.has(digest):
        with cache.data.scratch() as scratch:
            (scratch / "listing").write_bytes(document)
            cache.data.add(scratch / "listing", digest)
    return digest


def read_listing(sha256: str, cache: Cache) -> Listing | None:
    """Return the listing with a digest, if it is in the cache.

    A damaged copy counts as missing: the data set is hashed again then. So does a file that was
    downloaded, whose digest a spec or an untrusted lock may name, and which may be of any size.
    """
    try:
        path = cache.data.path(sha256)
        if path.stat().st_size > MAX_LISTING_BYTES:
            return None
        data = path.read_bytes()
        return parse_listing(data) if sha256_hex(data) == sha256 else None
    except (FileNotFoundError, ValueError):
        return None


def unpacked_place(cache: Cache, pin: LockedData) -> Path:
    """Return where in the cache a data set is, or would be, that a bundle carried."""
    return cache.data.folder(_UNPACKED) / pin.sha256


def address_of(pin: LockedData, cache: Cache) -> str | None:
    """Return where the copy of a data set that was seen last was downloaded from, if it was."""
    known = _remembered(pin, cache)
    return None if known is None else known.url


def find_file(
    url: str, expected: str | None, pinned: Iterable[LockedData], cache: Cache
) -> str | None:
    """Return the SHA-256 of a file in the cache that need not be downloaded again, if one is there.

    Args:
        url: Its address.
        expected: The digest that a spec expects, of the file or of its listing. Such a file may be
            from another address.
        pinned: Earlier pins of the data set.
        cache: Keeps what was downloaded.
    """
    # A file of the same name at another address need not be the same.
    known = [pin.sha256 for pin in pinned if address_of(pin, cache) == url]
    digests = known if expected is None else [expected, *known]
    files = (each for digest in digests for each in _files_of(digest, cache))
    return next(filter(cache.data.has, files), None)


def _files_of(sha256: str, cache: Cache) -> list[str]:
    """Return the digests of files that a digest stands for: of a listing or of a file itself."""
    listing = read_listing(sha256, cache)
    if listing is None:
        return [sha256]
    return [fact.split()[-1] for fact in listing.values() if fact.startswith("file ")]


def _remembered(pin: LockedData, cache: Cache) -> _Place | None:
    note = cache.data.folder(_PLACES) / pin.sha256
    try:
        return _Place.parse(note.read_bytes())
    except (FileNotFoundError, ValueError):  # it was never seen, or the note is damaged
        return None
