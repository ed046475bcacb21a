"""Pinning data sets: when a spec is locked, each is listed at the place that the spec names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

import requests
import urllib3

from capsule.experiment.canonical import sha256_file, sha256_hex
from capsule.experiment.files import write_atomic
from capsule.experiment.lock import Lock, LockedData
from capsule.experiment.spec import DataSpec
from capsule.host.errors import CapsuleError, innermost_reason
from capsule.host.folders import real_path
from capsule.host.network import HttpClient, body
from capsule.host.reporter import Progress
from capsule.host.wording import counted
from capsule.image.archives.layers import plain_path
from capsule.image.cache import Cache, file_state, folder_state
from capsule.image.data.listing import (
    Listing,
    Meter,
    digests_of,
    first_difference,
    list_data,
    pin_of,
)
from capsule.image.data.places import (
    address_of,
    find_file,
    keep_listing,
    read_listing,
    remember,
)


def capture_data(
    data: Mapping[str, DataSpec] | None,
    base: Path,
    cache: Cache,
    earlier: Sequence[Lock],
    progress: Progress,
    *,
    may_change: bool = False,
) -> dict[str, LockedData] | None:
    """Pin the data sets of a spec.

    A data set is hashed once, until something in it changes; a run hashes it anyway.

    Args:
        data: The spec's section; None if it has none.
        base: The folder that paths are relative to.
        cache: Keeps listings, and what is downloaded; remembers where data sets lie.
        earlier: Locks with earlier pins. A file that one of them pins is not downloaded again.
        progress: Told about downloads, and how far they and hashing are.
        may_change: Accept a data set that is not what any of them pins.

    Raises:
        CapsuleError: CAP-L301, a data set has neither path nor address, or nothing is at its path;
            CAP-L302 to CAP-L305, it cannot be pinned; CAP-L306, its file cannot be downloaded;
            CAP-L307, it is not what the spec expects; CAP-L308, it is not what was pinned before.
    """
    if data is None:
        return None
    pins = {}
    for name, spec in data.items():
        pinned = [lock.data[name] for lock in earlier if lock.data and name in lock.data]
        listing, place, address = _captured(name, spec, base, cache, pinned, progress)
        pins[name] = pin_of(listing)
        if pinned and pins[name] not in pinned and not may_change:
            raise _changed(name, read_listing(pinned[0].sha256, cache), listing)
        remember(cache, listing, place, address)
    return pins


def _captured(
    name: str,
    spec: DataSpec,
    base: Path,
    cache: Cache,
    pinned: Sequence[LockedData],
    progress: Progress,
) -> tuple[Listing, Path, str | None]:
    """Return the listing of a data set, where it lies, and where it was downloaded from."""
    address = None
    if spec.url is not None:
        place, listing, address = _fetched(name, spec, spec.url, cache, pinned, progress)
    elif spec.path is not None:
        place = _existing(name, spec.path, base)
        listing = _listed(name, place, cache, progress)
    else:
        raise CapsuleError(
            "CAP-L301",
            f"data.{name} has neither path nor url",
            fix=f"State where the data set is, in data.{name}.path or data.{name}.url.",
        )
    _check_expected(name, spec, listing)
    return listing, place, address


def _existing(name: str, path: str, base: Path) -> Path:
    """Return the place of a data set.

    Raises:
        CapsuleError: CAP-L301, nothing is there; CAP-L302, the lock will be there; CAP-L305, it
            cannot be reached.
    """
    place = real_path(base / Path(path).expanduser())
    code, reason = "CAP-L301", "does not exist"
    fix = "Name a file or a folder, relative to the spec."
    try:
        if place.is_dir() and real_path(base).is_relative_to(place):
            code, reason = "CAP-L302", "has the spec in it, and would change with its lock"
            fix = "Move the data set into another folder, without the spec."
        elif place.exists():
            return place
    except OSError as error:
        code, reason = "CAP-L305", f"cannot be read: {error.strerror}"
    raise CapsuleError(code, f"data.{name}.path {path!r}: {place} {reason}", fix=fix)


def _listed(name: str, place: Path, cache: Cache, progress: Progress) -> Listing:
    """List a data set, or return what was found when each file had the same state as now."""
    note = _note_of(place, cache)
    if note is not None and note.exists():
        known = read_listing(note.read_text(errors="replace"), cache)
        if known is not None:
            return known
    listing = list_data(name, place, Meter(f"hashing the data set {name!r}", progress).sha256)
    if note is not None:
        write_atomic(note, keep_listing(cache, listing).encode())
    return listing


def _note_of(place: Path, cache: Cache) -> Path | None:
    """Return where it is noted what a data set has in its present state.

    Returns:
        None if its state cannot be told, because something in it vanishes or cannot be read.
    """
    try:
        # The state has the time of change of every file, which no program can set.
        state = folder_state(place) if place.is_dir() else " ".join(map(str, file_state(place)))
    except OSError:
        return None
    return cache.data.folder("states") / sha256_hex(os.fsencode(f"{place} {state}"))


def _check_expected(name: str, spec: DataSpec, listing: Listing) -> None:
    """Compare a data set with the SHA-256 that the spec expects: of its file, or of its listing."""
    accepted = digests_of(listing)
    if spec.sha256 is not None and spec.sha256 not in accepted:
        raise CapsuleError(
            "CAP-L307",
            f"data.{name}.sha256 is {spec.sha256}, but the data set has {accepted[0]}",
            fix="Get the expected data set, or correct the field.",
        )


def _changed(name: str, before: Listing | None, listing: Listing) -> CapsuleError:
    what = (
        f"its digest is {pin_of(listing).sha256} now"
        if before is None
        else first_difference(before, listing)
    )
    return CapsuleError(
        "CAP-L308",
        f"the data set {name!r} has changed since it was locked: {what}",
        fix="Restore it; or, if it changed on purpose, run 'capsule lock --refresh-data'.",
    )


def _fetched(
    name: str,
    spec: DataSpec,
    url: str,
    cache: Cache,
    pinned: Sequence[LockedData],
    progress: Progress,
) -> tuple[Path, Listing, str | None]:
    """Return the file at an address, in the cache; its listing; and where it was downloaded from.

    It is downloaded unless it is in the cache already: as the spec expects it, or as it was pinned.
    A file that the spec expects may be there from another address.
    """
    called = _file_name(name, url)
    found = find_file(url, spec.sha256, pinned, cache)
    if found is None:
        with cache.data.scratch() as scratch:
            _download(name, url, scratch / "file", progress)
            sha256 = sha256_file(scratch / "file")
            cache.data.add(scratch / "file", sha256)
    else:
        sha256 = found
    place = cache.data.path(sha256)
    listing = {called: f"file {place.stat().st_size} {sha256}"}
    return place, listing, url if found is None else address_of(pin_of(listing), cache)


def _file_name(name: str, url: str) -> str:
    """Return the name of the file at an address.

    Raises:
        CapsuleError: CAP-L306, the address has none that a file can have.
    """
    try:
        parts = urlsplit(url)
        called = PurePosixPath(unquote(parts.path)).name
        if "@" in parts.netloc:
            # Logins that are in ~/.netrc are used for the download.
            reason = "it contains a login, which every bundle would publish"
        elif plain_path(called):
            return called
        else:
            reason = "it names no file"
    except ValueError as error:
        reason = str(error)
    raise CapsuleError(
        "CAP-L306",
        f"data.{name}.url {url!r} is not the address of a file: {reason}",
        fix="Give the address of one file, without a login, which ~/.netrc may have; pack several "
        "files into an archive.",
    )


def _download(name: str, url: str, target: Path, progress: Progress) -> None:
    """Download a file.

    Raises:
        CapsuleError: CAP-L306.
    """
    progress(f"downloading the data set {name!r}")
    try:
        with (
            HttpClient() as client,
            client.request("GET", url) as answer,
            target.open("wb") as stream,
        ):
            answer.raise_for_status()
            _copy(answer, stream, name, progress)
    except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
        raise CapsuleError(
            "CAP-L306",
            f"data.{name}.url {url!r} cannot be downloaded: {innermost_reason(error)}",
            fix=f"Check the address and the network, or download the file and name it in "
            f"data.{name}.path.",
        ) from error


def _copy(answer: requests.Response, stream: BinaryIO, name: str, progress: Progress) -> None:
    size = answer.headers.get("Content-Length", "")
    total = int(size) if size.isdecimal() else None
    meter = Meter(f"downloading the data set {name!r}", progress, total)
    received = 0
    for chunk in body(answer):
        stream.write(chunk)
        received += len(chunk)
        meter.add(len(chunk))
    if total is not None and received != total:
        raise requests.ConnectionError(f"{received:,} of {counted(total, 'byte')} were received")
