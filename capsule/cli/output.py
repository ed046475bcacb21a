"""Standard streams that are closed or cannot be written, without a change of the exit status.

``capsule verify … | head -1`` closes the pipe before the verdict is printed. The exception that
Python then raises, while printing or when the interpreter shuts down, must not replace the exit
status that tells the verdict. And a run that takes days must not end because nothing reads its
progress any more.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO

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
    if before is None:  # the descriptor was closed before this program started
        with _nowhere("w") as nowhere, redirect_stdout(nowhere):
            yield
        return
    if _is_windows_console(before):
        yield
        return
    before.flush()
    descriptor = _Descriptor(before.fileno(), "wb", closefd=False)
    sys.stdout = _text_stream(descriptor, before, line_buffering=before.isatty())
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


@contextmanager
def lossy_standard_error() -> Iterator[None]:
    """Replace ``sys.stderr`` within a block by a stream that never raises.

    No failure is reported: there is no other stream for messages.
    """
    before = sys.stderr
    if before is None:  # as in lossy_standard_output()
        with _nowhere("w") as nowhere, redirect_stderr(nowhere):
            yield
    elif _is_windows_console(before):
        yield
    else:
        descriptor = _Descriptor(before.fileno(), "wb", closefd=False)
        stream = _text_stream(descriptor, before, line_buffering=True)
        with redirect_stderr(stream):
            try:
                yield
            finally:
                stream.flush()


@contextmanager
def standard_input() -> Iterator[None]:
    """Make ``sys.stdin`` an empty stream within a block if its descriptor was closed."""
    if sys.stdin is not None:
        yield
        return
    with _nowhere("r") as nowhere:
        sys.stdin = nowhere
        try:
            yield
        finally:
            sys.stdin = None


def _nowhere(mode: Literal["r", "w"]) -> TextIO:
    return Path(os.devnull).open(mode)


def _is_windows_console(stream: TextIO) -> bool:
    """Tell whether a stream is a console of Windows.

    Nothing can close such a console early, and Python writes text to it by functions of Windows.
    """
    return sys.platform == "win32" and stream.isatty()


def _text_stream(
    descriptor: _Descriptor, before: TextIO, *, line_buffering: bool
) -> io.TextIOWrapper:
    """Return a stream that writes text into a descriptor as an earlier stream did."""
    return io.TextIOWrapper(
        io.BufferedWriter(descriptor),
        encoding=before.encoding,
        # The code page of Windows has few letters. It is no reason to stop if one is missing.
        errors="replace" if before.errors == "strict" else before.errors,
        line_buffering=line_buffering,
    )


def _report(failure: OSError) -> None:
    lines = (
        f"CAP-X002: standard output cannot be written: {failure.strerror}",
        "fix: Free disk space, or redirect the output to another place.",
    )
    sys.stderr.write("\n".join(lines) + "\n")
