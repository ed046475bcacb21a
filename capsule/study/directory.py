"""The folder of a study: its lock, and a run directory for each member.

Everything that is known of a member is in its folder, so that any number of processes and machines
can run members, and a study that was stopped at any moment continues with what is missing::

    study.lock.json
    members/NAME/lock.json          the member's lock, as of every run directory
    members/NAME/work/              what the run writes
    members/NAME/*.capsule.tar      its signed bundle
    members/NAME/outcome.json       the bundle and claim id, or why the run failed
    members/NAME/console.log        what 'capsule run' printed
    members/NAME/hold               an empty file, on which a process that runs the member has the
                                    kernel's lock
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from capsule.experiment import contract, files
from capsule.experiment.fields import Model
from capsule.experiment.files import write_atomic
from capsule.experiment.lock import Sha256
from capsule.host.errors import CapsuleError
from capsule.host.locks import PATIENCE_SECONDS, is_locked, lock
from capsule.host.outputs import require_folder, write_output
from capsule.host.run_directory import LOCK, MEMBERS, STUDY_LOCK, WORK
from capsule.host.validation import first_reason
from capsule.image.lockfile import read_lock, write_lock
from capsule.report.runs import last_event, last_speed
from capsule.study.lock import LockedMember, StudyLock, read_study_lock

OUTCOME = "outcome.json"
CONSOLE = "console.log"
MAX_SHOWN = 10  # members that a message lists
HOLD = "hold"
MAX_OUTCOME_BYTES = 1 << 20

State = Literal["waiting", "running", "stopped", "failed", "done"]


class Outcome(Model):
    """The outcome of the last attempt to run a member."""

    schema_id: Literal["capsule/member-outcome/v1"] = Field(
        "capsule/member-outcome/v1", alias="schema"
    )
    bundle: Annotated[str, Field(pattern=r"^[^/\x00]+$")] | None = Field(
        None, description="File name of the bundle; null if the run failed."
    )
    claim_id: Sha256 | None = Field(None, description="The claim id; null if the run failed.")
    code: str | None = Field(
        None, description="Error code of a run that failed; null if it succeeded."
    )
    message: str | None = Field(
        None, description="Error message of a run that failed; null if it succeeded."
    )
    fix: str | None = Field(
        None, description="Remedy for the error of a run that failed; null if it succeeded."
    )

    @model_validator(mode="after")
    def _one_end(self) -> Outcome:
        done, failed = (self.bundle, self.claim_id), (self.code, self.message, self.fix)
        if not (None not in done and failed == (None,) * 3) and not (
            None not in failed and done == (None,) * 2
        ):
            raise ValueError("neither a bundle with its claim id nor an error")
        return self


class MemberState(NamedTuple):
    """Where a member stands.

    Attributes:
        name: The member.
        state: "stopped": it began, and no process runs it now.
        outcome: How it ended, if it did.
        step: Agent steps done, as the run reports them; None if it has not begun.
        total_steps: Agent steps of the whole run; None where a program does not say.
        steps_per_second: As a member that is running last reported it.
    """

    name: str
    state: State
    outcome: Outcome | None = None
    step: int | None = None
    total_steps: int | None = None
    steps_per_second: float | None = None


def shown_members(names: Sequence[str]) -> str:
    """Say which members there are, and name some of them if there are many."""
    more = ", ..." if len(names) > MAX_SHOWN else "."
    return f"Its members are {', '.join(names[:MAX_SHOWN])}{more}"


class StudyDirectory:
    """The folder of a study."""

    def __init__(self, path: Path, lock: StudyLock) -> None:
        self.path, self.lock = path, lock
        self._members = {member.name: member for member in lock.members}

    @classmethod
    def open(cls, path: Path) -> StudyDirectory:
        """Open an existing folder.

        Raises:
            CapsuleError: CAP-Y005 it is not one of a study, CAP-Y003 its lock is damaged.
        """
        if not (path / STUDY_LOCK).is_file():
            raise CapsuleError(
                "CAP-Y005",
                f"{path} is not the folder of a study: it has no {STUDY_LOCK}",
                fix="Name the folder that 'capsule study run' made.",
            )
        return cls(path, read_study_lock(path / STUDY_LOCK))

    @classmethod
    def create(cls, path: Path, lock: StudyLock, *, resume: bool) -> StudyDirectory:
        """Make the folder of a study, or take up an existing one.

        Args:
            path: The folder.
            lock: The study's lock; it may have members that the folder's does not have.
            resume: Whether the folder may exist.

        Raises:
            CapsuleError: CAP-Y005 a file is in its place; CAP-Y006 the folder exists, and
                ``resume`` is false; CAP-Y007 a member was run with another lock; CAP-X003 or
                CAP-X004, the folder cannot be made or written to.
        """
        study = cls(path, lock)
        if path.exists() and not path.is_dir():
            raise CapsuleError(
                "CAP-Y005", f"{path} is not a folder", fix="Choose another --output."
            )
        if (path / STUDY_LOCK).exists() and not resume:
            raise CapsuleError(
                "CAP-Y006",
                f"{path} already has runs of a study",
                fix="Add --resume to run what is missing there, or choose another --output.",
            )
        require_folder(path)
        # All members are checked before anything is written, so a rejected lock leaves the folder
        # as it was.
        for member in lock.members:
            study._check_lock(member)
        path.mkdir(parents=True, exist_ok=True)
        write_output(path / STUDY_LOCK, lock.document() + b"\n")
        return study

    def folder(self, name: str) -> Path:
        """Return the folder of a member.

        Raises:
            CapsuleError: CAP-Y008, the study has no such member.
        """
        self.member(name)
        return self.path / MEMBERS / name

    def member(self, name: str) -> LockedMember:
        """Return a member by its name.

        Raises:
            CapsuleError: CAP-Y008, the study has no such member.
        """
        if name not in self._members:
            raise CapsuleError(
                "CAP-Y008",
                f"study {self.lock.study.name} has no member {name!r}",
                fix=shown_members(list(self._members)),
            )
        return self._members[name]

    def _check_lock(self, member: LockedMember) -> None:
        path = self.folder(member.name) / LOCK
        if path.exists() and read_lock(path).digest() != member.lock:
            raise CapsuleError(
                "CAP-Y007",
                f"member {member.name} was run with another lock than the study now has for it",
                fix=f"Choose another --output, or delete {path.parent} to run it again.",
            )

    def missing(self, groups: Sequence[str] = ()) -> list[str]:
        """Return the members that have no bundle, in the order of the study.

        Args:
            groups: Only members of these; of all groups if it is empty.

        Raises:
            CapsuleError: CAP-Y013, the study has no such group.
        """
        return [name for name in self.chosen(groups) if self.bundle(name) is None]

    def chosen(self, groups: Sequence[str]) -> list[str]:
        """Return the members of groups, in the order of the study; all if no group is given.

        Raises:
            CapsuleError: CAP-Y013, the study has no such group.
        """
        known = self.lock.groups
        for group in groups:
            if group not in known:
                raise CapsuleError(
                    "CAP-Y013",
                    f"--only {group!r}: study {self.lock.study.name} has no such group",
                    fix=f"Its groups are {', '.join(known)}.",
                )
        planned = self.lock.planned
        return [name for name in self._members if not groups or planned[name].group in groups]

    @contextmanager
    def held(self, name: str, patience: float = PATIENCE_SECONDS) -> Iterator[tuple[Path, int]]:
        """Prepare the folder of a member for a run, and hold it.

        Args:
            name: The member.
            patience: Seconds to wait for a process that runs the member.

        Yields:
            The folder, and a descriptor that holds it for as long as any process has it open.

        Raises:
            CapsuleError: CAP-Y009, another process runs the member; CAP-Y007, it was run with
                another lock.
        """
        with self._hold(name, patience) as descriptor:
            folder = self.folder(name)
            if descriptor is None:
                raise CapsuleError(
                    "CAP-Y009",
                    f"another process is running member {name} in {folder}",
                    fix="Wait for it; 'capsule study status' shows when it has ended.",
                )
            self._check_lock(self.member(name))  # another study may have come first
            if not (folder / LOCK).exists():
                write_lock(folder / LOCK, self.lock.lock_of(self.member(name)))
            yield folder, descriptor

    @contextmanager
    def _hold(self, name: str, patience: float = PATIENCE_SECONDS) -> Iterator[int | None]:
        """Hold the folder of a member; yield None if another process holds it and keeps it."""
        folder = self.folder(name)
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # as every run directory (CAP-E042)
        # A file, and open for writing: NFS then tells other machines, too (flock(2)).
        descriptor = os.open(folder / HOLD, files.LOCK, 0o600)
        try:
            yield descriptor if lock(descriptor, folder, patience) else None
        finally:
            os.close(descriptor)

    def fail(self, name: str, outcome: Outcome) -> None:
        """Write down why a member failed whose process ended before it could do so itself.

        A member that has an outcome, or that a process runs, stays as it is.
        """
        with self._hold(name) as descriptor:
            if descriptor is not None and self.outcome(name) is None:
                write_atomic(self.folder(name) / OUTCOME, outcome.document())

    def forget(self, name: str) -> None:
        """Remove how the last attempt to run a member failed, unless a process runs it."""
        # Most members have no outcome, and need not be held.
        if not (self.folder(name) / OUTCOME).exists():
            return
        with self._hold(name) as descriptor:
            # A process may have finished the member since it was found to be missing.
            if descriptor is not None and self.bundle(name) is None:
                (self.folder(name) / OUTCOME).unlink(missing_ok=True)

    def state(self, name: str) -> MemberState:
        """Return where a member stands.

        Raises:
            CapsuleError: CAP-Y010, its outcome is not one.
        """
        folder = self.folder(name)
        if not folder.exists():
            return MemberState(name, "waiting")
        event = speed = None
        events = folder / WORK / contract.EVENTS
        # A program may put a link, a folder or a pipe there, which must not hide other members.
        with suppress(OSError):
            event = last_event(events)
        step, total = (None, None) if event is None else (event.step, event.total_steps)
        # The lock comes first: a run writes its outcome while it holds the folder, so that an
        # outcome read after this is final.
        if is_locked(folder / HOLD):
            with suppress(OSError):
                speed = last_speed(events)
            return MemberState(name, "running", None, step, total, speed)
        outcome = self.outcome(name)
        if outcome is None:
            # It may have been killed before its first event. 'capsule list' has the same condition.
            begun = (folder / WORK).is_dir()
            return MemberState(name, "stopped" if begun else "waiting", None, step, total)
        return MemberState(name, "failed" if outcome.code else "done", outcome, step, total)

    def outcome(self, name: str) -> Outcome | None:
        """Return how the last attempt to run a member ended.

        Returns:
            None if it did not end yet, or if its bundle is gone.

        Raises:
            CapsuleError: CAP-Y010, it is not an outcome.
        """
        path = self.folder(name) / OUTCOME
        try:
            with path.open("rb") as stream:
                found = Outcome.parse(stream.read(MAX_OUTCOME_BYTES))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise CapsuleError(
                "CAP-Y010",
                f"{path} is damaged: {first_reason(error)}",
                fix="Delete the file and run 'capsule study run --resume'.",
            ) from error
        if found.bundle is not None and not (path.parent / found.bundle).is_file():
            return None
        return found

    def bundle(self, name: str) -> Path | None:
        """Return the bundle of a member; None if it has none yet."""
        outcome = self.outcome(name)
        if outcome is None or outcome.bundle is None:
            return None
        return self.folder(name) / outcome.bundle
