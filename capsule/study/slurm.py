"""Running members as jobs of a Slurm cluster: one array, with an element for each member.

Slurm's own programs are called as they are. submitit would not help: it calls functions that it
pickles, and brings back what they return, while a member is a command that leaves its outcome in
its folder.

What a site asks for, ``sbatch`` takes from the environment: SBATCH_PARTITION, SBATCH_ACCOUNT,
SBATCH_QOS, SBATCH_CONSTRAINT and others (its manual page, "INPUT ENVIRONMENT VARIABLES").

The folder of the study gets two kinds of files for each array, whose number is ID::

    slurm/ID.members         the names of the members; the first is element 0
    slurm/ID_ELEMENT.log     what the job printed, and what Slurm said of it

While an array is submitted, its number is not known here. Until then, there is another file, by
which a later command finds the array if this one is killed or the answer of Slurm is lost::

    slurm/NAME.submission    the names of the members; NAME is the name of the job

``sbatch`` has this file locked for as long as it runs. It may wait for the controller, and submit
the array, after the command that started it was killed.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from capsule.engine.supervise import Interrupts
from capsule.experiment.files import lock_file
from capsule.host.errors import CapsuleError
from capsule.host.locks import lock_open
from capsule.study.directory import StudyDirectory
from capsule.study.jobs import Element, JobArray, Programs, Scheduler, reservation
from capsule.study.running import MemberBatch

FOLDER = "slurm"
SUBMISSION = ".submission"
PROGRAMS = Programs(
    on="slurm",
    absent="Run the command on a login node of the cluster, or choose another --on.",
    failed="Correct what the message names, then add --resume. Partition, account and the like are "
    "set by SBATCH_PARTITION, SBATCH_ACCOUNT, ...; 'resources' of the study states what each "
    "member needs.",
    hidden=("SQUEUE_",),  # such as SQUEUE_PARTITION, for the user's view of the queue
)

# The states from which a job does not return by itself; a requeued job is pending.
ENDED = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
        *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    }
)
USUAL_REASONS = frozenset({"", "Priority", "Resources"})  # for which a job is pending
FIXES = {
    "TIMEOUT": "Raise resources.minutes of the study, or add --resume as often as necessary: a run "
    "continues from its last checkpoint.",
    "OUT_OF_MEMORY": "Raise resources.memory_mb of the study, then add --resume.",
}

_JOB = re.compile(r"\d+(;[^\s/]+)?")
_ELEMENT = re.compile(r"(\d+)\|([A-Z_]+)\|(.*)")
_MAX_ARRAY_SIZE = re.compile(r"^MaxArraySize\s*=\s*(\d+)", re.MULTILINE)
# The variables that Capsule reads on the nodes (docs/configuration.md).
_READ = re.compile(
    r"CAPSULE_\w+|XDG_(CACHE|CONFIG)_HOME|DOCKER_(HOST|CONTEXT|CONFIG)|CONTAINER_HOST|TMPDIR"
)
_FORGOTTEN = "Invalid job id specified"  # what squeue says of a job that ended some time ago
_SCRIPT = """\
#!/bin/bash
members=({members})
# Slurm sends SIGTERM to every process of a job, and kills the others when the first has ended. So
# that one ignores the signal, and the run has the time to save its state.
trap '' TERM
exec {command} "${{members[SLURM_ARRAY_TASK_ID]}}" {options}
"""


class SlurmArray(JobArray):
    """A job array, by its number, or ``NUMBER;CLUSTER`` where one Slurm has several clusters."""

    @property
    def name(self) -> str:
        """The number of the job."""
        return self.job.partition(";")[0]

    @property
    def cancellation(self) -> list[str]:
        """The command that cancels all elements."""
        return ["scancel", *self._cluster, self.name]

    @property
    def _cluster(self) -> list[str]:
        cluster = self.job.partition(";")[2]
        return [f"--clusters={cluster}"] if cluster else []

    def elements(self) -> dict[str, Element]:
        """Ask Slurm for the elements, by their members; it forgets those that ended in time."""
        # Without --array, squeue shows all pending elements of an array in one line. --states=all
        # adds those that ended within MinJobAge of the cluster.
        command = ["squeue", *self._cluster, f"--job={self.name}", "--array", "--noheader"]
        found = PROGRAMS.call([*command, "--states=all", "--format=%K|%T|%r"], accepted=_FORGOTTEN)
        matches = map(_ELEMENT.fullmatch, map(str.strip, found.splitlines()))
        states = {int(match[1]): _element(match[2], match[3]) for match in matches if match}
        return {name: states[n] for n, name in enumerate(self.members) if n in states}

    def element_name(self, member: str) -> str:
        """Return the job of a member, as ``NUMBER_ELEMENT``."""
        return f"{self.name}_{self.members.index(member)}"

    def log(self, study: StudyDirectory, member: str) -> str:
        """Return the file with what the job of a member printed."""
        return str(study.path / FOLDER / f"{self.element_name(member)}.log")


class Slurm(Scheduler):
    """Jobs of a Slurm cluster."""

    title = "Slurm"
    folder = FOLDER
    array = SlurmArray
    programs = PROGRAMS

    def _earlier(self, batch: MemberBatch) -> dict[str, JobArray]:
        self._recover(batch.study)
        return super()._earlier(batch)

    def _recover(self, study: StudyDirectory) -> None:
        """Ask Slurm for arrays that earlier commands may have submitted without an answer.

        Raises:
            CapsuleError: CAP-Y021, CAP-Y022: Slurm does not answer now.
        """
        for path in sorted((study.path / FOLDER).glob(f"*{SUBMISSION}")):
            # The file is gone where another command has written the array down meanwhile.
            with suppress(FileNotFoundError), path.open("r+b") as stream:
                if not lock_open(stream.fileno(), path, wait=False):
                    self.note("waiting for the sbatch of an earlier command, which has not ended")
                    lock_file(stream.fileno())
                members = tuple(path.read_text().split())
                for job in _jobs_named(path.name.removesuffix(SUBMISSION)):
                    self.write_down(study, SlurmArray(job, members))
                path.unlink()

    def submit(self, batch: MemberBatch, interruptions: Interrupts) -> Iterator[JobArray]:
        """Submit members as one array, or as several where that would be too large."""
        largest = _largest_array()
        if cut := _cut_variables():
            self.note(
                f"SBATCH_EXPORT={os.environ['SBATCH_EXPORT']} keeps variables of this shell from "
                f"the jobs: {', '.join(cut)}. SBATCH_EXPORT=ALL passes them on"
            )
        folder = batch.study.path / FOLDER
        folder.mkdir(exist_ok=True)  # Slurm writes the logs there
        for first in range(0, len(batch.names), largest):
            part = replace(batch, names=batch.names[first : first + largest])
            name = f"{batch.study.lock.study.name}.{secrets.token_hex(8)}"
            command, script = _sbatch(part, name), _script(part)
            submission = folder / f"{name}{SUBMISSION}"
            with _locked(submission, part.names) as lock:
                # An array that Slurm has accepted can only be cancelled by its number, so an
                # interruption waits for sbatch to print it.
                job = PROGRAMS.call(command, script, interruptible=False, inherited=[lock]).strip()
                if not _JOB.fullmatch(job):
                    raise CapsuleError(
                        "CAP-Y022",
                        f"sbatch printed {job!r}, which is not the number of a job",
                        fix="Cancel the job that it may have submitted: 'squeue --me' lists your "
                        "jobs.",
                    )
                yield SlurmArray(job, tuple(part.names))
                # It stays after an error of sbatch, which may be that the controller's answer was
                # lost.
                submission.unlink()
            if interruptions.count:
                raise KeyboardInterrupt


@contextmanager
def _locked(submission: Path, members: Sequence[str]) -> Iterator[int]:
    """Write the file of a submission, and yield a descriptor by which it is locked all the time."""
    unfinished = submission.with_suffix(".unfinished")
    with unfinished.open("wb") as stream:
        lock_open(stream.fileno(), unfinished)
        stream.write("".join(f"{each}\n" for each in members).encode())
        stream.flush()
        os.fsync(stream.fileno())  # the file must not be empty after a crash of this machine
        unfinished.rename(submission)
        yield stream.fileno()


def _element(state: str, reason: str) -> Element:
    reason = "" if reason == "None" else reason
    return Element(
        state,
        reason,
        ended=state in ENDED,
        hindered=state == "PENDING" and reason not in USUAL_REASONS,
        fix=FIXES.get(state, ""),
    )


def _largest_array() -> int:
    """Return how many elements an array may have on this cluster."""
    found = _MAX_ARRAY_SIZE.search(PROGRAMS.call(["scontrol", "show", "config"]))
    if found is None or int(found[1]) == 0:
        raise CapsuleError(
            "CAP-Y022",
            "this cluster has no job arrays: 'scontrol show config' gives no MaxArraySize",
            fix="Ask its administrators to set MaxArraySize.",
        )
    # Indices begin at 0, and the largest one is MaxArraySize - 1.
    return int(found[1])


def _jobs_named(name: str) -> Iterator[str]:
    """Yield the numbers of this user's jobs with a name, as :class:`SlurmArray` has them."""
    command = ["squeue", "--me", f"--name={name}", "--noheader", "--states=all", "--format=%F"]
    # sbatch may submit to another cluster than the one that squeue asks.
    chosen = os.environ.get("SBATCH_CLUSTERS") or os.environ.get("SLURM_CLUSTERS") or ""
    for cluster in chosen.split(","):
        of = [f"--clusters={cluster}"] if cluster else []
        found = set(PROGRAMS.call([*command, *of], accepted=_FORGOTTEN).split())
        yield from (f"{job};{cluster}" if cluster else job for job in found if job.isdecimal())


def _cut_variables() -> list[str]:
    """Return the variables that Capsule reads and that ``sbatch`` does not pass on to the jobs."""
    # It passes on all of them by default.
    words = os.environ.get("SBATCH_EXPORT", "ALL").split(",")
    exported = {word.partition("=")[0].strip() for word in words}
    if "ALL" in exported:
        return []
    return sorted(name for name in os.environ if _READ.fullmatch(name) and name not in exported)


def _sbatch(batch: MemberBatch, name: str) -> list[str]:
    """Return the command that submits members; the study's resources are theirs."""
    folder = str(batch.study.path.absolute())
    cores, memory, minutes, gpus = reservation(batch)
    return [
        *("sbatch", "--parsable", f"--array=0-{len(batch.names) - 1}"),
        *(f"--job-name={name}", f"--chdir={folder}"),
        # sbatch replaces %A and %a in this name, and two percent signs by one.
        f"--output={folder.replace('%', '%%')}/{FOLDER}/%A_%a.log",
        *("--open-mode=append", "--requeue"),  # the second attempt resumes the run of the first
        *("--nodes=1", "--ntasks=1", f"--cpus-per-task={cores}"),
        *(f"--mem={memory}M", f"--time={minutes}"),
        *(["--gres=gpu:1"] if gpus else []),
    ]


def _script(batch: MemberBatch) -> str:
    """Return the script of an array."""
    command = [sys.executable, "-m", "capsule", "study", "member", str(batch.study.path.absolute())]
    return _SCRIPT.format(
        members=shlex.join(batch.names),
        command=shlex.join(command),
        options=shlex.join(batch.options.arguments()),
    )
