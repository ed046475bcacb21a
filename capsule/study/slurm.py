"""Running members as jobs of a Slurm cluster: one array, with an element for each member.

A job calls ``capsule study member`` with the folder of the study, which all nodes see. Slurm's own
programs are called as they are. submitit would not help: it calls functions that it pickles, and
brings back what they return, while a member is a command that leaves its outcome in its folder.

What a site asks for, ``sbatch`` takes from the environment: SBATCH_PARTITION, SBATCH_ACCOUNT,
SBATCH_QOS, SBATCH_CONSTRAINT and others (its manual page, "INPUT ENVIRONMENT VARIABLES").

The folder of the study gets two files for each array, whose number is ID::

    slurm/ID.members         the names of the members; the first is element 0
    slurm/ID_ELEMENT.log     what the job printed, and what Slurm said of it
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from capsule.experiment.canonical import write_atomic
from capsule.host.errors import CapsuleError
from capsule.study.directory import Outcome, StudyDirectory
from capsule.study.running import RunOptions

FOLDER = "slurm"
MEMBERS = ".members"
HOST_MEMORY_MB = 512  # of 'capsule run' and 'capsule study member', which have 140 MB on CartPole
POLL_SECONDS = 5.0
SETTLE_SECONDS = 60.0  # until a file of another machine is seen here (NFS: acdirmax)
PATIENCE_SECONDS = 600.0  # without an answer of the controller, which sites restart

# The states from which a job does not return by itself; a requeued job is pending.
ENDED = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
        *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    }
)
USUAL_REASONS = frozenset({"None", "Priority", "Resources"})  # for which a job is pending
FIXES = {
    "TIMEOUT": "Raise resources.minutes of the study, or add --resume as often as it takes: a run "
    "continues from its last checkpoint.",
    "OUT_OF_MEMORY": "Raise resources.memory_mb of the study, then add --resume.",
}

_ELEMENT = re.compile(r"(\d+)\|([A-Z_]+)\|(.*)")
_MAX_ARRAY_SIZE = re.compile(r"^MaxArraySize\s*=\s*(\d+)", re.MULTILINE)
_FORGOTTEN = "Invalid job id specified"  # what squeue says of a job that ended some time ago
_SCRIPT = """\
#!/bin/bash
members=({members})
# Slurm sends SIGTERM to every process of a job, and kills the others when the first has ended. So
# that one ignores the signal, and the run has the time to save its state.
trap '' TERM
exec {command} "${{members[SLURM_ARRAY_TASK_ID]}}" {options}
"""


class Element(NamedTuple):
    """An element of a job array.

    Attributes:
        state: Its state in Slurm's words, e.g. ``RUNNING``.
        reason: Why it is in this state, in Slurm's words.
    """

    state: str
    reason: str


@dataclass(frozen=True)
class JobArray:
    """A job array.

    Attributes:
        job: Its number, or ``NUMBER;CLUSTER`` as sbatch says where one Slurm has several clusters.
        members: The member of each element.
    """

    job: str
    members: tuple[str, ...]

    @property
    def number(self) -> str:
        """The number of the job."""
        return self.job.partition(";")[0]

    @property
    def cancellation(self) -> list[str]:
        """The command that cancels all elements."""
        return ["scancel", *self._cluster, self.number]

    @property
    def _cluster(self) -> list[str]:
        cluster = self.job.partition(";")[2]
        return [f"--clusters={cluster}"] if cluster else []

    def elements(self) -> dict[str, Element]:
        """Ask Slurm for the elements, by their members; Slurm forgets those that ended in time.

        Raises:
            CapsuleError: As :func:`_call`.
        """
        command = ["squeue", *self._cluster, f"--job={self.number}", "--array", "--noheader"]
        found = _call([*command, "--states=all", "--format=%K|%T|%r"], accepted=_FORGOTTEN)
        matches = map(_ELEMENT.fullmatch, map(str.strip, found.splitlines()))
        states = {int(match[1]): Element(match[2], match[3]) for match in matches if match}
        return {name: states[n] for n, name in enumerate(self.members) if n in states}


@dataclass(frozen=True)
class Slurm:
    """Jobs of a Slurm cluster.

    Attributes:
        note: Given the numbers of the jobs, and why they do not start.
        poll_seconds: Between two questions to Slurm.
        settle_seconds: From the end of a job to the report that it left no outcome.
        patience_seconds: How long Slurm may leave questions unanswered.
    """

    note: Callable[[str], None]
    poll_seconds: float = POLL_SECONDS
    settle_seconds: float = SETTLE_SECONDS
    patience_seconds: float = PATIENCE_SECONDS

    def run(
        self,
        study: StudyDirectory,
        names: Sequence[str],
        options: RunOptions,
        on_poll: Callable[[], None],
    ) -> None:
        """Run members; see :class:`capsule.study.backends.Backend`.

        A member whose job an earlier command submitted is not submitted again while it waits or
        runs.

        Raises:
            CapsuleError: CAP-Y021 Slurm is not installed, CAP-Y022 it rejected the jobs, CAP-Y023
                it does not answer any more, CAP-Y024 the wait was interrupted.
        """
        places = _earlier(study, names)
        for array in {*places.values()}:
            self.note(f"Slurm job {array.number} still has members that wait or run")
        new = [name for name in names if name not in places]
        for array in _submit(study, new, options) if new else ():
            self.note(f"Slurm job {array.number} was submitted for {len(array.members)} members")
            places.update(dict.fromkeys(array.members, array))
        arrays = sorted({*places.values()}, key=lambda array: array.job)
        cancel = " && ".join(shlex.join(array.cancellation) for array in arrays)
        look = f"{_status(study)} shows how far they are; --resume waits again"
        try:
            self._wait(study, places, on_poll)
        except KeyboardInterrupt:
            raise CapsuleError(
                "CAP-Y024",
                f"Slurm goes on with {_jobs(arrays)} without this command",
                fix=f"Nothing has to be done: {look}. '{cancel}' cancels the members.",
            ) from None

    def _wait(
        self, study: StudyDirectory, places: dict[str, JobArray], on_poll: Callable[[], None]
    ) -> None:
        """Wait for the jobs of members, and write down which ones left no outcome."""
        waiting = dict(places)
        ended: dict[str, float] = {}
        noted = {*USUAL_REASONS}
        answered = time.monotonic()
        while waiting:
            try:
                found = {array: array.elements() for array in {*waiting.values()}}
            except CapsuleError as error:
                if time.monotonic() - answered > self.patience_seconds:
                    raise _unanswered(study, waiting, error) from error
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
        """Say once why jobs are pending, if they do not just wait for their turn."""
        for array, elements in found.items():
            for element in elements.values():
                if element.state == "PENDING" and element.reason not in noted:
                    noted.add(element.reason)
                    self.note(f"members of Slurm job {array.number} wait: {element.reason}")

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
            element: Its state; None if Slurm has forgotten it.
            ended: When the end of each job was noticed, by its member.
        """
        if element is not None and element.state not in ENDED:
            ended.pop(name, None)
            return False
        if study.outcome(name) is not None:
            return True
        now = time.monotonic()
        if now - ended.setdefault(name, now) < self.settle_seconds:
            return False
        study.fail(name, _failure(study, name, array, element))
        return True


def _earlier(study: StudyDirectory, names: Sequence[str]) -> dict[str, JobArray]:
    """Return the earlier arrays in which members still wait or run, by these members."""
    places = {}
    for path in sorted((study.path / FOLDER).glob(f"*{MEMBERS}")):
        array = JobArray(path.name.removesuffix(MEMBERS), tuple(path.read_text().split()))
        elements = array.elements() if {*names} & {*array.members} else {}
        for name, element in elements.items():
            if name in names and element.state not in ENDED:
                places[name] = array
    return places


def _submit(study: StudyDirectory, names: Sequence[str], options: RunOptions) -> list[JobArray]:
    """Submit members, all or none of them.

    Raises:
        CapsuleError: CAP-Y021 Slurm is not installed, CAP-Y022 it rejected the jobs.
    """
    largest = _largest_array()
    (study.path / FOLDER).mkdir(exist_ok=True)
    arrays: list[JobArray] = []
    try:
        for first in range(0, len(names), largest):
            part = tuple(names[first : first + largest])
            job = _call(_sbatch(study, part), _script(study, part, options)).strip()
            arrays.append(JobArray(job, part))
    except BaseException:  # Ctrl-C, too
        for array in arrays:
            _call(array.cancellation)
        raise
    for array in arrays:
        lines = "".join(f"{name}\n" for name in array.members)
        write_atomic(study.path / FOLDER / f"{array.job}{MEMBERS}", lines.encode())
    for name in names:
        study.forget(name)
    return arrays


def _largest_array() -> int:
    """Return how many elements an array may have on this cluster."""
    found = _MAX_ARRAY_SIZE.search(_call(["scontrol", "show", "config"]))
    if found is None or int(found[1]) == 0:
        raise CapsuleError(
            "CAP-Y022",
            "this cluster has no job arrays: 'scontrol show config' gives no MaxArraySize",
            fix="Ask its administrators to set MaxArraySize.",
        )
    return int(found[1])


def _sbatch(study: StudyDirectory, names: Sequence[str]) -> list[str]:
    """Return the command that submits members; the study's resources are theirs."""
    folder = str(study.path.absolute())
    resources = study.lock.study.resources
    limits = [study.lock.specs[study.member(name).spec].limits for name in names]
    memory = resources.memory_mb or max(each.memory_mb for each in limits) + HOST_MEMORY_MB
    minutes = resources.minutes or max(each.minutes for each in limits)
    return [
        *("sbatch", "--parsable", f"--array=0-{len(names) - 1}"),
        *(f"--job-name={study.lock.study.name}", f"--chdir={folder}"),
        f"--output={folder.replace('%', '%%')}/{FOLDER}/%A_%a.log",
        *("--open-mode=append", "--requeue"),  # the second attempt resumes the run of the first
        *("--nodes=1", "--ntasks=1", f"--cpus-per-task={resources.cores}"),
        *(f"--mem={memory}M", f"--time={minutes}"),
        *(["--gres=gpu:1"] if resources.gpus else []),
    ]


def _script(study: StudyDirectory, names: Sequence[str], options: RunOptions) -> str:
    """Return the script of an array."""
    command = [sys.executable, "-m", "capsule", "study", "member", str(study.path.absolute())]
    return _SCRIPT.format(
        members=shlex.join(names),
        command=shlex.join(command),
        options=shlex.join(options.arguments()),
    )


def _failure(study: StudyDirectory, name: str, array: JobArray, element: Element | None) -> Outcome:
    """Return the outcome of a member whose job left none."""
    job = f"{array.number}_{array.members.index(name)}"
    if element is None:
        how = "has ended, and Slurm has forgotten how"
    else:
        how = f"ended as {element.state}"
        if element.reason != "None":
            how += f" ({element.reason})"
    log = study.path / FOLDER / f"{job}.log"
    fix = FIXES.get(element.state if element else "", "Add --resume to run the member again.")
    return Outcome(code="CAP-Y025", message=f"Slurm job {job} {how}", fix=f"{fix} See {log}.")


def _unanswered(
    study: StudyDirectory, waiting: dict[str, JobArray], error: CapsuleError
) -> CapsuleError:
    return CapsuleError(
        "CAP-Y023",
        f"Slurm does not answer; {_jobs({*waiting.values()})} may still run: {error.message}",
        fix=f"Add --resume when it answers again. {_status(study)} shows how far the members are.",
    )


def _status(study: StudyDirectory) -> str:
    return f"'capsule study status {shlex.quote(str(study.path))}'"


def _jobs(arrays: Iterable[JobArray]) -> str:
    return "jobs " + ", ".join(sorted(array.number for array in arrays))


def _call(command: Sequence[str], given: str = "", *, accepted: str | None = None) -> str:
    """Return what one of Slurm's programs prints.

    Args:
        command: The program with its arguments.
        given: Its standard input.
        accepted: A message with which it may fail.

    Raises:
        CapsuleError: CAP-Y021 it is not installed, CAP-Y022 it failed.
    """
    # SQUEUE_PARTITION and the like are for the user's own view of the queue.
    environment = {name: os.environ[name] for name in os.environ if name[:7] != "SQUEUE_"}
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, env=environment, check=False
        )
    except FileNotFoundError as error:
        raise CapsuleError(
            "CAP-Y021",
            f"--on slurm needs {command[0]}, which is not installed here",
            fix="Run the command on a login node of the cluster, or choose another --on.",
        ) from error
    if done.returncode == 0 or (accepted is not None and accepted in done.stderr):
        return done.stdout
    said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
    raise CapsuleError(
        "CAP-Y022",
        f"{command[0]} failed: {said}",
        fix="Correct what the message names, then add --resume. Partition, account and the like "
        "are set by SBATCH_PARTITION, SBATCH_ACCOUNT, ...; 'resources' of the study says how much "
        "each member needs.",
    )
