"""Watching a started task: interruption, limits, output. The same for every engine."""

from __future__ import annotations

import errno
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Protocol

from capsule.engine.interface import Exit, Task
from capsule.experiment.beneath import UnboundedError, entries_beneath
from capsule.experiment.files import LOCK, write_atomic
from capsule.experiment.spec import LimitsSpec
from capsule.host.errors import CapsuleError, refusal_of
from capsule.host.folders import occupied_bytes
from capsule.host.locks import is_locked, lock
from capsule.host.wording import counted

IN_USE = "CAP-E008"  # another process holds the run directory
GRACE_SECONDS = 30.0  # from SIGTERM to SIGKILL: a checkpoint of the largest replay fits in
LOG_BYTES = 64 << 20
_READ_BYTES = 1 << 16  # at the end of a log, for its last lines
RESERVE_BYTES = 256 << 20  # of the run directory's disk, which no task may take from the machine

KILL_SECONDS = 30.0  # from SIGKILL until a task is given up

MINUTE = 60.0  # of limits.minutes, in seconds

_POLL_SECONDS = 0.2
_LIMIT_SECONDS = 1.0  # limits are checked by walking folders, so less often than polls
# These follow from the state of the disk, and not from what a task has put into its folder.
_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS})


class Running(Protocol):
    """A started task, as its engine handles it."""

    def wait(self, seconds: float) -> int | None:
        """Wait up to ``seconds``; return the exit status, or None if it still runs."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL to every process of the task."""

    def exceeds_memory(self) -> bool:
        """Tell whether the task uses too much memory; False where the kernel kills it for that."""

    def was_out_of_memory(self) -> str | None:
        """Return what shows that the kernel killed a task that has ended for its memory, if so."""


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP while installed, in place of raising anywhere."""

    def __init__(self) -> None:
        self.count = 0

    def received(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Handle a signal (``signal.signal``)."""
        self.count += 1


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Install :class:`Interrupts` for a block.

    Only the main thread can receive signals; in others the count stays zero and stopping is the
    responsibility of the caller that started the thread.
    """
    counter = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield counter
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        numbers.append(signal.SIGHUP)
    previous = [signal.signal(number, counter.received) for number in numbers]
    try:
        yield counter
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


@contextmanager
def exclusive(run_directory: Path) -> Iterator[None]:
    """Hold the run directory for one task at a time.

    Raises:
        CapsuleError: CAP-E008, another process holds it.
    """
    # A file is locked, because NFS does not tell other machines of the lock on a folder; and one
    # beside the folder, because the task could remove a file in it.
    # No child inherits the descriptor (PEP 446), so that the lock ends with this process.
    descriptor = os.open(_lock_file(run_directory), LOCK, 0o644)
    try:
        if not lock(descriptor, run_directory):
            raise CapsuleError(
                IN_USE,
                f"another Capsule process is running in {run_directory}",
                fix="Wait for it or interrupt it, then run the command again.",
            )
        yield
    finally:
        os.close(descriptor)


def is_held(run_directory: Path) -> bool:
    """Tell whether a process executes a task in a run directory."""
    return is_locked(_lock_file(run_directory))


def _lock_file(run_directory: Path) -> Path:
    return run_directory.with_name(f"{run_directory.name}.lock")


def starting(task: Task, interruptions: Interrupts) -> Iterator[None]:
    """Yield again and again while an engine may wait for its task to start; end when interrupted.

    Raises:
        CapsuleError: CAP-E005, the time of the task is over.
    """
    deadline = time.monotonic() + task.limits.minutes * MINUTE
    while not interruptions.count:
        if time.monotonic() > deadline:
            raise CapsuleError(
                "CAP-E005",
                f"the task has not started within {counted(task.limits.minutes, 'minute')} "
                "(limits.minutes)",
                fix="Look for a disk that does not respond, or use another --engine.",
            )
        yield


def supervise(
    running: Running, task: Task, interruptions: Interrupts, on_poll: Callable[[], None]
) -> Exit:
    """Watch a task until it ends by itself or has to be stopped.

    Time is up or a signal came: SIGTERM first, so that the task can save its state. Memory or
    disk is used up: SIGKILL at once, because it would continue to use more.

    Raises:
        CapsuleError: CAP-E007 or CAP-E040, the run directory cannot be watched; CAP-E009, the task
            does not end.
    """
    started = checked = time.monotonic()
    while (status := running.wait(_POLL_SECONDS)) is None:
        # This comes before on_poll(), which fails to write to a terminal that was closed.
        if interruptions.count:
            return Exit(_stop(running, interruptions), "interrupted")
        on_poll()
        now = time.monotonic()
        if now - started > task.limits.minutes * MINUTE:
            return Exit(_stop(running, interruptions), "timed-out")
        if now - checked < _LIMIT_SECONDS:
            continue
        checked = now
        if running.exceeds_memory():
            evidence = "its processes used more than limits.memory_mb"
            return Exit(_kill(running), "out-of-memory", evidence=evidence)
        if exceeded := _disk_exceeded(task):
            return Exit(_kill(running), "disk-full", evidence=exceeded)
    on_poll()
    # Schedulers and shutdowns send a signal to all processes at once, so the task may end before
    # this process stops it.
    if status != 0 and interruptions.count:
        return Exit(status, "interrupted")
    # Engines may report this although only a child was killed and the task continued, as a
    # status of 0 shows.
    if status != 0 and (observed := running.was_out_of_memory()) is not None:
        return Exit(status, "out-of-memory", evidence=observed)
    # A task that uses up the disk between two looks fails by itself, and this is the true reason.
    exceeded = _disk_exceeded(task)
    return Exit(status, "disk-full" if exceeded else "exited", evidence=exceeded)


def unattended_seconds(limits: LimitsSpec) -> int:
    """Return when a task has to end by itself: later than :func:`supervise` ever ends one."""
    return math.ceil(limits.minutes * MINUTE + 2 * GRACE_SECONDS)


def _disk_exceeded(task: Task) -> str:
    """Return which limit of the disk a task exceeds; nothing if it exceeds none.

    Raises:
        CapsuleError: CAP-E007 or CAP-E040, the run directory is gone or cannot be watched.
    """
    try:
        disk = os.statvfs(task.run_directory)
    except FileNotFoundError as error:
        raise CapsuleError(
            "CAP-E007",
            f"the run directory {str(task.run_directory)!r} was removed during the run",
            fix="Start again in a folder that no person or program cleans up, named by --output, "
            "or by TMPDIR if this is a verification.",
        ) from error
    # f_bfree would include what the file system reserves for root.
    if disk.f_bavail * disk.f_frsize < RESERVE_BYTES:
        return f"less than {RESERVE_BYTES >> 20} MiB of its disk were free"
    if disk_usage(task.run_directory) > task.limits.disk_mb << 20:
        return "its run directory was larger than limits.disk_mb"
    return ""


def _stop(running: Running, interruptions: Interrupts) -> int:
    """Terminate; kill after the time of grace, or at once when interrupted again."""
    before = interruptions.count
    deadline = time.monotonic() + GRACE_SECONDS
    running.terminate()
    while interruptions.count == before and time.monotonic() < deadline:
        if (status := running.wait(0.1)) is not None:
            return status
    return _kill(running)


def _kill(running: Running) -> int:
    running.kill()
    status = running.wait(KILL_SECONDS)
    if status is None:
        raise CapsuleError(
            "CAP-E009",
            f"the task has not ended {KILL_SECONDS:.0f} s after SIGKILL",
            fix="Look for a process that waits for a disk or GPU that does not respond.",
        )
    return status


def disk_usage(folder: Path) -> int:
    """Return the bytes that a folder's files occupy, without following links.

    The task may be hostile and changes the folder meanwhile; what vanishes is not counted.

    Raises:
        CapsuleError: CAP-E007, a sub-folder cannot be read, so that anything could be in it;
            CAP-E040, the folder is too deep or has too many entries to be watched.
    """
    try:
        return sum(occupied_bytes(entry.facts) for entry in entries_beneath(folder))
    except PermissionError as error:
        raise CapsuleError(
            "CAP-E007",
            f"the task made {error.filename!a} in {folder} unreadable, so its size cannot be "
            "watched",
            fix="Do not trust this run; start again in a new run directory.",
        ) from error
    except UnboundedError as error:
        raise CapsuleError(
            "CAP-E040",
            f"the run directory cannot be watched: {error}",
            fix="Write fewer, larger files.",
        ) from error


def write_log(chunks: Iterable[bytes], path: Path) -> None:
    """Write a task's output to ``path``, at most :data:`LOG_BYTES` of it; the rest is dropped.

    The file replaces whatever the task may have put there, a link to elsewhere included. All
    chunks are consumed in any case, so that a writer at the other end never blocks. Until the last
    has come, they are kept in memory: the folder is the task's, who may remove what it finds there,
    and a disk could fill up.

    Raises:
        CapsuleError: CAP-E041, the task left the folder so that nothing can be written there;
            CAP-X003, the disk is full or fails.
    """
    kept = bytearray()
    for chunk in chunks:
        kept += chunk[: LOG_BYTES - len(kept)]
    try:
        write_atomic(path, bytes(kept))
    except OSError as error:
        refusal = refusal_of(error) if error.errno in _DISK_ERRORS else None
        raise refusal or spoilt(path, f"cannot be written: {error.strerror}") from error


def with_output(ended: Exit, unkept: CapsuleError | None) -> Exit:
    """Return how a task ended, if its output could be kept.

    A task that filled the disk left no space for its output either. Its end names the cause.

    Args:
        ended: How it ended.
        unkept: Why :func:`write_log` failed, if it did.

    Raises:
        CapsuleError: ``unkept``, unless the full disk explains it.
    """
    if unkept is None or (ended.reason, unkept.code) == ("disk-full", "CAP-X003"):
        return ended
    raise unkept


def last_lines(path: Path, count: int, longest: int = 300) -> list[str]:
    """Return the last lines of a log that the engine wrote, ``longest`` characters of each."""
    if not path.exists():
        return []
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - max(_READ_BYTES, longest)))
        lines = stream.read().decode("utf-8", "replace").strip().splitlines()
    return [line[:longest] for line in lines[-count:]]


def spoilt(path: Path, what: str) -> CapsuleError:
    """Return the error of a run directory that its task has left in a state of its own making."""
    return CapsuleError(
        "CAP-E041",
        f"the task replaced {path.name}: it {what}",
        fix="Do not trust this run; start again in a new run directory.",
    )
