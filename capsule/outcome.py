"""What a run leaves in its directory, read without trusting the program that wrote it."""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from capsule.engine.interface import Exit
from capsule.engine.supervise import RESERVE_BYTES, last_lines, spoilt
from capsule.experiment import contract
from capsule.experiment.beneath import FolderEntry, UnboundedError, entries_beneath
from capsule.experiment.fields import Model
from capsule.experiment.files import open_regular
from capsule.experiment.spec import Spec
from capsule.experiment.trainers import CommandTrainer
from capsule.host.errors import IMAGE_CODES, CapsuleError
from capsule.host.reporter import Reporter
from capsule.host.streams import read_whole
from capsule.host.validation import first_reason
from capsule.machine.devices import Device

_KILLED = 137  # exit status after SIGKILL
PROGRAM_FAILED, OTHER_GPU = "CAP-T302", "CAP-E048"
MAX_READ_BYTES = 1 << 20
SHOWN_LINES = 8  # of the output of a program that failed
SEARCHED_LINES = 400  # of the same output, for the exception that ended the program
MAX_LINE_CHARACTERS = 300  # of each
MAX_SHOWN_EVENTS = 10  # of those that came since the last poll
Document = TypeVar("Document", bound=Model)

_REPLAY = "A lower trainer.replay_capacity makes the replay memory smaller, if there is one."
# What to do about an execution that the engine ended, by its reason.
FIXES = {
    "out-of-memory": "Raise limits.memory_mb (and the memory of the batch job, if there is one). "
    f"{_REPLAY}",
    "timed-out": "Raise limits.minutes. Or resume the run, which then has so many minutes again: "
    "'capsule run --resume' or, in a study, 'capsule study run --resume'.",
    "disk-full": "Raise limits.disk_mb, or free disk space: a run never uses the last "
    f"{RESERVE_BYTES >> 20} MiB of a disk. {_REPLAY}",
}
# What programs print when they reach a limit that no engine reports, and what to do then.
_LIMIT_SIGNS = {
    "Resource temporarily unavailable": "If a process or thread could not be started, raise "
    "limits.processes.",
    "can't start new thread": "Raise limits.processes.",
    "No space left on device": "If /tmp or /dev/shm was full, raise limits.temporary_mb.",
    "insufficient shared memory": "Raise limits.temporary_mb.",
}
# The same for the exception that ends a program which lacks something. Many programs catch such
# exceptions and print them. The repetitions are bounded, because the text can be anything.
_LACK_SIGNS = {
    "No module named 'pkg_resources'": "Add 'setuptools<82' to image.packages: later versions of "
    "setuptools do not contain this module.",
    r"No module named '(?!pkg_resources')[\w.]{1,80}'": "Add the package that provides the "
    "module to image.packages, or select its file in code.files.",
    r"lib[\w.+-]{1,80}: cannot open shared object file": "Add the Debian package that contains "
    "this library to image.debian.",
    r"No such file or directory: '[^']{1,200}'": "If the program started it, add the Debian "
    "packages of the command, and of the shell that its first line names, to image.debian. If it "
    "is one of your files, select it in code.files, or list it under data.",
    "Temporary failure in name resolution|Name or service not known|Network is unreachable": "A "
    "run has no network: list what the program downloads under data.",
    "Read-only file system": "Write to the working folder or to /tmp.",
}
# The same reasons in messages.
_REASONS = {
    "out-of-memory": "memory ran out",
    "timed-out": "its time ran out",
    "disk-full": "disk space ran out",
}


class EndedError(CapsuleError):
    """An execution ended without a result and without a report (CAP-E010).

    Attributes:
        reason: Why, as :class:`capsule.engine.interface.Exit` has it.
    """

    def __init__(self, message: str, reason: str, *, fix: str) -> None:
        super().__init__("CAP-E010", message, fix=fix)
        self.reason = reason


def check_run_directory(run_directory: Path) -> None:
    """Check that what the host is about to read is made of folders and regular files.

    The task can write everywhere in the run directory. A link would lead the host to files of its
    own, a pipe would have it wait for ever. To be called when nothing of the task is left.

    Raises:
        CapsuleError: CAP-E041 naming something else that stands there, or if it is too large.
    """
    try:
        for entry in entries_beneath(run_directory):
            _check_entry(run_directory, entry)
    except UnboundedError as error:
        raise spoilt(run_directory, f"is too large to read: {error}") from error


def check_earlier_attempt(run_directory: Path) -> None:
    """Check what an earlier attempt left, before the host writes there and starts another one.

    Only the run directory's own entries are checked: a program that starts over may lose folders
    that are too deep or cannot be read. :func:`check_run_directory` checks everything afterwards.

    Raises:
        CapsuleError: CAP-E041 naming what is not a folder or a regular file, but should be.
    """
    for path in sorted(run_directory.iterdir()):
        _check_entry(run_directory, FolderEntry(path.name, path.lstat()))


def _check_entry(run_directory: Path, entry: FolderEntry) -> None:
    top, _, below = entry.path.partition("/")
    is_file, is_folder = (check(entry.facts.st_mode) for check in (stat.S_ISREG, stat.S_ISDIR))
    if top in contract.READ_FILES:
        sound = is_file and not below
    elif top in contract.READ_FOLDERS:
        sound = is_folder or (is_file and bool(below))
    else:  # the program's own, below its working folder
        sound = bool(below) or top != contract.WORKSPACE or is_folder
    if not sound:
        raise spoilt(run_directory / entry.path, "is a link, a folder or a special file")


class GpuCheck:
    """Compares the GPU that a run's own process uses with those that it was given."""

    def __init__(self, given: tuple[Device, ...], run_directory: Path) -> None:
        self._given = given
        self._path = run_directory / contract.RUNTIME
        self._seen = self._written()  # by an earlier attempt, which may have had another GPU

    def poll(self) -> None:
        """Check what the run has written of its GPU, if it has written it since the last time.

        It does so seconds after its start, so that a run on another GPU ends there.

        Raises:
            CapsuleError: CAP-E048, it used another one; CAP-E011, the file is malformed.
        """
        if (written := self._written()) != self._seen:
            self._seen = written
            self.check()

    def check(self) -> None:
        """Check what the run has written of its GPU.

        Raises:
            CapsuleError: As :meth:`poll`, and if nothing was written.
        """
        allowed = {name for gpu in self._given for name in _identities(gpu)}
        if not allowed:
            return
        used = read_checked(contract.Runtime, self._path).device.get("uuid_sha256")
        if used is not None and used not in allowed:
            named = ", ".join(f"{gpu.place} ({gpu.uuid})" for gpu in self._given)
            raise CapsuleError(
                OTHER_GPU,
                f"the run was given the GPU {named}, and used another one",
                fix="Check how the engine gives GPUs to containers: 'capsule doctor'.",
            )

    def _written(self) -> tuple[int, int] | None:
        try:
            facts = self._path.lstat()
        except FileNotFoundError:
            return None
        # The file is replaced as a whole, so its inode changes even within one tick of the clock.
        return facts.st_ino, facts.st_mtime_ns


def _identities(gpu: Device) -> tuple[str, ...]:
    """Return the identities that a run may give for a device; none for an engine's unknown one.

    CUDA has no prefix before a UUID, and that of a part of a GPU is the part's own.
    """
    kind, _, number = gpu.uuid.partition("-")
    return tuple(contract.gpu_identity(f"{each}-{number}") for each in (kind, "GPU") if number)


class EventTail:
    """Follows ``events.jsonl``, which the training side only ever appends to."""

    def __init__(self, path: Path, reporter: Reporter) -> None:
        self._path = path
        self._reporter = reporter
        # What an earlier attempt wrote was shown then; a line it did not finish will be cut off.
        self._offset = 0
        with suppress(FileNotFoundError), open_regular(path, follow=False) as stream:
            tail = max(0, stream.seek(0, os.SEEK_END) - MAX_READ_BYTES)
            stream.seek(tail)
            self._offset = tail + stream.read(MAX_READ_BYTES).rfind(b"\n") + 1

    def poll(self) -> None:
        """Report the events that were written since the last time.

        Raises:
            CapsuleError: CAP-E011, the file is malformed.
        """
        try:
            with open_regular(self._path, follow=False) as stream:
                stream.seek(self._offset)
                events = self._parsed(stream.read(MAX_READ_BYTES))
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise _malformed(self._path, error) from error
        # A program that floods its events must not flood the terminal.
        for event in events[-MAX_SHOWN_EVENTS:]:
            self._reporter.event(event)

    def _parsed(self, data: bytes) -> list[contract.Event]:
        complete = data[: data.rfind(b"\n") + 1]
        # Without this check, every poll would read the same part of the line again.
        if not complete and len(data) == MAX_READ_BYTES:
            raise ValueError(f"a line is longer than {MAX_READ_BYTES} bytes")
        # A line without its end may still be in the making; it is read again at the next poll.
        self._offset += len(complete)
        return [contract.Event.model_validate_json(line) for line in complete.splitlines()]


def outcome(
    spec: Spec, run_directory: Path, ended: Exit
) -> contract.Result | contract.ProgramResult:
    """Read what the training side left, or say why there is nothing."""
    if ended.reason == "interrupted":
        restarts = isinstance(spec.trainer, CommandTrainer) and not spec.trainer.resumable
        folder = run_directory.parent  # which 'capsule run' made
        raise CapsuleError(
            "CAP-E012",
            f"the run was interrupted; its state is kept in {folder}",
            fix=f"Resume it with 'capsule run --resume {shlex.quote(str(folder))}'"
            + ("; the program starts over, as trainer.resumable is false." if restarts else "."),
        )
    if (failure := reported_failure(run_directory)) is not None:
        raise _with_evidence(failure, ended)
    result = run_directory / contract.RESULT
    if ended.reason != "exited" or ended.status != 0 or not result.exists():
        what = "the program" if isinstance(spec.trainer, CommandTrainer) else "the training"
        raise EndedError(
            f"{what} {how_ended(ended)}; "
            f"last output: {''.join(last_lines(run_directory / contract.LOG, 1))!r}",
            ended.reason,
            fix=_fix_of(ended, run_directory),
        )
    return result_of(spec, run_directory)


def how_ended(ended: Exit) -> str:
    """Return how a task ended, for messages: only what was observed."""
    status = f"ended with status {ended.status}"
    if ended.reason in _REASONS:
        return f"{status}, because {_observed(ended)}"
    if ended.status == _KILLED:
        return f"{status} (killed by SIGKILL, and nothing was observed that tells why)"
    return status


def _observed(ended: Exit) -> str:
    """Return why the engine or the kernel stopped a task."""
    reason = _REASONS[ended.reason]
    return f"{reason} ({ended.evidence})" if ended.evidence else reason


def _fix_of(ended: Exit, run_directory: Path) -> str:
    """Return what to do about a task that ended too early."""
    log = f"See {run_directory / contract.LOG}."
    if ended.reason == "exited" and ended.status == _KILLED:
        return (
            f"{log} Engines do not always report that memory ran out. If 'dmesg' shows it, raise "
            "limits.memory_mb, or use a machine or a batch job with more memory. Otherwise a user "
            "or a service killed the run, which can be resumed with 'capsule run --resume'."
        )
    return FIXES.get(ended.reason, log)


def _with_evidence(failure: CapsuleError, ended: Exit) -> CapsuleError:
    """Return an error that the training side left, with what explains it."""
    if ended.reason != "out-of-memory":
        return failure
    first, line_end, output = failure.message.partition("\n")
    return CapsuleError(
        failure.code,
        f"{first}, because {_observed(ended)}{line_end}{output}",
        fix=f"{FIXES[ended.reason]} {failure.fix}",
    )


def reported_failure(run_directory: Path) -> CapsuleError | None:
    """Return the error that the training side left, if it left one."""
    failure = run_directory / contract.FAILURE
    if not failure.exists():
        return None
    report = read_checked(contract.Failure, failure)
    at = "" if report.step is None else f" (step {report.step})"
    # A program cannot choose the exit status of a code of the host, such as 'tampered'.
    if report.code not in IMAGE_CODES:
        return _malformed(
            failure, ValueError(f"the unknown code {report.code!r}: {report.message}")
        )
    log = run_directory / contract.LOG
    if report.code == PROGRAM_FAILED:
        lines = "".join(f"\n  {line}" for line in _program_lines(log, report))
        hints = _hints_of(log)
        correct = "Otherwise, correct the program." if hints else "Correct the program."
        fix = f"{hints}{correct} Its whole output is in {log}."
        return CapsuleError(report.code, f"{report.message}{at}{lines}", fix=fix)
    return CapsuleError(report.code, report.message + at, fix=report.fix)


def _program_lines(log: Path, report: contract.Failure) -> list[str]:
    """Return the last lines of a program's output, without those of the report that follows it.

    If the last exception is in an earlier line, this line precedes them.
    """
    own = [
        line[:MAX_LINE_CHARACTERS]
        for line in f"{report.code} {report.message}\n{report.fix}".splitlines()
    ]
    lines = last_lines(log, SEARCHED_LINES, MAX_LINE_CHARACTERS)
    if lines[-len(own) :] == own:
        lines = lines[: -len(own)]
    exceptions = [*_exceptions(lines)][-1:]
    earlier = [line for position, line in exceptions if position < len(lines) - SHOWN_LINES]
    return [*earlier, *(["…"] if earlier else []), *lines[-SHOWN_LINES:]]


def _hints_of(log: Path) -> str:
    """Return what to do about limits that a program reached, and things that it lacked."""
    lines = last_lines(log, SEARCHED_LINES)
    last = "".join(text for _, text in [*_exceptions(lines)][-1:])
    texts = (("\n".join(lines), _LIMIT_SIGNS), (last, _LACK_SIGNS))
    found = (
        (re.search(sign, text, re.ASCII), fix)
        for text, signs in texts
        for sign, fix in signs.items()
    )
    return "".join(f"Its output contains {match[0]!r}. {fix} " for match, fix in found if match)


def _exceptions(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield the position and the text of each line in which a traceback of Python ends.

    What Python reports as ignored, often many lines while it shuts down, ends no program.
    """
    for start, line in enumerate(lines):
        ignored = start > 0 and lines[start - 1].startswith("Exception ignored in")
        if line == "Traceback (most recent call last):" and not ignored:
            rest = enumerate(lines[start + 1 :], start + 1)
            yield from islice((each for each in rest if not each[1].startswith(" ")), 1)


def result_of(spec: Spec, run_directory: Path) -> contract.Result | contract.ProgramResult:
    """Read the result of a finished run, whose trace must be there if a trainer made it.

    Raises:
        CapsuleError: CAP-E011, one of the two is missing or malformed.
    """
    path = run_directory / contract.RESULT
    if isinstance(spec.trainer, CommandTrainer):
        return read_checked(contract.ProgramResult, path)
    trace = run_directory / contract.TRACE
    if not trace.is_file():
        raise _malformed(trace, FileNotFoundError("it is missing"))
    return read_checked(contract.Result, path)


def read_checked(model: type[Document], path: Path) -> Document:
    """Read what the training side wrote, which is not trusted to keep the contract."""
    try:
        with open_regular(path, follow=False) as stream:
            return model.model_validate_json(read_whole(stream, MAX_READ_BYTES))
    except (OSError, ValidationError) as error:
        raise _malformed(path, error) from error


def _malformed(path: Path, error: Exception) -> CapsuleError:
    return CapsuleError(
        "CAP-E011",
        f"{path.name} is malformed: {first_reason(error)}",
        fix=f"See {contract.LOG} in the run directory.",
    )
