"""The error type with the codes of the host side, whose modules import it from here.

An import of this module makes the codes known. Their entries do not stand beside the type because
that goes into images: an edit here changes no lock.
"""

from __future__ import annotations

import errno

from capsule.experiment.errors import IMAGE_CODES, CapsuleError, ExitCode, register
from capsule.host.catalogue import (
    bundle,
    engine,
    entropy,
    image,
    others,
    spec,
    verification,
)
from capsule.host.catalogue.entry import ErrorEntry

__all__ = ["ENTRIES", "IMAGE_CODES", "CapsuleError", "ExitCode", "refusal_of"]

_ROOMS = (spec, image, engine, bundle, entropy, verification, others)
ENTRIES: dict[str, ErrorEntry] = {
    code: entry for room in _ROOMS for code, entry in room.ENTRIES.items()
}
register({code: entry.exit_code for code, entry in ENTRIES.items()})


# What the operating system refuses because of the machine's state or its owner's settings.
_REFUSALS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ENOTDIR, errno.ENAMETOOLONG),
    }
)
_NO_TEMPORARY_FOLDER = "No usable temporary directory found"  # of Python's tempfile


def refusal_of(error: OSError) -> CapsuleError | None:
    """Return the coded error of a full disk, a missing permission and the like; None of others."""
    reason = error.strerror or ""
    if error.errno not in _REFUSALS and not reason.startswith(_NO_TEMPORARY_FOLDER):
        return None
    where = f" at {error.filename!a}" if isinstance(error.filename, str) else ""
    return CapsuleError(
        "CAP-X003",
        f"the operating system refused{where}: {reason}",
        fix="Free disk space, or set TMPDIR and CAPSULE_CACHE to folders that you may write to.",
    )
