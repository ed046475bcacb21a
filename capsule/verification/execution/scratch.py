"""The temporary run directory of a re-execution."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from capsule.host.errors import CapsuleError, ExitCode
from capsule.host.owner import temporary_folder

_OF_A_RUN = ("CAP-T", "CAP-R")  # codes of what a run leaves, a bundle's or another
_BLAMING = (ExitCode.TAMPERED, ExitCode.USAGE)  # the bundle, or the user


@contextmanager
def reexecution_folder(note: Callable[[str], None]) -> Iterator[Path]:
    """Give a place for the run directory of a re-execution; it is removed at the end.

    What a re-execution leaves may be malformed in ways that would convict a bundle, or be reported
    as a wrong use of Capsule. This is another program's doing, on this machine: it decides nothing.

    Args:
        note: Told if it cannot be removed.

    Raises:
        CapsuleError: CAP-V049 in the place of such an error.
    """
    # A task may open its folder to all on this machine, and leave a setuid program in it for them;
    # the folder around it is closed.
    try:
        with temporary_folder("capsule-verify-", note=note) as closed:
            yield closed / "run"
    except CapsuleError as error:
        if error.exit_code in _BLAMING and error.code.startswith(_OF_A_RUN):
            raise CapsuleError(
                "CAP-V049", f"of the re-execution: {error}", fix=error.fix
            ) from error
        raise
