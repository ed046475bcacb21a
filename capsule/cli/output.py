"""Standard output that may be closed early without changing the exit status of a command.

``capsule verify … | head -1`` closes the pipe before the verdict is printed. The exception that
Python then raises, while printing or when the interpreter shuts down, must not replace the exit
status that tells the verdict.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from capsule.host.errors import ExitCode

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Descriptor(io.FileIO):
    """An output descriptor that drops all data after its first failure."""

    failure: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        if self.failure is None:
            try:
                return super().write(data)
            except OSError as error:
                self.failure = error
        # All data count as written: BufferedWriter would write the rest again and again.
        return memoryview(data).nbytes


@contextmanager
def lossy_standard_output() -> Iterator[None]:
    """Replace ``sys.stdout`` within a block by a stream that never raises.

    A pipe that its reader has closed is not an error. Any other failure, such as a full disk, is
    reported on standard error at the end, and a command that succeeded ends with status 2.

    Raises:
        SystemExit: Output was lost although the command succeeded.
    """
    before = sys.stdout
    # It was closed before this program started; or it is a console of Windows, which has no reader
    # that could close it, and takes text through functions of its own.
    if before is None or (sys.platform == "win32" and before.isatty()):
        yield
        return
    before.flush()
    descriptor = _Descriptor(before.fileno(), "wb", closefd=False)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(descriptor),
        encoding=before.encoding,
        # The code page of Windows has few letters. It is no reason to stop if one is missing.
        errors="replace" if before.errors == "strict" else before.errors,
        line_buffering=before.isatty(),
    )
    status: object = 0
    try:
        yield
    except SystemExit as ending:
        status = ending.code
        raise
    finally:
        # The flush at the end of the interpreter would be too late to change the status.
        sys.stdout.flush()
        sys.stdout = before
        if descriptor.failure and not isinstance(descriptor.failure, BrokenPipeError):
            _report(descriptor.failure)
            if not status:
                raise SystemExit(int(ExitCode.USAGE))


def _report(failure: OSError) -> None:
    lines = (
        f"CAP-X002: standard output cannot be written: {failure.strerror}",
        "fix: Free disk space, or redirect the output to another place.",
    )
    sys.stderr.write("\n".join(lines) + "\n")
