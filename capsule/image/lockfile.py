"""The lock file beside a spec: read it, reuse its pins, write it anew when the spec moved on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from capsule import __version__
from capsule.experiment.lock import (
    Lock,
    LockedCode,
    LockedData,
    LockedDebianPackage,
    LockedImage,
    LockedProject,
    LockedWheel,
    without_sources,
)
from capsule.experiment.spec import Spec
from capsule.host.errors import CapsuleError
from capsule.host.outputs import require_file, write_file
from capsule.host.platform import require_execution
from capsule.host.run_directory import LOCK
from capsule.host.validation import first_reason
from capsule.host.wording import counted
from capsule.image.assembly.base import locked_base
from capsule.image.assembly.making import ASSEMBLER_VERSION
from capsule.image.cache import Cache
from capsule.image.code import training_code_digest
from capsule.image.data.capture import capture_data
from capsule.image.distribution import distribution_of
from capsule.image.recipe import Recipe, recipe_for
from capsule.image.resolution.debian import resolve_debian
from capsule.image.resolution.project import capture_project
from capsule.image.resolution.resolve import resolve_wheels
from capsule.image.resolution.tasks import check_packages, check_tasks

_SUFFIX = ".lock.json"
MAX_LOCK_BYTES = 4 << 20
MAX_SHOWN = 20  # untracked files that are listed by name


class Pins(NamedTuple):
    """The packages of a lock.

    Attributes:
        wheels: Python packages.
        debian: Debian packages.
        base: SHA-256 of the layer that the Debian packages make, if it was known before.
    """

    wheels: tuple[LockedWheel, ...]
    debian: tuple[LockedDebianPackage, ...]
    base: str | None


def lock_path(spec_path: Path) -> Path:
    """Return where the lock of a spec file is kept: ``x.yaml`` -> ``x.lock.json``."""
    return spec_path.with_name(spec_path.stem + _SUFFIX)


def names_lock(path: Path) -> bool:
    """Tell the name of a lock file from that of a spec; a run directory has ``lock.json``."""
    return path.name.endswith(_SUFFIX) or path.name == LOCK


def pinned_already(path: Path, what: str = "lock file") -> CapsuleError:
    """Return the error of settings for a file that has a lock instead of a spec."""
    return CapsuleError(
        "CAP-L003",
        f"{path} is a {what}, whose pins cannot be changed",
        fix=f"Name the spec instead of the {what}.",
    )


def read_lock(path: Path) -> Lock:
    """Read a lock file.

    Raises:
        CapsuleError: CAP-L001 unreadable or too large, CAP-L002 not a lock.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_LOCK_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        fix = "Name an existing lock file, or make one with 'capsule lock'."
        raise CapsuleError("CAP-L001", f"lock file {path}: {error.strerror}", fix=fix) from error
    except OSError as error:
        raise _unreadable("CAP-L001", path, error.strerror or str(error)) from error
    if len(data) > MAX_LOCK_BYTES:
        raise _unreadable("CAP-L001", path, "larger than 4 MiB")
    try:
        # write_lock() ends the file with a line break, which is no part of the canonical document.
        return Lock.parse(data.removesuffix(b"\n"))
    except ValueError as error:
        raise _unreadable("CAP-L002", path, first_reason(error)) from error


def write_lock(path: Path, lock: Lock) -> None:
    """Write a lock file atomically: canonical JSON and a newline.

    Raises:
        CapsuleError: CAP-X003 or CAP-X004, it cannot be written.
    """
    write_file(path, lock.document() + b"\n")


def obtain_lock(
    spec: Spec,
    path: Path,
    cache: Cache,
    *,
    write: bool = True,
    refresh: bool = False,
    refresh_base: bool = False,
    refresh_data: bool = False,
    leave_out: Sequence[Path] = (),
    progress: Callable[[str], None],
) -> Lock:
    """Return the lock of ``spec``, keeping the pins of the lock file at ``path`` while they fit.

    Pins are kept as long as the spec asks for the same image on the same accelerator, and a data
    set must be what was pinned; everything else of the lock (hyper-parameters, seeds, the training
    code, the source tree of a program) follows the spec at once.

    Args:
        spec: The spec.
        path: Lock file.
        cache: Where the resolver keeps what it downloads.
        write: Write the lock file when it is new or changed.
        refresh: Resolve the packages again even if their pins fit, and replace a damaged lock.
        refresh_base: Also take the base's Debian packages from the mirrors as they are now, not
            from the list that Capsule ships.
        refresh_data: Pin data sets as they are now.
        leave_out: Files that are no part of the source tree, such as the spec itself.
        progress: Told about each stage.

    Raises:
        CapsuleError: The lock file is damaged, a pin cannot be resolved, or the source tree or a
            data set cannot be captured (CAP-L…).
    """
    project = capture(spec, path, cache, progress, leave_out)
    before = _earlier_lock(path, replaced=refresh)
    if write and before is None:
        with _beside_spec():
            require_file(path)  # before packages are resolved
    kept = [] if before is None or refresh_data else [before]
    data = capture_data(spec.data, path.parent, cache, kept, progress)
    lock = resolve(
        spec,
        cache,
        project=project,
        data=data,
        previous=None if refresh or refresh_base else before,
        refresh_base=refresh_base,
        progress=progress,
    )
    if write and lock != before:
        with _beside_spec():
            write_lock(path, lock)
        progress(f"wrote {path}")
    return lock


@contextmanager
def _beside_spec() -> Iterator[None]:
    """Have the error of a lock that cannot be written say where locks are written."""
    try:
        yield
    except CapsuleError as error:
        raise CapsuleError(
            error.code,
            error.message,
            fix="Copy the spec to a folder that you may write to: its lock is written beside it.",
        ) from error


def _earlier_lock(path: Path, *, replaced: bool) -> Lock | None:
    """Return the lock in a file; None without one, or if a damaged one is to be replaced."""
    try:
        return read_lock(path) if path.exists() else None
    except CapsuleError:
        if replaced:
            return None
        raise


def resolve(
    spec: Spec,
    cache: Cache,
    *,
    project: LockedProject | None = None,
    data: dict[str, LockedData] | None = None,
    previous: Lock | None = None,
    refresh_base: bool = False,
    progress: Callable[[str], None],
) -> Lock:
    """Resolve every pin of ``spec``.

    Without a network, the package indexes of the last resolution are used.

    Args:
        spec: The spec.
        cache: Keeps the package indexes between calls, and the Debian packages of a base layer
            whose digest Capsule does not ship.
        project: The captured source tree, if the spec has one.
        data: The captured data sets, if the spec has some.
        previous: A lock whose packages are kept if the spec still asks for the same.
        refresh_base: Take the base's Debian packages from the mirrors as they are now instead of
            the list that Capsule ships.
        progress: Told about each stage.

    Raises:
        CapsuleError: CAP-L101 to CAP-L110 Python packages, CAP-L122 to CAP-L125 Debian packages,
            CAP-I… the base layer cannot be made of them, CAP-E019 this platform builds no images,
            CAP-L204 the lock would be too large.
    """
    require_execution()
    recipe, sources = recipe_for(spec), spec.image.sources
    pins = find_pins(spec, cache, previous=previous, refresh_base=refresh_base, progress=progress)
    check_packages(spec, pins.wheels)
    # A misspelt task is reported before the base layer is made, for which packages may have to be
    # downloaded.
    check_tasks(spec, pins.wheels, cache, progress)
    base = pins.base or locked_base(pins.debian, recipe, cache, sources, progress)
    image = locked_image(recipe, pins, base)
    lock = Lock(spec=without_sources(spec), image=image, project=project, data=data)
    _check_size(lock)
    return lock


def _check_size(lock: Lock) -> None:
    """Reject a lock that :func:`read_lock` would not read."""
    size = len(lock.document())
    if size >= MAX_LOCK_BYTES:  # the file has a line break, too
        raise CapsuleError(
            "CAP-L204",
            f"the lock would have {counted(size, 'byte')}, more than {MAX_LOCK_BYTES:,}: the "
            "source tree has too many files with too long paths",
            fix="Exclude files with code.files, or have git ignore them.",
        )


def find_pins(
    spec: Spec,
    cache: Cache,
    *,
    previous: Lock | None = None,
    refresh_base: bool = False,
    progress: Callable[[str], None],
) -> Pins:
    """Find the packages of a spec: those of ``previous`` if they fit, or else by resolving them.

    Nothing but package indexes is downloaded. The arguments and errors are those of
    :func:`resolve`.
    """
    recipe = recipe_for(spec)
    if previous is not None and pins_fit(previous, spec):
        image = previous.image
        # By other rules of assembly the same packages make another layer.
        base = image.base if image.assembler == ASSEMBLER_VERSION else None
        return Pins(image.wheels, image.debian, base)
    wheels = resolve_wheels(spec, recipe.packages, cache, progress)
    debian = resolve_debian(
        distribution_of(spec.image),
        recipe.debian,
        spec.image.debian,
        spec.image.sources,
        cache,
        refresh_base=refresh_base,
        progress=progress,
    )
    return Pins(wheels, debian, None)


def locked_image(recipe: Recipe, pins: Pins, base: str) -> LockedImage:
    """Return what a lock says of its image, with this Capsule's training code.

    Args:
        recipe: The recipe.
        pins: The packages.
        base: SHA-256 of the layer that the Debian packages make.
    """
    return LockedImage(
        assembler=ASSEMBLER_VERSION,
        recipe=recipe.name,
        recipe_sha256=recipe.digest(),
        debian=pins.debian,
        base=base,
        wheels=pins.wheels,
        code=LockedCode(version=__version__, sha256=training_code_digest()),
    )


def pins_fit(lock: Lock, spec: Spec) -> bool:
    """Tell whether a spec asks for the image and the accelerator that a lock has pins for."""
    # A lock has no sources, so a spec in which only these have changed still fits.
    pinned, recipe = without_sources(spec), recipe_for(spec)
    return (lock.spec.image, lock.spec.accelerator, lock.image.recipe_sha256) == (
        pinned.image,
        pinned.accelerator,
        recipe.digest(),
    )


def capture(
    spec: Spec,
    path: Path,
    cache: Cache,
    progress: Callable[[str], None],
    leave_out: Sequence[Path] = (),
) -> LockedProject | None:
    """Capture the source tree beside a lock file, without that file, its spec and ``leave_out``.

    Data sets of the spec are no part of it either.

    Files that git does not track are listed: a bundle will publish them, and not every one of them
    need be meant.
    """
    if spec.code is None:
        return None
    stem = path.name.removesuffix(_SUFFIX)
    # The lock is named after its spec, which may have any of these suffixes. The spec is in the
    # lock already. In the tree, each change of a hyper-parameter would also change the image.
    specs = (path.with_name(stem + suffix) for suffix in (".yaml", ".yml", ".json"))
    named = (each.path for each in (spec.data or {}).values() if each.path is not None)
    data = [path.parent / Path(each).expanduser() for each in named]
    own = [path, *leave_out, *specs, *data]
    project = capture_project(spec.code, path.parent, cache, leave_out=own)
    if project.git is not None and (untracked := project.git.untracked):
        shown = ", ".join(untracked[:MAX_SHOWN])
        rest = len(untracked) - MAX_SHOWN
        more = f" and {rest:,} more" if rest > 0 else ""
        progress(f"the source tree includes files that git does not track: {shown}{more}")
    return project


def _unreadable(code: str, path: Path, reason: str) -> CapsuleError:
    return CapsuleError(
        code,
        f"lock file {path}: {reason}",
        fix="Delete it and run 'capsule lock' again, or restore it from version control.",
    )
