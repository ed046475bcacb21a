"""The names in a run directory, as ``capsule run`` makes it, and in the folder of a study."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

LOCK = "lock.json"
WORK = "work"  # what the training side writes (capsule.experiment.contract)
FINGERPRINT = "fingerprint.json"  # the machine and the engine that execute the run
STARTED = "started"  # a time in ISO 8601, of a run that has been executed
BUNDLES = "*.capsule.tar"
MEMBERS = "members"  # of the folder of a study, whose members have run directories
STUDY_LOCK = "study.lock.json"  # of the folder of a study


def is_run_directory(path: Path) -> bool:
    """Tell whether ``capsule run`` made a folder."""
    # The folder may be a run directory of another user, who shares the folder above.
    with suppress(PermissionError):
        return (path / LOCK).is_file()
    return False


def started(path: Path) -> datetime:
    """Return when a run directory was made.

    Before the first execution, this is the modification time of its lock. A copy of the folder may
    have another one, so the execution writes it down.

    Raises:
        ValueError: What was written down is not a time.
        OSError: The folder cannot be read.
    """
    if (path / STARTED).exists():
        found = datetime.fromisoformat((path / STARTED).read_text())
        if found.tzinfo is None:
            raise ValueError(f"the time in {STARTED!r} has no time zone")
        return found
    return datetime.fromtimestamp((path / LOCK).stat().st_mtime, tz=UTC)


def run_directories(folder: Path) -> Iterator[Path]:
    """Yield a folder if it is a run directory, or those in it and in the studies in it."""
    if is_run_directory(folder):
        yield folder
        return
    for place in (folder, folder / MEMBERS, *folder.glob(f"*/{MEMBERS}")):
        # It need not exist, and may be removed meanwhile.
        with suppress(FileNotFoundError, NotADirectoryError):
            yield from (path for path in place.iterdir() if is_run_directory(path))
