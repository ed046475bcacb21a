"""The treatment of a run's requests for randomness, counted while it ran.

The launcher leaves ``launch-report.json`` (what its supervisor answered, for each program that was
executed) or ``launch-failure.json``; the interposer leaves the journal. Together they are the
coverage statement: measured on the run, and saying also what neither of them can see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field, ValidationError

from capsule.entropy.journal import FILE_NAME, MAX_COUNTS, Journal, ToldReport, read_journal
from capsule.experiment.canonical import MAX_DOCUMENT_BYTES, MAX_VALUES, count_values
from capsule.experiment.contract import FIRST_PROCESS
from capsule.experiment.fields import Model, NonNegativeInt, PositiveInt
from capsule.experiment.files import open_regular
from capsule.host.errors import CapsuleError
from capsule.host.validation import first_reason
from capsule.host.wording import counted

REPORT = "launch-report.json"
FAILURE = "launch-failure.json"

_KERNEL = "(kernel)"  # in the place of a calling library: the supervisor answered

Fate = Literal["answered", "masked", "unseen"]


class RequestTally(Model):
    """A number of requests, and of the bytes that they were given."""

    calls: NonNegativeInt = 0
    bytes: NonNegativeInt = 0


class ProgramReport(Model):
    """Requests of one program to the kernel that bypassed the preloaded library."""

    process: str = Field(description="Path of the process that executed the program.")
    executed: bool = Field(
        description="Whether the process executed the program; false if it was forked and "
        "continues with the program of its parent."
    )
    executable: str | None = Field(
        description="Name of the executable file; null if it could not be read."
    )
    linkage: Literal["glibc", "other", "static", "unknown"] = Field(
        description="Linkage of the program: with glibc's loader, with another one, or static."
    )
    preloaded: bool = Field(
        description="Whether every preloaded library was mapped into the program."
    )
    start_bytes_derived: bool = Field(
        description="Whether AT_RANDOM was replaced before the program could read it."
    )
    getrandom: RequestTally = Field(description="System calls getrandom that were answered.")
    inside_libc: RequestTally = Field(
        description="System calls getrandom that the C library makes for itself: a key of its "
        "allocator, once per program, and names of semaphores."
    )
    devices: RequestTally = Field(
        description="Random devices that were opened, and the bytes that were read from them."
    )
    unanswered: NonNegativeInt = Field(
        description="Number of opens of other random files, which the kernel answered."
    )

    @property
    def is_python(self) -> bool:
        """Whether its executable is named like a Python interpreter."""
        return (self.executable or "").startswith("python")

    @property
    def requests(self) -> RequestTally:
        """Everything that the supervisor answered."""
        return _sum((self.getrandom, self.inside_libc, self.devices))


class LibraryUse(Model):
    """Requests of one process to the preloaded library, by source and calling library."""

    process: str
    source: str
    caller: str
    calls: NonNegativeInt
    bytes: NonNegativeInt


class Coverage(Model):
    """The treatment of one source of randomness."""

    source: str = Field(description="Name of the source.")
    fate: Fate = Field(
        description="Treatment: 'answered' by Capsule, 'masked' so that programs cannot use it, "
        "or 'unseen'."
    )
    by_preload: RequestTally = Field(
        RequestTally(), description="Requests that the preloaded library answered."
    )
    by_supervisor: RequestTally = Field(
        RequestTally(), description="Requests that the supervisor answered."
    )
    unanswered: NonNegativeInt = Field(
        0, description="Number of requests that were seen and that the kernel answered."
    )
    remark: str = Field(description="What was counted, or why it cannot be counted.")


class _LaunchFacts(Model):
    """The facts of the launcher's report that are kept as they are."""

    mode: Literal["virtual", "record", "replay", "system"] = Field(
        description="Mode of the launcher."
    )
    clock: Literal["system", "fixed", "virtual"] = Field(
        description="Calendar clock that programs were given."
    )
    supervised: bool = Field(description="Whether system calls were supervised.")
    own_numbers: bool = Field(
        description="Whether the launcher and its ancestors were alone in the process id "
        "namespace, so that only the run takes process and thread numbers there."
    )
    first_process: NonNegativeInt = Field(description="Process id of the first process.")
    status: NonNegativeInt = Field(description="Exit status of the run.")
    processes: NonNegativeInt = Field(
        description="Number of processes, which are counted only under supervision."
    )
    outlived: NonNegativeInt = Field(
        description="Number of processes that were killed because the program had ended "
        "without them."
    )
    programs: tuple[ProgramReport, ...] = Field(
        description="Programs that were executed, by process path."
    )


class _Launch(_LaunchFacts):
    schema_id: Literal["capsule/launch/v1"] = Field(alias="schema")
    fixed_addresses: bool


class _Failure(Model):
    schema_id: Literal["capsule/launch-failure/v1"] = Field(alias="schema")
    code: str
    message: str


class EntropyReport(_LaunchFacts):
    """The requests for randomness of a whole run.

    Every field but 'starts' describes the last start of the run.
    """

    schema_id: Literal["capsule/entropy/v1"] = Field("capsule/entropy/v1", alias="schema")
    address_randomization: bool = Field(
        description="Whether programs were loaded at random addresses."
    )
    uses: tuple[LibraryUse, ...] = Field(description="Requests to the preloaded library.")
    told: tuple[ToldReport, ...] = Field(
        description="Processes to which the preloaded library gave a time, a sorted listing or a "
        "number of processors."
    )
    coverage: tuple[Coverage, ...] = Field(description="Treatment of each source of randomness.")
    starts: PositiveInt = Field(
        1, description="Number of times that the run was started, or resumed after an interruption."
    )

    @property
    def numbers_pinned(self) -> bool:
        """Whether process and thread numbers were a function of what the run started."""
        return self.own_numbers and self.first_process == FIRST_PROCESS

    def requests(self, of: Callable[[str], bool]) -> RequestTally:
        """Return the requests that were answered of the processes whose paths ``of`` accepts."""
        by_preload = (
            RequestTally(calls=use.calls, bytes=use.bytes) for use in self.uses if of(use.process)
        )
        by_supervisor = (each.requests for each in self.programs if of(each.process))
        return _sum((*by_preload, *by_supervisor))

    @property
    def bypassed(self) -> int:
        """Requests that a preloaded library could have answered, had it been asked."""
        return sum(program.getrandom.calls + program.devices.calls for program in self.programs)


def collect(directory: Path, starts: int = 1) -> EntropyReport:
    """Read what launcher and interposer left.

    Args:
        directory: The launcher's ``--directory``.
        starts: How often the run was started.

    Raises:
        CapsuleError: CAP-R101 to CAP-R112, the launcher says that it failed; CAP-R113, its
            report is missing or malformed; CAP-R115, it or the journal is too large; CAP-R201 to
            CAP-R203, the journal cannot be read.
    """
    if failure := launch_failure(directory):
        raise failure
    launch = _read(directory / REPORT, _Launch)
    _check_counts(directory / REPORT, launch)
    # The supervisor makes a journal, and so does the interposer, which is always loaded in other
    # modes. If the journal is missing, the program has deleted it, and nothing else has its counts.
    optional = launch.mode == "system" and not launch.supervised
    exists = (directory / FILE_NAME).exists()
    journal = read_journal(directory) if exists or not optional else None
    # In this mode the interposer may be loaded for the clock, listings or cores, but it leaves
    # requests for randomness to the kernel.
    uses = () if launch.mode == "system" or journal is None else _uses(journal)
    programs = sorted(map(_without_folder, launch.programs), key=lambda p: p.process)
    facts = {name: getattr(launch, name) for name in _LaunchFacts.model_fields}
    return EntropyReport(
        **facts | {"programs": tuple(programs)},
        address_randomization=not launch.fixed_addresses,
        uses=uses,
        told=() if journal is None else journal.told,
        coverage=tuple(_coverage(launch, uses)),
        starts=starts,
    )


def readable_document(report: EntropyReport) -> bytes:
    """Return the report as it is stored.

    Raises:
        CapsuleError: CAP-R115, it is larger than the documents that are packed and read.
    """
    document = report.document()
    values = count_values(document)
    if len(document) > MAX_DOCUMENT_BYTES or values > MAX_VALUES:
        raise _too_large(
            f"the report on the randomness of the run has {len(document):,} bytes and {values:,} "
            f"values; at most {MAX_DOCUMENT_BYTES:,} and {MAX_VALUES:,} are accepted. The run "
            "started so many programs and processes, and each has entries"
        )
    return document


def _check_counts(path: Path, launch: _Launch) -> None:
    """Reject a launch report with counts that no run reaches: the program can write to it.

    Raises:
        CapsuleError: CAP-R113.
    """
    counts = [launch.first_process, launch.status, launch.processes, launch.outlived]
    for program in launch.programs:
        requests = program.requests
        counts += requests.calls, requests.bytes, program.unanswered
    if sum(counts) > MAX_COUNTS:
        raise _malformed(path, f"has an impossible count: {max(counts):,}")


def _without_folder(program: ProgramReport) -> ProgramReport:
    """Keep the name of a program's file; the folder may be a person's own, and is published."""
    if program.executable is None:
        return program
    name = program.executable.rpartition("/")[2]
    return program.model_copy(update={"executable": name})


def launch_failure(directory: Path) -> CapsuleError | None:
    """Return what the launcher said it could not do; None if it said nothing.

    Raises:
        CapsuleError: CAP-R113, what it said is malformed.
    """
    path = directory / FAILURE
    if not path.exists():
        return None
    failure = _read(path, _Failure)
    # The program can write to this folder, so the code may be any text.
    if failure.code not in _FIXES:
        raise _malformed(path, f"names the unknown error {failure.code!r}")
    return CapsuleError(failure.code, failure.message, fix=_FIXES[failure.code])


def _uses(journal: Journal) -> tuple[LibraryUse, ...]:
    sums: dict[tuple[str, str, str], RequestTally] = {}
    for use in journal.uses:
        key = (use.process, use.source.label, use.caller)
        # The launch report counts the supervisor's answers, which must not be counted twice.
        if use.caller != _KERNEL:
            sums[key] = _sum(
                (sums.get(key, RequestTally()), RequestTally(calls=use.calls, bytes=use.bytes))
            )
    return tuple(
        LibraryUse(
            process=process, source=source, caller=caller, calls=sum_.calls, bytes=sum_.bytes
        )
        for (process, source, caller), sum_ in sorted(sums.items())
    )


def _sum(tallies: Iterable[RequestTally]) -> RequestTally:
    calls = size = 0
    for tally in tallies:
        calls, size = calls + tally.calls, size + tally.bytes
    return RequestTally(calls=calls, bytes=size)


def _coverage(launch: _Launch, uses: tuple[LibraryUse, ...]) -> Iterator[Coverage]:
    """Yield the rows: answered requests, masked ones, then those that cannot be seen."""
    for source in sorted({use.source for use in uses}):
        by_preload = _sum(
            RequestTally(calls=use.calls, bytes=use.bytes) for use in uses if use.source == source
        )
        remark = "asked for through the preloaded library"
        yield Coverage(source=source, fate="answered", by_preload=by_preload, remark=remark)
    if launch.supervised:
        yield from _system_calls(launch.programs)
    else:
        yield Coverage(
            source="system calls past the preloaded library",
            fate="unseen",
            remark="the run was not supervised",
        )
    yield from _processor(launch)
    yield _addresses(launch)
    yield _clock(launch)


def _system_calls(programs: tuple[ProgramReport, ...]) -> Iterator[Coverage]:
    for source, tallies, remark in (
        (
            "system call getrandom",
            [program.getrandom for program in programs],
            "past the preloaded library: static programs, raw system calls",
        ),
        (
            "getrandom inside the C library",
            [program.inside_libc for program in programs],
            "the allocator's key and names of semaphores, which no library can intercept",
        ),
        (
            "random devices, opened by system call",
            [program.devices for program in programs],
            "past the preloaded library; opened as /dev/random or /dev/urandom",
        ),
    ):
        answered = _sum(tallies)
        yield Coverage(source=source, fate="answered", by_supervisor=answered, remark=remark)
    yield Coverage(
        source="/proc/sys/kernel/random/uuid",
        fate="unseen",
        unanswered=sum(program.unanswered for program in programs),
        remark="opens are counted and let through",
    )
    yield Coverage(
        source="getrandom without a system call (vDSO)",
        fate="masked",
        remark="no program gets the memory that it needs, so all make the system call",
    )
    executed = [program for program in programs if program.executed]
    derived = sum(program.start_bytes_derived for program in executed)
    yield Coverage(
        source="start bytes of programs (AT_RANDOM)",
        fate="answered" if derived == len(executed) else "unseen",
        remark=f"replaced before {derived:,} of {counted(len(executed), 'program')} read them",
    )


def _processor(launch: _Launch) -> Iterator[Coverage]:
    if launch.mode == "system":
        return
    yield Coverage(
        source="RDRAND and RDSEED in OpenSSL, Qt and systemd",
        fate="masked",
        remark="their environment variables switch it off",
    )
    yield Coverage(
        source="RDRAND and RDSEED elsewhere",
        fate="unseen",
        remark="instructions of the processor, which no process can intercept",
    )


def _addresses(launch: _Launch) -> Coverage:
    remark = "as the launcher read back" if launch.fixed_addresses else "left on, as asked for"
    return Coverage(
        source="address randomisation",
        fate="masked" if launch.fixed_addresses else "unseen",
        remark=remark,
    )


def _clock(launch: _Launch) -> Coverage:
    if launch.clock == "system":
        remark = "read without a system call (vDSO, RDTSC)"
        return Coverage(source="clocks", fate="unseen", remark=remark)
    remark = f"the calendar clock is {launch.clock} where the preloaded library is asked"
    return Coverage(source="clocks", fate="masked", remark=remark)


_Document = TypeVar("_Document", bound=Model)


def _read(path: Path, form: type[_Document]) -> _Document:
    try:
        with open_regular(path, follow=False) as stream:  # the program can write here
            # File names need not be UTF-8.
            data = stream.read(MAX_DOCUMENT_BYTES + 1)
        if len(data) > MAX_DOCUMENT_BYTES:
            raise _too_large(
                f"{path} has more than {MAX_DOCUMENT_BYTES >> 20} MiB, because the run executed so "
                "many programs: it has an entry for each"
            )
        text = data.decode("utf-8", "replace")
        return form.model_validate_json(text)
    except OSError as error:
        raise _malformed(path, f"cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise _malformed(path, f"is malformed: {first_reason(error)}") from error


def _too_large(what: str) -> CapsuleError:
    return CapsuleError(
        "CAP-R115",
        what,
        fix="Start fewer programs and processes (for example, by a call of a library instead of a "
        "command).",
    )


def _malformed(path: Path, what: str) -> CapsuleError:
    return CapsuleError(
        "CAP-R113",
        f"{path} {what}",
        fix="Start the run again: nothing is known about the randomness of this one.",
    )


# What the launcher can fail with (capsule/native/source), and what to do.
_FIXES: dict[str, str] = {
    "CAP-R101": "Report the error: Capsule itself sets the options of the launcher.",
    "CAP-R102": "Build the image again, or install Capsule from its wheel.",
    "CAP-R103": "Give the run an empty folder that it can write to, on a disk with free space.",
    "CAP-R104": "Use Linux 5.14 or newer, outside other supervised runs, or set "
    "entropy.supervised: false.",
    "CAP-R105": "Use Capsule's seccomp profile for containers, or set "
    "entropy.address_randomization: true.",
    "CAP-R106": "Correct trainer.command, or add the program to the image.",
    "CAP-R107": "Use an image with glibc 2.28 or newer, and a program that its loader starts.",
    "CAP-R108": "Keep the program dumpable and under its user, or set entropy.supervised: false.",
    "CAP-R109": "Use x86-64 programs only, or set entropy.supervised: false.",
    "CAP-R110": "Report the error, unless memory ran out.",
    "CAP-R111": "Use the profile of the recorded run.",
    "CAP-R112": "Free disk space, raise the limit on file size, or set entropy.mode: virtual. The "
    "program must not write to the folder of the journal.",
    "CAP-R114": "Raise limits.minutes. Or resume the run, which then has so many minutes again: "
    "'capsule run --resume' or, in a study, 'capsule study run --resume'.",
}
