"""The data sets of a bundle: their listings, and the data sets themselves where it carries them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from capsule.bundle import run_bundle
from capsule.bundle.run_bundle import RecordedRun
from capsule.experiment.lock import LockedData
from capsule.host.errors import CapsuleError
from capsule.host.owner import temporary_folder
from capsule.host.reporter import Progress
from capsule.image.cache import Cache
from capsule.image.data.archive import archive_size, read_data, unpack_data
from capsule.image.data.listing import (
    MAX_LISTING_BYTES,
    Listing,
    digests_of,
    first_difference,
    parse_listing,
    pin_of,
)
from capsule.image.data.places import (
    FoundData,
    find_data,
    keep_listing,
    unpacked_place,
)
from capsule.verification.integrity.layers import bad_layer, check_ratio, contradiction, unpack


def check_data(run: RecordedRun) -> None:
    """Check the listing of each data set, and each data set that the bundle carries.

    Raises:
        CapsuleError: CAP-V040, a listing is not the locked one; CAP-V004, a data set cannot be
            unpacked, or is not the listed one.
    """
    for name, pin in (run.lock.data or {}).items():
        listing = _listing(run, name, pin)
        if run_bundle.DATA_ARCHIVE.format(name=name) in run.bundle.files:
            # The checks are made on the way into the context.
            with _archive(run, name, listing):
                pass


def data_digests(run: RecordedRun, name: str) -> tuple[str, ...]:
    """Return the SHA-256 by which a spec can name a data set of a bundle that was checked."""
    return digests_of(_listing(run, name, (run.lock.data or {})[name]))


def supplied_data(
    run: RecordedRun, cache: Cache, given: Mapping[str, Path], progress: Progress
) -> dict[str, FoundData]:
    """Find the data sets of a run: where the user says, else those that the bundle carries.

    What the bundle carries is unpacked into the cache, once. Without either, a data set is looked
    for where one of the same digest was seen last.

    Args:
        run: The recorded run.
        cache: Keeps what is unpacked.
        given: Where the user says that some are.
        progress: Told about each stage.

    Raises:
        CapsuleError: As :func:`check_data` and :func:`capsule.image.data.places.find_data`. An
            error of a data set that is missing says where its author downloaded it.
    """
    addresses, places = run.observations().data or {}, dict(given)
    for name, pin in (run.lock.data or {}).items():
        listing = _listing(run, name, pin)
        keep_listing(cache, listing)
        carried = run_bundle.DATA_ARCHIVE.format(name=name) in run.bundle.files
        if carried and name not in given:
            place = unpacked_place(cache, pin)
            # Of two processes that need the same data set, the second one waits and then finds it.
            with cache.lock(f"data-{pin.sha256}"):
                if not place.exists():
                    progress(f"unpacking the data set {name!r} ({pin.size >> 20:,} MiB)")
                    _unpack(run, name, listing, place, cache)
            places[name] = place
    try:
        return find_data(run.lock, cache, progress, places)
    except CapsuleError as error:
        known = [f"{name}: {url}" for name, url in addresses.items() if url is not None]
        if error.code != "CAP-E046" or not known:
            raise
        fix = f"{error.fix} The signer states these addresses: {', '.join(known)}."
        raise CapsuleError(error.code, error.message, fix=fix) from error


def _unpack(run: RecordedRun, name: str, listing: Listing, place: Path, cache: Cache) -> None:
    with _archive(run, name, listing) as archive, cache.data.scratch() as scratch:
        unpack_data(archive, scratch / "data")
        # The data set appears under its name as a whole. A killed process leaves only its scratch
        # folder.
        (scratch / "data").rename(place)


def _listing(run: RecordedRun, name: str, pin: LockedData) -> Listing:
    member = run_bundle.DATA_LISTING.format(name=name)
    try:
        listing = parse_listing(run.bundle.content(member, MAX_LISTING_BYTES))
    except ValueError as error:
        raise contradiction(member, str(error)) from error
    if (found := pin_of(listing)) != pin:
        raise contradiction(member, f"it lists {found.sha256}, and the lock pins {pin.sha256}")
    return listing


@contextmanager
def _archive(run: RecordedRun, name: str, listing: Listing) -> Iterator[Path]:
    """Decompress the archive of a data set and check what is in it; deleted at the end."""
    # The size follows from the listing, which the lock pins, so it is known before a byte is
    # unpacked.
    member, size = run_bundle.DATA_ARCHIVE.format(name=name), archive_size(listing)
    check_ratio(member, run.bundle.files.signed(member).size, size)
    with temporary_folder("capsule-data-") as folder:
        archive = folder / "data.tar"
        with run.bundle.open(member) as source, archive.open("wb") as target:
            unpack(source, target, size, member)
        try:
            found = read_data(archive)
        except CapsuleError as error:
            raise bad_layer(member, error.message) from error
        if found != listing:
            raise bad_layer(member, f"of the listed files, {first_difference(listing, found)}")
        yield archive
