"""How ``capsule run`` begins: with a new run, or with one that was interrupted."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from capsule.cli.common import locked
from capsule.host.run_directory import LOCK

if TYPE_CHECKING:
    from capsule.engine.interface import Engine
    from capsule.engine.select import EngineChoice
    from capsule.experiment.lock import Lock
    from capsule.experiment.spec import SourcesSpec, Spec
    from capsule.host.reporter import Progress
    from capsule.image.cache import Cache


@dataclass(frozen=True)
class NewRun:
    """A run of a spec or a lock file, in a new directory.

    Attributes:
        path: The spec or the lock file.
        overrides: Settings of the command line.
        output: Folder in which the run directory is made.
        ended: False, because a new run has not ended.
    """

    path: Path
    overrides: list[str]
    output: Path
    ended: ClassVar[bool] = False

    @property
    def folder(self) -> Path:
        """A folder on the file system of the run directory."""
        return self.output

    def spec(self) -> Spec:
        """Return the spec that is asked for, before it is locked."""
        from capsule.host.spec_file import load_spec
        from capsule.image.lockfile import names_lock, read_lock

        if names_lock(self.path):
            return read_lock(self.path).spec
        return load_spec(self.path, self.overrides)

    def check_folder(self) -> None:
        """Check that the run directory can be made.

        Raises:
            CapsuleError: CAP-X004.
        """
        from capsule.host.outputs import require_folder

        require_folder(self.output)

    def open_engine(self, wanted: EngineChoice, progress: Progress) -> Engine:
        """Open the engine that executes the run."""
        from capsule.engine.select import open_engine

        return open_engine(wanted, progress=progress)

    def lock(self, cache: Cache, progress: Progress) -> tuple[Lock, SourcesSpec]:
        """Return the lock, and the sources that its packages may come from."""
        return locked(self.path, self.overrides, cache, progress=progress)

    def directory(self, lock: Lock) -> Path:
        """Make ``OUTPUT/NAME-UTC`` with the lock, with a counter if two runs start in a second."""
        from capsule.image.lockfile import write_lock

        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        for attempt in range(1, 1000):
            suffix = "" if attempt == 1 else f"-{attempt}"
            directory = self.output / f"{lock.spec.name}-{stamp}{suffix}"
            try:
                self.output.mkdir(parents=True, exist_ok=True)
                directory.mkdir(mode=0o700)  # a run may have another user id (CAP-E042)
            except FileExistsError:
                continue
            try:
                write_lock(directory / LOCK, lock)
            except BaseException:
                with suppress(OSError):
                    directory.rmdir()  # without a lock, no command takes it for a run
                raise
            return directory
        raise FileExistsError(self.output / f"{lock.spec.name}-{stamp}")


@dataclass(frozen=True)
class ResumedRun:
    """A run that was interrupted, in the directory that it has.

    Attributes:
        folder: The run directory.
        overrides: Settings of the command line.
    """

    folder: Path
    overrides: list[str]

    @property
    def ended(self) -> bool:
        """Whether the run has ended, so that it only has to be listed or packed."""
        from capsule.resumption import has_ended

        return has_ended(self.folder)

    def spec(self) -> Spec:
        """Return the spec that the run has."""
        from capsule.resumption import lock_of_run

        return lock_of_run(self.folder).spec

    def check_folder(self) -> None:
        """Do nothing, because the run directory exists already."""

    def open_engine(self, wanted: EngineChoice, progress: Progress) -> Engine:
        """Open the engine that executes the rest of the run."""
        from capsule.resumption import reopen_engine

        return reopen_engine(self.folder, wanted, progress)

    def lock(self, _cache: Cache, _progress: Progress) -> tuple[Lock, SourcesSpec]:
        """Return the lock, and the sources that its packages may come from."""
        from capsule.experiment.spec import SourcesSpec
        from capsule.resumption import lock_to_resume

        return lock_to_resume(self.folder, self.overrides), SourcesSpec()

    def directory(self, _lock: Lock) -> Path:
        """Return the run directory."""
        return self.folder
