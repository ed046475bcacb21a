"""Fetching: everything a lock names, into the cache, each file checked against its SHA-256.

Wheels come from a local folder that holds the very file, else through pip, which follows the
machine's own configuration; uv tells where they are, since it knows PyTorch's own indexes and finds
twenty wheels ten times as fast. Debian packages come from pool paths below each mirror in turn;
snapshots of the archive have those that mirrors dropped.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

from capsule.experiment.lock import LockedDebianPackage, LockedImage, LockedWheel
from capsule.experiment.spec import SourcesSpec
from capsule.host.errors import CapsuleError
from capsule.host.reporter import Progress
from capsule.host.wording import counted
from capsule.image.archives.wheel import check_filename
from capsule.image.cache import Cache, HashMismatchError
from capsule.image.distribution import Distribution, Vendor
from capsule.image.resolution.mirrors import Downloader, DownloadError, is_snapshot, mirrors
from capsule.image.resolution.sources import machine_sources
from capsule.image.resolution.wheels import ResolvedWheel, WheelSearch, compile_wheels

Package = TypeVar("Package", LockedDebianPackage, LockedWheel)


def fetch(
    distribution: Distribution,
    image: LockedImage,
    cache: Cache,
    sources: SourcesSpec,
    *,
    progress: Progress,
) -> None:
    """Bring every wheel and Debian package of ``image`` into the cache.

    Files already there are not asked for again. An interruption loses only the Debian package that
    is being downloaded; complete wheels are in pip's own cache, unless its configuration has none.

    Args:
        distribution: The image's.
        image: What the lock names.
        cache: Where files go.
        sources: The spec's sources, added to the machine's own.
        progress: Told about each stage and file.

    Raises:
        CapsuleError: CAP-I302 a wheel is not available, CAP-I303 nor a Debian package, CAP-I305
            the lock contradicts itself, CAP-L101 pip's configuration is broken.
    """
    fetch_debian(distribution.vendor, image.debian, cache, sources, progress)
    fetch_wheels(distribution, image.wheels, cache, sources, progress)


def fetch_wheels(
    distribution: Distribution,
    wheels: Iterable[LockedWheel],
    cache: Cache,
    spec: SourcesSpec,
    progress: Progress,
) -> None:
    """Fetch wheels that are not in the cache: from local folders, the rest by one call of pip.

    Raises:
        CapsuleError: CAP-I302 a wheel is nowhere, or not what its SHA-256 says; CAP-L101 pip's
            configuration is broken.
    """
    if not (left := _missing(wheels, cache)):
        return
    search = WheelSearch(distribution, machine_sources(spec), cache, progress)
    left = [wheel for wheel in left if not _from_folder(search, wheel)]
    if not left:
        return
    search.progress(f"fetching {counted(len(left), 'wheel')}")
    places = locate(search, left)
    with search.cache.scratch() as folder:
        lines = [_requirement(wheel, places.get(wheel.sha256)) for wheel in left]
        (folder / "requirements.txt").write_text("".join(f"{line}\n" for line in lines))
        messages = _run_pip(search, folder)
        for wheel in left:
            if not (folder / wheel.filename).exists():
                raise _wheel_error(left, messages)
            search.cache.add(folder / wheel.filename, wheel.sha256)


def locate(search: WheelSearch, wheels: Iterable[LockedWheel]) -> dict[str, ResolvedWheel]:
    """Return where wheels are now, by their SHA-256, without those that are not found.

    Asked are the machine's sources, then the index that PyTorch keeps for builds of its own, such
    as ``2.13.0+cpu``.

    Raises:
        CapsuleError: CAP-I302 a build of PyTorch's own is nowhere, CAP-I305 see :func:`_pin`.
    """
    pending = {wheel.sha256: wheel for wheel in wheels}
    backends = sorted({_backend(wheel) for wheel in pending.values()} - {""})
    places: dict[str, ResolvedWheel] = {}
    messages = "its sources have another file under this version"
    # With --torch-backend, uv takes other packages from the usual index, which therefore need not
    # be asked by itself.
    own = [""] if search.sources.configured or not backends else []
    for backend in (*own, *backends):
        options = ["--no-deps"] + (["--torch-backend", backend] if backend else [])
        pins = [_pin(wheel) for wheel in pending.values()]
        try:
            found = compile_wheels(search, pins, options)
        except CapsuleError as error:
            messages = error.message
            continue
        places |= {wheel.sha256: wheel for wheel in found if wheel.sha256 in pending}
        pending = {key: wheel for key, wheel in pending.items() if key not in places}
        # pip finds the rest by name and version (_requirement).
        if not any(_backend(wheel) for wheel in pending.values()):
            return places
    if special := [wheel for wheel in pending.values() if _backend(wheel)]:
        raise _wheel_error(special, messages)
    return places


def fetch_debian(
    vendor: Vendor,
    packages: Iterable[LockedDebianPackage],
    cache: Cache,
    sources: SourcesSpec,
    progress: Progress,
) -> None:
    """Fetch Debian packages that are not in the cache, asking each mirror for all that are left.

    Raises:
        CapsuleError: CAP-I303 no mirror has a package.
    """
    if not (left := _missing(packages, cache)):
        return
    progress(f"fetching {len(left)} {vendor.name} packages")
    problems: list[str] = []
    for address in mirrors(vendor, sources):
        if is_snapshot(address):
            named = ", ".join(f"{package.name} {package.version}" for package in left)
            progress(f"asking the snapshot {address} for {named}")
        with cache.scratch() as folder, Downloader() as downloader:
            left = [
                package
                for package in left
                if not _download(package, address, downloader, folder, cache, problems)
            ]
        if not left:
            return
    raise CapsuleError(
        "CAP-I303",
        f"no mirror provides the locked {vendor.name} package {_about(left, problems)}",
        fix=f"Name {vendor.alternative}, in image.sources.debian or {vendor.variable}; or run "
        "'capsule lock --refresh-base' to take the current versions.",
    )


def _missing(packages: Iterable[Package], cache: Cache) -> list[Package]:
    cache.use()  # before has() answers
    return [package for package in packages if not cache.has(package.sha256)]


def _from_folder(search: WheelSearch, wheel: LockedWheel) -> bool:
    for folder in search.sources.folders():
        file = folder / wheel.filename
        if file.is_file():
            search.progress(f"copying {wheel.filename}")
            try:
                search.cache.add(file, wheel.sha256)
            except HashMismatchError:
                # Another build of the same version; a further source may have the locked one.
                search.progress(f"{wheel.filename} in a local folder is not the locked file")
            else:
                return True
    return False


def _backend(wheel: LockedWheel) -> str:
    """Return the index of PyTorch's own that a wheel's version points to, or ''."""
    local = wheel.version.partition("+")[2]
    return local if re.fullmatch(r"cpu|cu[0-9]+", local) else ""


def _pin(wheel: LockedWheel) -> str:
    """Return ``name==version`` of the file name. Other fields of an untrusted lock may be false.

    Raises:
        CapsuleError: CAP-I305 the wheel's name or version is not that of its file.
    """
    from packaging.utils import parse_wheel_filename

    check_filename(wheel)
    name, version, _, _ = parse_wheel_filename(wheel.filename)
    return f"{name}=={version}"


def _requirement(wheel: LockedWheel, place: ResolvedWheel | None) -> str:
    """Write the line that makes pip fetch exactly this wheel."""
    # For a bare pin, pip would ask its own indexes, which need not have PyTorch's own builds.
    what = f"{wheel.name} @ {place.url}" if place else _pin(wheel)
    return f"{what} --hash=sha256:{wheel.sha256}"


def _run_pip(search: WheelSearch, folder: Path) -> str:
    """Download what ``requirements.txt`` in ``folder`` lists into it; return pip's messages."""
    distribution = search.distribution
    # pip does not extend a manylinux_x_y platform to older C libraries, so all of them are named.
    platforms = [part for tag in distribution.platform_tags for part in ("--platform", tag)]
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes",
        "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--progress-bar=off",
        "--python-version", distribution.python, "--implementation", "cp",
        "--abi", distribution.abi, "--abi", "abi3", "--abi", "none", *platforms,
        "--dest", str(folder), "--requirement", str(folder / "requirements.txt"),
    ]  # fmt: skip
    # pip's status is not asked for: what counts is which files are there afterwards.
    messages: list[str] = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=search.sources.pip_environment(),
    ) as process:
        for line in process.stdout or ():
            messages.append(line)
            if match := re.match(r"\s*(?:Downloading|Using cached) (?:\S*/)?(\S+\.whl)", line):
                search.progress(f"fetching {match[1]}")
    return "".join(messages)


def _wheel_error(wheels: Sequence[LockedWheel], messages: str) -> CapsuleError:
    """Name the wheels that the errors in ``messages`` are about, or all of them."""
    errors = messages[messages.find("ERROR: ") :] if "ERROR: " in messages else messages
    about = [wheel for wheel in wheels if wheel.filename in unquote(errors)] or [
        wheel for wheel in wheels if f"{wheel.name}=={wheel.version}" in errors
    ]
    names = ", ".join(wheel.filename for wheel in about or wheels)
    return CapsuleError(
        "CAP-I302",
        f"cannot fetch {names} with the locked SHA-256: {' '.join(errors.split())}",
        fix="Check the network, pip's configuration and image.sources. If the author of the lock "
        "built the wheel, put it into a folder and set PIP_FIND_LINKS to this folder. Lock again "
        "if the file was withdrawn.",
    )


def _download(
    package: LockedDebianPackage,
    address: str,
    downloader: Downloader,
    folder: Path,
    cache: Cache,
    problems: list[str],
) -> bool:
    """Take a package from a mirror into the cache, if the mirror has what was locked."""
    file = folder / package.sha256
    try:
        with file.open("wb") as stream:
            downloader.download(address, package.pool, stream, package.size)
        cache.add(file, package.sha256)
    except DownloadError as error:
        problems.append(str(error))
    except HashMismatchError as error:
        problems.append(f"{package.pool}: {error.message}")
    else:
        return True
    finally:
        file.unlink(missing_ok=True)
    return False


def _about(packages: Iterable[LockedDebianPackage], problems: Iterable[str]) -> str:
    """Name packages, each with what went wrong with it."""
    lines = [unquote(line) for line in problems]
    return "; ".join(
        f"{package.name} {package.version} "
        f"({', '.join(line for line in lines if package.pool in line) or 'no answer'})"
        for package in packages
    )
