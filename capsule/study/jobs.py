"""Running members as jobs of a scheduler, and waiting for them: what all schedulers have in common.

A job calls ``capsule study member`` with the folder of the study, which all machines see. Members
are submitted as arrays, with an element for each member. The folder of the study gets a file for
each array, so that a later command finds its jobs again::

    SCHEDULER/JOB.members    the names of the members; the first is element 0
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import ClassVar, NamedTuple

from capsule.engine.supervise import Interrupts, interrupts
from capsule.host.errors import CapsuleError
from capsule.host.outputs import write_output
from capsule.host.wording import counted
from capsule.study.directory import Outcome, StudyDirectory
from capsule.study.running import MemberBatch

MEMBERS = ".members"
HOST_MEMORY_MB = 512  # of 'capsule run' and 'capsule study member', which have 140 MB on CartPole
POLL_SECONDS = 5.0
SETTLE_SECONDS = 60.0  # until a file of another machine is seen here (NFS: acdirmax)
PATIENCE_SECONDS = 600.0  # without an answer of the scheduler, which sites restart


class Element(NamedTuple):
    """An element of a job array: the job of one member.

    Attributes:
        state: Its state in the scheduler's words, e.g. ``RUNNING``.
        reason: Why it is in this state, in the scheduler's words; empty where none is given.
        details: More about the reason.
        ended: Whether it does not return from this state by itself.
        hindered: Whether it has not started for a reason that is not just the other jobs.
        fix: What to do if it has ended too early; empty where only the member has to run again.
    """

    state: str
    reason: str = ""
    details: str = ""
    ended: bool = False
    hindered: bool = False
    fix: str = ""


@dataclass(frozen=True)
class JobArray(ABC):
    """Jobs that were submitted together.

    Attributes:
        job: What names them for the scheduler, and is a file name.
        members: The member of each element.
    """

    job: str
    members: tuple[str, ...]

    @property
    @abstractmethod
    def name(self) -> str:
        """The array, for messages."""

    @property
    @abstractmethod
    def cancellation(self) -> list[str]:
        """The command that cancels all elements."""

    @abstractmethod
    def elements(self) -> dict[str, Element]:
        """Ask the scheduler for the elements, by their members, unless it has forgotten them.

        Raises:
            CapsuleError: CAP-Y021 its program is not installed, CAP-Y022 it does not answer.
        """

    @abstractmethod
    def element_name(self, member: str) -> str:
        """Return the job of a member, for messages."""

    @abstractmethod
    def log(self, study: StudyDirectory, member: str) -> str:
        """Return where to see what the job of a member printed."""


class Reservation(NamedTuple):
    """The resources that the job of a member reserves."""

    cores: int
    memory_mb: int
    minutes: int
    gpus: int


def reservation(batch: MemberBatch) -> Reservation:
    """Return what each of some members needs: the study's resources, or their largest limits."""
    resources = batch.study.lock.study.resources
    limits = [spec.limits for spec in batch.specs]
    return Reservation(
        resources.cores,
        resources.memory_mb or max(each.memory_mb for each in limits) + HOST_MEMORY_MB,
        resources.minutes or max(each.minutes for each in limits),
        resources.gpus,
    )


@dataclass(frozen=True)
class Programs:
    """The command-line programs of a scheduler.

    Attributes:
        on: The form of ``--on`` that needs them.
        absent: What to do if one is not installed.
        failed: What to do if one fails.
        hidden: Beginnings of the names of variables that they are not given.
    """

    on: str
    absent: str
    failed: str
    hidden: tuple[str, ...] = ()

    def call(
        self,
        command: Sequence[str],
        given: str = "",
        *,
        accepted: str | None = None,
        interruptible: bool = True,
        inherited: Sequence[int] = (),
    ) -> str:
        """Return what a program prints.

        Args:
            command: The program with its arguments.
            given: Its standard input.
            accepted: A message with which it may fail.
            interruptible: Whether Ctrl-C on the terminal reaches it, too.
            inherited: Descriptors of this process that it has open, too.

        Raises:
            CapsuleError: CAP-Y021 it is not installed, CAP-Y022 it failed.
        """
        try:
            done = subprocess.run(
                command,
                input=given,
                capture_output=True,
                text=True,
                env={k: v for k, v in os.environ.items() if not k.startswith(self.hidden)},
                process_group=None if interruptible else 0,
                pass_fds=inherited,
                check=False,
            )
        except FileNotFoundError as error:
            raise CapsuleError(
                "CAP-Y021",
                f"--on {self.on} needs {command[0]}, which is not installed here",
                fix=self.absent,
            ) from error
        if done.returncode == 0 or (accepted is not None and accepted in done.stderr):
            return done.stdout
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise CapsuleError("CAP-Y022", f"{command[0]} failed: {said}", fix=self.failed)


@dataclass(frozen=True)
class Scheduler(ABC):
    """A scheduler that runs members as jobs.

    Attributes:
        note: Given the names of the jobs, and why they do not start.
        poll_seconds: Between two questions to the scheduler.
        settle_seconds: From the end of a job to the report that it left no outcome.
        patience_seconds: How long the scheduler may leave questions unanswered.
        title: The scheduler, for messages.
        folder: The folder of its files in the folder of a study.
        array: The class of its arrays.
        programs: Its command-line programs.
    """

    note: Callable[[str], None]
    _: KW_ONLY
    poll_seconds: float = POLL_SECONDS
    settle_seconds: float = SETTLE_SECONDS
    patience_seconds: float = PATIENCE_SECONDS
    title: ClassVar[str]
    folder: ClassVar[str]
    array: ClassVar[type[JobArray]]
    programs: ClassVar[Programs]

    @abstractmethod
    def submit(self, batch: MemberBatch, interruptions: Interrupts) -> Iterable[JobArray]:
        """Submit members, and yield each array as soon as it exists.

        The caller cancels all arrays if one cannot be submitted.

        Args:
            batch: The members.
            interruptions: Counts the signals to stop, which raise nothing during the submission.

        Raises:
            CapsuleError: CAP-Y021 a program is not installed, CAP-Y022 the jobs were rejected.
            KeyboardInterrupt: It was interrupted.
        """

    def run(self, batch: MemberBatch, on_poll: Callable[[], None]) -> None:
        """Run members; see :class:`capsule.study.backends.Backend`.

        A member whose job an earlier command submitted is not submitted again while it waits or
        runs.

        Raises:
            CapsuleError: CAP-Y021 a program of the scheduler is not installed, CAP-Y022 it rejected
                the jobs, CAP-Y023 it does not answer any more, CAP-Y024 the wait was interrupted.
        """
        study = batch.study
        places = self._earlier(batch)
        for array in {*places.values()}:
            self.note(f"{self.title} job {array.name} still has members that wait or run")
        # A job may have finished its member before the scheduler was asked about it.
        new = [name for name in batch.names if name not in places and study.bundle(name) is None]
        try:
            if new:
                self._submit(replace(batch, names=new), places)
            for array in dict.fromkeys(places[name] for name in new):
                members = counted(len(array.members), "member")
                self.note(f"{self.title} job {array.name} was submitted for {members}")
            self._wait(study, places, on_poll)
        except KeyboardInterrupt:
            if not places:
                raise
            arrays = {*places.values()}
            cancel = _cancellation(arrays)
            look = f"{_status(study)} shows how far they are; add --resume to wait for them again"
            raise CapsuleError(
                "CAP-Y024",
                f"{self.title} will continue {_jobs(arrays)} without this command",
                fix=f"Nothing has to be done: {look}. '{cancel}' cancels the members.",
            ) from None

    def _earlier(self, batch: MemberBatch) -> dict[str, JobArray]:
        """Return the earlier arrays in which members still wait or run, by these members."""
        places, wanted = {}, {*batch.names}
        for path in sorted((batch.study.path / self.folder).glob(f"*{MEMBERS}")):
            array = self.array(path.name.removesuffix(MEMBERS), tuple(path.read_text().split()))
            # The scheduler is not asked about arrays that have none of the members to run.
            elements = array.elements() if wanted & {*array.members} else {}
            for name, element in elements.items():
                if name in wanted and not element.ended:
                    places[name] = array
        return places

    def _submit(self, batch: MemberBatch, places: dict[str, JobArray]) -> None:
        """Submit members, write down where they are, and add it to ``places``.

        After an error, arrays are cancelled; those that cannot be stay written down.
        """
        study = batch.study
        earlier = {name: study.outcome(name) for name in batch.names}
        # Jobs exist as soon as they are submitted, so an interruption waits until they are written
        # down: a later command finds them there.
        arrays: list[JobArray] = []
        with interrupts() as interruptions:
            try:
                # This precedes the submission: a job may begin, and even end, at once.
                for name in batch.names:
                    study.forget(name)
                if interruptions.count:
                    raise KeyboardInterrupt
                for array in self.submit(batch, interruptions):
                    arrays.append(array)
                    places.update(dict.fromkeys(array.members, array))
                    self.write_down(study, array)
            except BaseException as error:
                left = [array for array in arrays if not self._cancel(study, array, places)]
                # Without jobs, the earlier outcomes are still the last ones.
                for name, outcome in earlier.items():
                    if outcome is not None and name not in places:
                        study.fail(name, outcome)
                if left and isinstance(error, CapsuleError):
                    raise _not_cancelled(error, left) from error
                raise
        if interruptions.count:
            raise KeyboardInterrupt

    def write_down(self, study: StudyDirectory, array: JobArray) -> None:
        """Write the members of an array into the folder of the study."""
        lines = "".join(f"{name}\n" for name in array.members)
        write_output(self._file(study, array), lines.encode())

    def _file(self, study: StudyDirectory, array: JobArray) -> Path:
        """Return the file with the members of an array."""
        return study.path / self.folder / f"{array.job}{MEMBERS}"

    def _cancel(self, study: StudyDirectory, array: JobArray, places: dict[str, JobArray]) -> bool:
        """Cancel an array, and forget it; tell whether that was possible."""
        try:
            self.programs.call(array.cancellation)
        except CapsuleError:
            return False
        self._file(study, array).unlink(missing_ok=True)
        for name in array.members:
            del places[name]
        return True

    def _wait(
        self, study: StudyDirectory, places: dict[str, JobArray], on_poll: Callable[[], None]
    ) -> None:
        """Wait for the jobs of members, and write down which ones left no outcome."""
        waiting = dict(places)
        ended: dict[str, float] = {}
        noted: set[str] = set()
        answered = time.monotonic()
        while waiting:
            try:
                # Each array costs one question, however many members wait in it.
                found = {array: array.elements() for array in {*waiting.values()}}
            except CapsuleError as error:
                if time.monotonic() - answered > self.patience_seconds:
                    jobs = _jobs({*waiting.values()})
                    look = f"{_status(study)} shows how far the members are."
                    raise CapsuleError(
                        "CAP-Y023",
                        f"{self.title} does not answer; {jobs} may still run: {error.message}",
                        fix=f"Add --resume when it answers again. {look}",
                    ) from error
            else:
                answered = time.monotonic()
                self._note_reasons(found, noted)
                for name, array in [*waiting.items()]:
                    if self._is_over(study, name, array, found[array].get(name), ended):
                        del waiting[name]
            on_poll()
            if waiting:
                time.sleep(self.poll_seconds)

    def _note_reasons(self, found: dict[JobArray, dict[str, Element]], noted: set[str]) -> None:
        """Say once why jobs have not started, if they do not just wait for their turn."""
        for array, elements in found.items():
            for element in elements.values():
                if element.hindered and element.reason not in noted:
                    noted.add(element.reason)
                    self.note(f"members of {self.title} job {array.name} wait: {_why(element)}")

    def _is_over(
        self,
        study: StudyDirectory,
        name: str,
        array: JobArray,
        element: Element | None,
        ended: dict[str, float],
    ) -> bool:
        """Tell whether a member has ended, and see to it that it has an outcome then.

        Args:
            study: The study.
            name: The member.
            array: Its job.
            element: Its state; None if the scheduler has forgotten it.
            ended: When the end of each job was noticed, by its member.
        """
        # A job that was queued again, after the loss of its node or preemption, has not ended.
        if element is not None and not element.ended:
            ended.pop(name, None)
            return False
        if study.outcome(name) is not None:
            return True
        now = time.monotonic()
        if now - ended.setdefault(name, now) < self.settle_seconds:
            return False
        # This changes nothing if the outcome has become visible, or a process still runs the
        # member.
        study.fail(name, self._failure(study, name, array, element))
        return True

    def _failure(
        self, study: StudyDirectory, name: str, array: JobArray, element: Element | None
    ) -> Outcome:
        """Return the outcome of a member whose job left none."""
        if element is None:
            how = f"has ended, and {self.title} has no record of how it ended"
        else:
            how = f"ended as {element.state}" + (f" ({_why(element)})" if element.reason else "")
        fix = (element.fix if element else "") or "Add --resume to run the member again."
        return Outcome(
            code="CAP-Y025",
            message=f"{self.title} job {array.element_name(name)} {how}",
            fix=f"{fix} See {array.log(study, name)}.",
        )


def _not_cancelled(error: CapsuleError, arrays: Sequence[JobArray]) -> CapsuleError:
    """Return the error of a submission with the arrays that are left of it."""
    return CapsuleError(
        error.code,
        f"{error.message}; {_jobs(arrays)} had been submitted, and could not be cancelled",
        fix=f"{error.fix} Its members are not submitted a second time while these jobs wait or "
        f"run; '{_cancellation(arrays)}' cancels them.",
    )


def _why(element: Element) -> str:
    return f"{element.reason}: {element.details}" if element.details else element.reason


def _status(study: StudyDirectory) -> str:
    return f"'capsule study status {shlex.quote(str(study.path))}'"


def _cancellation(arrays: Iterable[JobArray]) -> str:
    ordered = sorted(arrays, key=lambda array: array.job)
    return " && ".join(shlex.join(array.cancellation) for array in ordered)


def _jobs(arrays: Iterable[JobArray]) -> str:
    return "jobs " + ", ".join(sorted(array.name for array in arrays))
