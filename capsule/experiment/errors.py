"""The one type of error that users see: a code, a cause and a fix."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from functools import partial
from typing import Any


class ExitCode(IntEnum):
    """Exit statuses of every command (documented in ``docs/exit-codes.md``)."""

    OK = 0
    DIFFERS = 1
    USAGE = 2
    TAMPERED = 3
    INCONCLUSIVE = 4
    BUILD_FAILED = 5
    TRAINING_FAILED = 6
    INTERNAL = 70
    NO_ENGINE = 125
    INTERRUPTED = 130


# The codes that are raised inside images, by the exit status of a command that fails with such a
# code. Their causes and fixes, and all other codes, are in capsule/host/errors.txt.
_BY_STATUS = {
    ExitCode.DIFFERS: "CAP-T381",
    ExitCode.USAGE: (
        "CAP-S007 CAP-T112 CAP-T134 CAP-T243 CAP-T244 CAP-T344 CAP-T371 CAP-T384 CAP-V074"
    ),
    ExitCode.TAMPERED: "CAP-T141 CAP-T341 CAP-T385",
    ExitCode.INCONCLUSIVE: (
        "CAP-T103 CAP-T105 CAP-T109 CAP-T110 CAP-T113 CAP-T114 CAP-T115 CAP-T116 CAP-T351"
    ),
    ExitCode.TRAINING_FAILED: (
        "CAP-T101 CAP-T102 CAP-T104 CAP-T106 CAP-T107 CAP-T108 CAP-T111 CAP-T121 CAP-T131 "
        "CAP-T132 CAP-T133 CAP-T151 CAP-T161 CAP-T201 CAP-T211 CAP-T212 CAP-T213 CAP-T214 "
        "CAP-T215 CAP-T216 CAP-T217 CAP-T221 CAP-T222 CAP-T223 CAP-T231 CAP-T232 CAP-T241 "
        "CAP-T242 CAP-T301 CAP-T302 CAP-T303 CAP-T304 CAP-T305 CAP-T321 CAP-T331 CAP-T332 "
        "CAP-T342 CAP-T343 CAP-T353 CAP-T354 CAP-T361 CAP-T362 CAP-T382 CAP-T383"
    ),
    ExitCode.INTERNAL: "CAP-N001",
    ExitCode.NO_ENGINE: "CAP-T352",
}
IMAGE_CODES: Mapping[str, ExitCode] = {
    code: status for status, codes in _BY_STATUS.items() for code in codes.split()
}
# The host adds its codes (capsule.host.errors), which images do not contain.
_exit_codes = dict(IMAGE_CODES)


def register(codes: Mapping[str, ExitCode]) -> None:
    """Register further codes, each with its exit status.

    Raises:
        ValueError: A code is registered already.
    """
    if known := codes.keys() & _exit_codes.keys():
        raise ValueError(f"registered twice: {', '.join(sorted(known))}")
    _exit_codes.update(codes)


class CapsuleError(Exception):
    """A foreseen failure.

    Attributes:
        code: Stable identifier such as ``CAP-S002``, listed in ``docs/errors.md``. The letter names
            the subject: S spec, L lock, I image, E engine, T training, B bundle, V verification,
            M machine, N native parts, R random profiles, D diagnosis, P reports, Y studies, X bugs.
        message: One sentence that names the cause, with the field and the value.
        fix: The remedy.
        exit_code: Exit status of a command that fails with this code.

    Raises:
        KeyError: The code is not known.
    """

    def __init__(self, code: str, message: str, *, fix: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.fix = fix
        self.exit_code = _exit_codes[code]

    def __str__(self) -> str:
        return f"{self.code} {self.message}"

    def __reduce__(self) -> tuple[Any, ...]:
        # The default implementation would not pass on the keyword argument.
        return partial(CapsuleError, fix=self.fix), (self.code, self.message)

    def within(self, who: str) -> CapsuleError:
        """Return the same error with the name of the part of the run in which it was raised."""
        return CapsuleError(self.code, f"{who}: {self.message}", fix=self.fix)
