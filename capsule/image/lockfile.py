"""The lock file beside a spec: its name, and how it is read and written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from capsule.experiment.lock import Lock
from capsule.host.errors import CapsuleError
from capsule.host.outputs import write_file
from capsule.host.run_directory import LOCK
from capsule.host.streams import read_whole
from capsule.host.validation import first_reason

_SUFFIX = ".lock.json"
MAX_LOCK_BYTES = 4 << 20


def lock_path(spec_path: Path) -> Path:
    """Return where the lock of a spec file is kept: ``x.yaml`` -> ``x.lock.json``."""
    return spec_path.with_name(spec_path.stem + _SUFFIX)


def specs_beside(path: Path) -> Iterator[Path]:
    """Yield the files of which one is the spec of a lock file, which is named after it."""
    for suffix in (".yaml", ".yml", ".json"):
        yield path.with_name(path.name.removesuffix(_SUFFIX) + suffix)


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
            data = read_whole(stream, MAX_LOCK_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        fix = "Name an existing lock file, or make one with 'capsule lock'."
        raise CapsuleError("CAP-L001", f"lock file {path}: {error.strerror}", fix=fix) from error
    except OSError as error:
        raise _unreadable("CAP-L001", path, error.strerror or str(error)) from error
    try:
        # write_lock() ends the file with a line break, which is no part of the canonical document.
        return Lock.parse(data.removesuffix(b"\n"))
    except ValueError as error:
        raise _unreadable("CAP-L002", path, first_reason(error)) from error


def earlier_lock(path: Path, *, replaced: bool = False) -> Lock | None:
    """Return the lock in a file; None without one, or if a damaged one is to be replaced."""
    try:
        return read_lock(path) if path.exists() else None
    except CapsuleError:
        if replaced:
            return None
        raise


def write_lock(path: Path, lock: Lock) -> None:
    """Write a lock file atomically: canonical JSON and a newline.

    Raises:
        CapsuleError: CAP-X003 or CAP-X004, it cannot be written.
    """
    write_file(path, lock.document() + b"\n")


def _unreadable(code: str, path: Path, reason: str) -> CapsuleError:
    return CapsuleError(
        code,
        f"lock file {path}: {reason}",
        fix="Delete it and run 'capsule lock' again, or restore it from version control.",
    )
