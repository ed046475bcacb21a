"""Random profiles: the operating-system randomness that a run consumed, in one file.

A profile holds, for every thread of every process, the calls that asked for randomness, in order,
with the bytes from which what they were given is made again. It is made from the journal of a
recorded run; a replay serves from it. ``docs/random-profiles.md`` specifies the format. One run has
one profile: equal contents are equal bytes, and bytes that are not exactly what this module would
write are rejected.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from capsule.entropy.journal import (
    MAX_CALLS,
    Call,
    EntropyCall,
    Thread,
    is_full,
    kept_size,
    read_journal,
)
from capsule.host.errors import CapsuleError
from capsule.host.wording import counted

MAGIC = b"CAPSPROF"
VERSION = 2
X86_64 = 62  # e_machine of ELF
MAX_PROFILE_BYTES = 64 << 20

_HEADER = struct.Struct("<8s2H")
_CHECKSUM_SIZE = 32
_NUMBER_BITS = 64


@dataclass(frozen=True, slots=True)
class ThreadProfile:
    """The requests of one thread, in order.

    Attributes:
        process: Process path, such as ``0.1x``.
        thread: Thread path within the process, such as ``0-2``.
        calls: The calls.
    """

    process: str
    thread: str
    calls: tuple[Call, ...]

    @property
    def bytes(self) -> int:
        """How many bytes the thread was given."""
        return sum(call.size for call in self.calls)


@dataclass(frozen=True, slots=True)
class Profile:
    """A random profile.

    Attributes:
        machine: Architecture, as ELF numbers it.
        threads: By process path and thread path.
    """

    machine: int
    threads: tuple[ThreadProfile, ...]


def merge(directory: Path) -> bytes:
    """Make the profile of a recorded run from its journal.

    Args:
        directory: The one that the run wrote to.

    Raises:
        CapsuleError: CAP-R115, CAP-R201 to CAP-R202, the journal cannot be read; CAP-R203, it had
            no room for the whole run, or a profile has none; CAP-R204, two threads have one path,
            so that a replay could not tell them apart.
    """
    journal = read_journal(directory)
    if journal.full:
        raise _full(directory)
    threads = [
        ThreadProfile(thread.process, thread.thread, thread.recorded)
        for thread in journal.threads
        if thread.recorded
    ]
    # Threads are sorted by their paths, so equal paths are neighbours.
    for one, other in pairwise(threads):
        if (one.process, one.thread) == (other.process, other.thread):
            raise CapsuleError(
                "CAP-R204",
                "two threads that requested randomness have the same path, process "
                f"{one.process}, thread {one.thread}: they were started without the C library, or "
                f"two runs wrote to {directory}",
                fix="Use a separate folder for each run, or use entropy.mode: virtual.",
            )
    return serialize(Profile(journal.machine, tuple(threads)))


def serialize(profile: Profile) -> bytes:
    """Return the file of a profile."""
    callers = sorted({call.caller for thread in profile.threads for call in thread.calls})
    number = {caller: index for index, caller in enumerate(callers)}
    parts = [_HEADER.pack(MAGIC, VERSION, profile.machine), _number(len(callers))]
    parts += [_text(caller) for caller in callers]
    parts.append(_number(len(profile.threads)))
    for thread in profile.threads:
        listed = b"".join(
            _number(call.source) + _number(number[call.caller]) + _number(call.size)
            for call in thread.calls
        )
        kept = b"".join(call.kept for call in thread.calls)
        parts += [_text(thread.process), _text(thread.thread)]
        parts += [_number(len(thread.calls)), _number(len(listed)), _number(len(kept))]
        parts += [listed, kept]
    content = b"".join(parts)
    return content + _checksum(content)


def parse(data: bytes) -> Profile:
    """Read a profile.

    Raises:
        CapsuleError: CAP-R211, it is not a profile; CAP-R212, it is of another version; CAP-R213,
            of another architecture; CAP-R214, it is cut off or was edited; CAP-R215, its checksum
            is right but it is not what Capsule writes.
    """
    if not data.startswith(MAGIC):
        raise CapsuleError(
            "CAP-R211", "this is not a random profile", fix="Name a profile that Capsule wrote."
        )
    # A file that ends within the header is filled up here and fails at its checksum.
    _, version, machine = _HEADER.unpack_from(data.ljust(_HEADER.size, b"\0"))
    complete = len(data) >= _HEADER.size
    if complete and version != VERSION:  # before the checksum, which may be another one there
        raise CapsuleError(
            "CAP-R212",
            f"the profile has version {version}; this Capsule reads version {VERSION}",
            fix="Use the Capsule that made it, or record the run again.",
        )
    content, checksum = data[:-_CHECKSUM_SIZE], data[-_CHECKSUM_SIZE:]
    if not hmac.compare_digest(_checksum(content), checksum):
        raise CapsuleError(
            "CAP-R214", "the profile is cut off, or was edited", fix="Get another copy of it."
        )
    if machine != X86_64:
        raise CapsuleError(
            "CAP-R213",
            f"the profile was recorded on another architecture ({machine}; here {X86_64})",
            fix="Replay it on that architecture, because others request randomness differently.",
        )
    profile = _Reader(content).profile(machine)
    paths = [(thread.process, thread.thread) for thread in profile.threads]
    if paths != sorted(set(paths)) or serialize(profile) != data:
        _malformed()
    return profile


def check_consumed(
    directory: Path, profile: Profile, *, partial: bool = False
) -> tuple[Thread, ...]:
    """Check that a replay consumed exactly what was recorded.

    Args:
        directory: The one that the replay wrote to.
        profile: What it was served from.
        partial: The replay ended, or was ended, before the run did: it may leave some over.

    Returns:
        The threads that got derived bytes beyond the recorded ones, which only happens where the
        spec allows it (``entropy.on_exhaustion: virtual``). A replay with any is not one.

    Raises:
        CapsuleError: CAP-R115, CAP-R201 to CAP-R203, what the replay wrote down cannot be read or
            is not complete; CAP-R221, a thread asked for more or for something else; CAP-R222, for
            less.
    """
    journal = read_journal(directory)
    if journal.mismatch is not None:
        raise CapsuleError(
            "CAP-R221",
            f"the replay requested other randomness than was recorded: {journal.mismatch}",
            fix="Record and replay with the same code and inputs. A program that hands work to "
            "whichever process is ready cannot be replayed: use entropy.mode: virtual.",
        )
    if journal.full:
        raise _full(directory)
    consumed = {(thread.process, thread.thread): thread for thread in journal.threads}
    # A thread that asked for more has stopped the replay as a mismatch, so only what is left over
    # has to be found here.
    for recorded in () if partial else profile.threads:
        _check_thread(recorded, consumed.get((recorded.process, recorded.thread)))
    return tuple(thread for thread in journal.threads if thread.derived_calls)


def _check_thread(recorded: ThreadProfile, consumed: Thread | None) -> None:
    calls, given = (consumed.calls, consumed.bytes) if consumed else (0, 0)
    finished = calls >= len(recorded.calls) and given >= recorded.bytes
    if finished or (consumed and consumed.derived_calls):
        return
    offset = sum(call.size for call in recorded.calls[:calls])
    if given < offset:  # of a device, where the last call is as long as what was read of it
        lack = f"was given {given:,} of {counted(recorded.bytes, 'byte')}"
    else:
        missing = recorded.calls[calls]
        size = counted(missing.size, "byte")
        lack = (
            f"made {calls:,} of {counted(len(recorded.calls), 'call')}; the next one would have "
            f"been for {size} from {missing.source.label} at offset {offset}"
        )
    raise CapsuleError(
        "CAP-R222",
        f"the replay requested less randomness than was recorded: process {recorded.process}, "
        f"thread {recorded.thread} {lack}",
        fix="Record and replay with the same code and inputs, and let the replay finish.",
    )


def check_room(directory: Path) -> None:
    """Check that the journal of a run had room for all of it, without reading its records.

    Raises:
        CapsuleError: CAP-R201 to CAP-R202, the journal cannot be read; CAP-R203, it had no room.
    """
    if is_full(directory):
        raise _full(directory)


def _full(directory: Path) -> CapsuleError:
    return CapsuleError(
        "CAP-R203",
        f"the journal in {directory} has no room for the randomness of the whole run",
        fix="Free disk space, raise the limit on file size, or use entropy.mode: virtual for a "
        "program that asks for so much.",
    )


class _Reader:
    """Reads the content of a profile from its header on."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = _HEADER.size
        self._calls = 0

    def profile(self, machine: int) -> Profile:
        callers = [self._text() for _ in range(self._count())]
        threads = tuple(self._thread(callers) for _ in range(self._count()))
        return Profile(machine, threads)

    def _thread(self, callers: list[str]) -> ThreadProfile:
        process, thread = self._text(), self._text()
        # The two lengths are not needed here. parse() finds wrong ones by writing the profile
        # again.
        calls_listed, _, _ = self._count(), self._count(), self._count()
        self._calls += calls_listed
        if not calls_listed or self._calls > MAX_CALLS:
            _malformed()
        heads = [(self._number(), self._number(), self._number()) for _ in range(calls_listed)]
        calls = []
        for source, caller, size in heads:
            if source not in set(EntropyCall) or caller >= len(callers):
                _malformed()
            kept = self._bytes(kept_size(size))
            calls.append(Call(EntropyCall(source), callers[caller], size, kept))
        return ThreadProfile(process, thread, tuple(calls))

    def _number(self) -> int:
        number = 0
        for shift in range(0, _NUMBER_BITS, 7):
            (byte,) = self._bytes(1)
            number |= (byte & 127) << shift
            if byte < 128:
                break
        # Ten groups of seven bits have six more than fit. Needless zero groups at the end are
        # found by parse(), which writes the profile again.
        if byte > 127 or number >> _NUMBER_BITS:
            _malformed()
        return number

    def _count(self) -> int:
        """Read how many things follow; each takes a byte at least."""
        number = self._number()
        if number > len(self._content) - self._at:
            _malformed()
        return number

    def _text(self) -> str:
        try:
            return self._bytes(self._number()).decode("utf-8")
        except UnicodeDecodeError:
            _malformed()

    def _bytes(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._content):
            _malformed()
        part, self._at = self._content[self._at : end], end
        return part


def _number(number: int) -> bytes:
    """Seven bits a byte, lowest first; the top bit says that more follow."""
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _text(text: str) -> bytes:
    encoded = text.encode()
    return _number(len(encoded)) + encoded


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2s(content).digest()


def _malformed() -> NoReturn:
    raise CapsuleError(
        "CAP-R215",
        "the profile has a correct checksum, but Capsule did not write it",
        fix="Do not trust its source; record the run again.",
    )
