"""The common parts of all jobs: reading the job, writing documents, handling signals to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event as Flag
from types import FrameType
from typing import Any

from capsule.experiment import contract
from capsule.experiment.canonical import canonical_json
from capsule.experiment.contract import Event, Failure, Job, Runtime
from capsule.experiment.errors import CapsuleError
from capsule.experiment.fields import Model
from capsule.experiment.files import write_atomic

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(Exception):  # noqa: N818 - an order, not an error
    """The run was asked to stop, and can be started again."""


def read_job(directory: Path) -> Job:
    """Read the job of a run directory.

    Raises:
        CapsuleError: CAP-T111, it is missing or malformed.
    """
    path = directory / contract.JOB
    try:
        return Job.parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CapsuleError(
            "CAP-T111",
            f"{path.name} cannot be used: {error}",
            fix="Start the run with 'capsule run', which writes it.",
        ) from error


def record_runtime(
    directory: Path, runtime: Runtime, *, portable: bool, resumed: bool = True
) -> None:
    """Write the flags, libraries and device of a run, and compare them with an earlier attempt's.

    Args:
        directory: The run directory.
        runtime: The flags, libraries and device that were read back.
        portable: Whether the run promises the same bits on other processors. It may then be resumed
            on another one, and its earlier devices are listed.
        resumed: Whether the run continues an earlier attempt, if there was one.

    Raises:
        CapsuleError: CAP-T113, the earlier attempt had others; CAP-T131, the file cannot be
            written.
    """
    path = directory / contract.RUNTIME
    if resumed and path.exists():
        before = Runtime.parse(path.read_bytes())
        _require_same(before.flags, runtime.flags)
        _require_same(before.libraries, runtime.libraries)
        if not portable:
            _require_same(_identity(before.device), _identity(runtime.device))
        earlier = before.earlier_devices
        if _identity(before.device) != _identity(runtime.device):
            earlier += (before.device,)
        runtime = runtime.model_copy(update={"earlier_devices": earlier})
    write_document(path, runtime)


def _identity(device: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties of a device that can affect results.

    The number of cores and the individual card cannot. Neither can the driver, which a cluster may
    update during a long run, because the kernels are in the image; nor the size of the memory, of
    which each driver reserves another part.
    """
    left_out = ("cores", "uuid_sha256", "driver", "memory_bytes")
    return {f"device {name}": value for name, value in device.items() if name not in left_out}


def _require_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            raise CapsuleError(
                "CAP-T113",
                f"the run began with {name} {before.get(name)!r} and would resume with "
                f"{now.get(name)!r}",
                fix="Resume it in the image and on the kind of machine on which it began.",
            )


def record_failure(directory: Path, error: CapsuleError, step: int | None = None) -> None:
    """Write the reason why the run failed, for the host."""
    failure = Failure(code=error.code, message=error.message, fix=error.fix, step=step)
    write_document(directory / contract.FAILURE, failure)


def write_document(path: Path, document: Model) -> None:
    """Write a document of the run directory atomically, as canonical JSON.

    Raises:
        CapsuleError: CAP-T131, the file cannot be written.
    """
    write_file(path, document.document())


def write_file(path: Path, data: bytes) -> None:
    """Write a file of the run directory atomically.

    Raises:
        CapsuleError: CAP-T131, the file cannot be written.
    """
    try:
        write_atomic(path, data)
    except OSError as error:
        raise not_written(f"{path.name} ({len(data)} bytes)", error) from error


def not_written(what: str, error: OSError) -> CapsuleError:
    """Return the error of a run that cannot write a file."""
    return CapsuleError(
        "CAP-T131",
        f"{what} cannot be written: {error.strerror}",
        fix="Free disk space or raise limits.disk_mb, then run again: the run resumes from its "
        "last saved state.",
    )


def changed(code: str, message: str) -> CapsuleError:
    """Return the error of a run directory whose files do not belong together."""
    fix = "Start a new run directory: this one was changed or is incomplete."
    return CapsuleError(code, message, fix=fix)


def append_event(path: Path, event: Event) -> None:
    """Append a line to ``events.jsonl`` in one write."""
    line = canonical_json(event.model_dump(mode="json", exclude_none=True)) + b"\n"
    with path.open("ab") as stream:
        stream.write(line)


def drop_partial_line(path: Path) -> None:
    """Remove the last line if a killed attempt did not finish it."""
    if path.exists():
        data = path.read_bytes()
        # Without a line feed, rfind() returns -1, and the file becomes empty.
        os.truncate(path, data.rfind(b"\n") + 1)


@contextmanager
def stop_signals() -> Iterator[Flag]:
    """Let SIGTERM and SIGINT set a flag while the block runs."""
    flag = Flag()

    def ask_to_stop(_number: int, _frame: FrameType | None) -> None:
        # The run checks the flag between two intervals, where a state can be saved.
        flag.set()

    before = {number: signal.signal(number, ask_to_stop) for number in _STOP_SIGNALS}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
