"""What a verifier can do about a re-execution that failed.

The errors of an execution address the author of a run, who can change its spec, resume it and read
its files. A verifier can do none of this: the lock is given, and the run directory is temporary.
"""

from __future__ import annotations

from collections.abc import Mapping

from capsule.host.errors import CapsuleError
from capsule.outcome import EndedError

_MEMORY = (
    "Free memory, or use a machine with more of it; remove --limit memory_mb if you gave it. Then "
    "verify again."
)
_TIME = (
    "Use a machine that is faster or less busy; remove --limit minutes if you gave it. To execute "
    "less of a trainer's run, pass --mode prefix:N, or --challenge N if the run kept its states."
)
_DISK = (
    "Free disk space, or set TMPDIR to a folder on a disk with more of it; remove --limit disk_mb "
    "if you gave it. Then verify again."
)
_AGAIN = (
    "Verify again. If the re-execution fails in the same way, send the report to the signer: the "
    "files of the re-execution are not kept."
)
_PROGRAM = (
    "The end of the program's output is in the message. If it names something that this machine "
    "lacks, verify where it is available; otherwise send the report to the signer."
)
_BY_REASON: Mapping[str, str] = {"out-of-memory": _MEMORY, "timed-out": _TIME, "disk-full": _DISK}
_BY_CODE: Mapping[str, str] = {
    **dict.fromkeys(("CAP-T331", "CAP-T361", "CAP-T362"), _MEMORY),
    **dict.fromkeys(
        ("CAP-R103", "CAP-R112", "CAP-R203", "CAP-T131", "CAP-T161", "CAP-T221"), _DISK
    ),
    **dict.fromkeys(
        ("CAP-B090", "CAP-E010", "CAP-E011", "CAP-R113", "CAP-R201", "CAP-R202", "CAP-T303"),
        _AGAIN,
    ),
    **dict.fromkeys(("CAP-T302", "CAP-T304"), _PROGRAM),
    "CAP-E006": "Find out from the engine's log, or with 'capsule doctor', whether it is running "
    "and whether its disk has room. Then verify again.",
    "CAP-R114": _TIME,
    "CAP-T116": "End the other programs on this GPU, or choose another one with --gpu. Then verify "
    "again.",
}


def for_a_verifier(error: CapsuleError) -> CapsuleError:
    """Return the error of a re-execution with the remedy that a verifier has, if it is known."""
    reason = error.reason if isinstance(error, EndedError) else ""
    fix = _BY_REASON.get(reason) or _BY_CODE.get(error.code)
    return error if fix is None else CapsuleError(error.code, error.message, fix=fix)
