"""The journal: what the processes of a run asked the operating system for, as they wrote it down.

The interposer keeps one file for a whole run (``capsule/native/source/shared/journal.h`` has its
layout); every process maps it and appends to it. It is complete after SIGKILL but for the call
under way. The program may have written anything to it, so nothing in it is believed unchecked.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from pydantic import Field

from capsule.experiment.canonical import MAX_SAFE_INTEGER
from capsule.experiment.fields import Model, NonNegativeInt
from capsule.experiment.files import open_regular
from capsule.host.errors import CapsuleError
from capsule.host.wording import counted

FILE_NAME = "journal"
MAGIC = b"CAPSJRNL"
VERSION = 3

# These are the structures of journal.h. A record's own head, 16 bytes, is read by _RECORD: length
# and kind are the halves of its claim. _CALL repeats the length, which depends on the call.
_HEADER = struct.Struct("<8s2I2Q2I24x")
_RECORD = struct.Struct("<3I4x")
_THREAD = struct.Struct("<16x4Q192s192s")
_COUNTER = struct.Struct("<16x4QI4x64s")
_CALL = struct.Struct("<I12x2Q")
_MISMATCH = struct.Struct("<16x3I4x4Q192s192s")
_TOLD = struct.Struct("<16x4Q3I4x192s")

# All counts of a journal together, and all of a launch report. The sum of both is then exact in
# canonical JSON.
MAX_COUNTS = MAX_SAFE_INTEGER // 2

_MAX_BYTES = 1 << 30  # what a process makes the file
# Most records become an object, and the program can fill the file with records without content.
MAX_CALLS = 1_000_000
MAX_RECORDS = 2_000_000
_KEPT_SIZE = 32  # bytes at most that are kept of a call
_IS_FULL = 2


class EntropyCall(IntEnum):
    """How a program asked."""

    GETRANDOM = 1
    GETENTROPY = 2
    ARC4RANDOM = 3
    SYSCALL = 4
    DEVICE = 5
    RANDOM_DEVICE = 6
    NAME = 7

    @property
    def label(self) -> str:
        """Its name in reports."""
        return _LABELS[self]


Clock = Literal["system", "fixed", "virtual"]
_CLOCKS: tuple[Clock, ...] = ("system", "fixed", "virtual")
# CPU_SETSIZE of glibc: neither the spec nor the interposer takes a larger number.
_MAX_CORES = 1024

_LABELS = {
    EntropyCall.GETRANDOM: "getrandom",
    EntropyCall.GETENTROPY: "getentropy",
    EntropyCall.ARC4RANDOM: "arc4random",
    EntropyCall.SYSCALL: "syscall(SYS_getrandom)",
    EntropyCall.DEVICE: "/dev/urandom",
    EntropyCall.RANDOM_DEVICE: "std::random_device",
    EntropyCall.NAME: "names of temporary files",
}


@dataclass(frozen=True, slots=True)
class Use:
    """The requests of one thread to one source, on behalf of one library.

    Attributes:
        process: Process path, such as ``0.1x``.
        thread: Thread path within the process, such as ``0-2``.
        source: How it asked.
        caller: File name of the library that called.
        calls: Number of calls.
        bytes: Number of bytes.
    """

    process: str
    thread: str
    source: EntropyCall
    caller: str
    calls: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded call: how, by which library, and what its bytes are made from.

    Attributes:
        source: How it asked.
        caller: File name of the library that called.
        size: Number of bytes that it was given.
        kept: These bytes, of a call for 32 or fewer; otherwise the 32 bytes from which they are
            expanded, as ``docs/random-profiles.md`` says.
    """

    source: EntropyCall
    caller: str
    size: int
    kept: bytes


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread that asked for randomness.

    Attributes:
        process: Process path.
        thread: Thread path.
        calls: Number of calls.
        bytes: Number of bytes.
        derived_calls: Calls of a replay that were answered with derived bytes.
        derived_bytes: The bytes of these.
        recorded: The calls in order, when the run was recorded.
    """

    process: str
    thread: str
    calls: int
    bytes: int
    derived_calls: int
    derived_bytes: int
    recorded: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first call of a replay that does not fit the profile.

    Attributes:
        process: Process path.
        thread: Thread path.
        call: How many calls the thread had made before.
        offset: How many bytes it had been given before.
        requested: Source and size that were asked for.
        recorded: Source and size that were recorded at this place; None beyond the end.
        known: Whether anything was recorded for this process and thread.
    """

    process: str
    thread: str
    call: int
    offset: int
    requested: tuple[EntropyCall, int]
    recorded: tuple[EntropyCall, int] | None
    known: bool

    def __str__(self) -> str:
        """Say exactly what was asked for, where, and what had been recorded there."""
        source, size = self.requested
        asked = (
            f"process {self.process}, thread {self.thread} asked for {counted(size, 'byte')} from "
            f"{source.label} as its call {self.call}, at offset {self.offset}"
        )
        if self.recorded is not None:
            source, size = self.recorded
            return f"{asked}; recorded there: {counted(size, 'byte')} from {source.label}"
        if self.known:
            return f"{asked}; only {counted(self.call, 'call was', 'calls were')} recorded"
        return f"{asked}; nothing was recorded for it"


class ToldReport(Model):
    """The answers that a process received in place of the machine's."""

    process: str = Field(description="Path of the process.")
    clock: Clock = Field(description="Calendar clock that the process was given.")
    readings: NonNegativeInt = Field(description="Number of times that it read that clock.")
    waits: NonNegativeInt = Field(
        description="Number of its sleeps and time-outs that advanced the clock."
    )
    sorted: bool = Field(description="Whether it was given the names in folders in order.")
    listings: NonNegativeInt = Field(description="Number of folders that it listed in order.")
    cores: NonNegativeInt | None = Field(
        description="Number of processors that it was given; null for the machine's own."
    )
    core_questions: NonNegativeInt = Field(
        description="Number of times that it was given this number."
    )


@dataclass(frozen=True, slots=True)
class Journal:
    """A journal that has been read.

    Attributes:
        machine: Architecture, as ELF numbers it (62 is x86-64).
        threads: Every thread that asked, by process path and thread path.
        uses: Calls and bytes by thread, source and calling library, in the same order.
        told: Every process that asked for the time, a listing or the number of processors where
            it is not the machine that answers, by process path.
        mismatch: The call at which a replay stopped, if one did.
        full: Whether the run stopped because the journal had no more room.
    """

    machine: int
    threads: tuple[Thread, ...]
    uses: tuple[Use, ...]
    told: tuple[ToldReport, ...]
    mismatch: Mismatch | None
    full: bool


def read_journal(directory: Path) -> Journal:
    """Read what a run wrote down.

    Args:
        directory: The one that was named as ``CAPSULE_ENTROPY_DIRECTORY``.

    Raises:
        CapsuleError: CAP-R115, it has more records than are read; CAP-R201, there is no journal,
            or not one of this version; CAP-R202, it contradicts itself; CAP-R203, more calls were
            recorded than a profile can contain.
    """
    path = directory / FILE_NAME
    header, body = _read(path)
    return _Reader(path, header.data + body, header.machine).journal(full=header.full)


def is_full(directory: Path) -> bool:
    """Tell whether a run stopped because its journal had no more room; false without a journal.

    Only the header is read: a full journal is large.

    Raises:
        CapsuleError: As :func:`read_journal`.
    """
    path = directory / FILE_NAME
    return path.exists() and _read(path, body=False)[0].full


class _Header(NamedTuple):
    data: bytes
    machine: int
    full: bool


def _read(path: Path, *, body: bool = True) -> tuple[_Header, bytes]:
    try:
        with open_regular(path, follow=False) as stream:  # the program can write here
            # Filled up, so that a file without a whole header fails one of the comparisons below.
            found = stream.read(_HEADER.size)
            data = found.ljust(_HEADER.size, b"\0")
            magic, version, machine, capacity, used, failed, _ = _HEADER.unpack(data)
            if magic != MAGIC or version != VERSION:
                raise _missing(path, f"is not a journal of version {VERSION}")
            # A profile has 16 bits for the machine.
            if not _HEADER.size <= used <= capacity <= _MAX_BYTES or machine >= 1 << 16:
                _contradiction(path, "states an impossible size or machine")
            # The file is sparse and may have a size of 1 GiB. Only what the run has used is read.
            records = stream.read(used - _HEADER.size) if body else b""
            if body and len(found) + len(records) < used:
                _contradiction(path, f"should have {used:,} bytes or more, and is shorter")
    except OSError as error:
        raise _missing(path, f"cannot be read: {error.strerror}") from error
    return _Header(data, machine, failed == _IS_FULL), records


def kept_size(size: int) -> int:
    """Return how many bytes are kept of a recorded call for ``size``."""
    return min(size, _KEPT_SIZE)


def totals(uses: Iterable[Use]) -> tuple[Use, ...]:
    """Add up what has the same thread, source and caller; sorted by these."""
    sums: dict[tuple[str, str, EntropyCall, str], tuple[int, int]] = {}
    for use in uses:
        key = (use.process, use.thread, use.source, use.caller)
        calls, size = sums.get(key, (0, 0))
        sums[key] = (calls + use.calls, size + use.bytes)
    return tuple(Use(*key, *sums[key]) for key in sorted(sums))


def _missing(path: Path, what: str) -> CapsuleError:
    return CapsuleError(
        "CAP-R201",
        f"{path} {what}",
        fix="Start the run again: nothing is known about the randomness of this one.",
    )


def _contradiction(path: Path, what: str) -> NoReturn:
    raise CapsuleError(
        "CAP-R202",
        f"{path} {what}",
        fix="Start the run again. The program or another process wrote into this file.",
    )


def _impossible(path: Path, offset: int) -> NoReturn:
    _contradiction(path, f"has an impossible record at {offset}")


def _too_many_calls() -> CapsuleError:
    return CapsuleError(
        "CAP-R203",
        f"the run asked for randomness more than {MAX_CALLS:,} times, which is the most that a "
        "profile can contain",
        fix="Use entropy.mode: virtual for a program with so many requests.",
    )


def _too_many_records(path: Path) -> CapsuleError:
    return CapsuleError(
        "CAP-R115",
        f"{path} has more than {MAX_RECORDS:,} records: each process and each thread that asks for "
        "randomness adds some",
        fix="Start fewer processes and threads.",
    )


class _Reader:
    """Follows the records of a journal and the offsets between them."""

    def __init__(self, path: Path, data: bytes, machine: int) -> None:
        self._path = path
        self._data = data
        self._machine = machine
        self._threads: dict[int, Thread] = {}
        self._counters: dict[int, tuple[int, Use]] = {}
        self._recorded: dict[int, list[Call]] = {}
        self._told: list[ToldReport] = []
        self._mismatch: Mismatch | None = None
        self._counted = self._calls = 0

    def journal(self, *, full: bool) -> Journal:
        """Read all records; those that a killed process left unfinished do not count."""
        # The keys are those of enum journal_type in journal.h.
        kinds: dict[int, tuple[struct.Struct, Callable[[int, tuple[Any, ...]], None]]] = {
            1: (_THREAD, self._thread),
            2: (_COUNTER, self._counter),
            3: (_CALL, self._call),
            4: (_MISMATCH, self._mismatched),
            5: (_TOLD, self._was_told),
        }
        for offset, length, kind in self._records():
            if kind not in kinds:
                _contradiction(self._path, f"has an unknown record at {offset}")
            layout, take = kinds[kind]
            # What lies beyond a record belongs to the next one.
            if length < layout.size:
                _impossible(self._path, offset)
            take(offset, layout.unpack_from(self._data, offset))
        threads = [
            replace(thread, recorded=tuple(self._recorded.get(offset, ())))
            for offset, thread in self._threads.items()
        ]
        return Journal(
            machine=self._machine,
            threads=tuple(sorted(threads, key=lambda thread: (thread.process, thread.thread))),
            uses=totals(use for _, use in self._counters.values()),
            told=tuple(sorted(self._told, key=lambda told: told.process)),
            mismatch=self._mismatch,
            full=full,
        )

    def _records(self) -> Iterator[tuple[int, int, int]]:
        """Yield offset, length and kind of each record that its process has finished.

        A record's length is claimed before anything else is written, so one that a killed process
        left unfinished can be passed over.
        """
        offset, count = _HEADER.size, 0
        while offset < len(self._data):
            if offset + _RECORD.size > len(self._data):
                _contradiction(self._path, f"is cut off at {offset}")
            length, kind, ready = _RECORD.unpack_from(self._data, offset)
            # A length of zero would keep this loop from ending.
            if length < _RECORD.size or length % 8 or offset + length > len(self._data):
                _impossible(self._path, offset)
            count += 1
            if count > MAX_RECORDS:
                raise _too_many_records(self._path)
            if ready:
                yield offset, length, kind
            offset += length

    def _count(self, offset: int, *counts: int) -> None:
        self._counted += sum(counts)
        if self._counted > MAX_COUNTS:
            _contradiction(self._path, f"has an impossible count at {offset}: {max(counts):,}")

    def _text(self, field: bytes) -> str:
        text = field.split(b"\0", 1)[0]
        if not text:
            _contradiction(self._path, "has a record without a name")
        # The name of a library's file is any bytes but zero and the slash.
        return text.decode("utf-8", "backslashreplace")

    def _source(self, number: int) -> EntropyCall:
        if number not in _LABELS:
            _contradiction(self._path, f"names an unknown source, {number}")
        return EntropyCall(number)

    def _thread(self, offset: int, fields: tuple[Any, ...]) -> None:
        calls, size, derived_calls, derived_size, *names = fields
        process, thread = map(self._text, names)
        self._threads[offset] = Thread(
            process, thread, calls, size, derived_calls, derived_size, recorded=()
        )

    def _counter(self, offset: int, fields: tuple[Any, ...]) -> None:
        owner, _, calls, size, source, caller = fields
        self._count(offset, calls, size)
        # Only an offset at which such a record was read is accepted, never one into the middle of
        # another.
        if owner not in self._threads:
            _contradiction(self._path, f"has a count without a thread at {offset}")
        thread = self._threads[owner]
        names = thread.process, thread.thread, self._source(source), self._text(caller)
        self._counters[offset] = (owner, Use(*names, calls, size))

    def _call(self, offset: int, fields: tuple[Any, ...]) -> None:
        length, counter, size = fields
        if _CALL.size + kept_size(size) > length:
            _impossible(self._path, offset)
        if counter not in self._counters:
            _contradiction(self._path, f"has a call without a thread at {offset}")
        self._calls += 1
        if self._calls > MAX_CALLS:
            raise _too_many_calls()
        start = offset + _CALL.size
        owner, use = self._counters[counter]
        call = Call(use.source, use.caller, size, self._data[start : start + kept_size(size)])
        # A thread appends its own calls one after the other, so their order in the file is its own.
        self._recorded.setdefault(owner, []).append(call)

    def _was_told(self, offset: int, fields: tuple[Any, ...]) -> None:
        readings, waits, listings, questions, clock, is_sorted, cores, process = fields
        if clock >= len(_CLOCKS) or is_sorted > 1 or cores > _MAX_CORES:
            _contradiction(self._path, f"has an impossible setting at {offset}")
        self._count(offset, readings, waits, listings, questions)
        self._told.append(
            ToldReport(
                process=self._text(process),
                clock=_CLOCKS[clock],
                readings=readings,
                waits=waits,
                sorted=bool(is_sorted),
                listings=listings,
                # 0 stands for the machine's number.
                cores=cores or None,
                core_questions=questions,
            )
        )

    def _mismatched(self, _: int, fields: tuple[Any, ...]) -> None:
        reason, requested, recorded, call, before, size, recorded_size, process, thread = fields
        if self._mismatch is not None:
            return  # the first one stopped the run
        self._mismatch = Mismatch(
            process=self._text(process),
            thread=self._text(thread),
            call=call,
            offset=before,
            requested=(self._source(requested), size),
            recorded=(self._source(recorded), recorded_size) if recorded else None,
            # 1 is MISMATCH_THREAD of journal.h: nothing was recorded for this thread.
            known=reason != 1,
        )
