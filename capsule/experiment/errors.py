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


# The codes that are raised inside images, with the exit status of a command that fails with such a
# code. Their causes and fixes, and all other codes, are in capsule/host/errors.txt.
IMAGE_CODES: Mapping[str, ExitCode] = {
    "CAP-N001": ExitCode.INTERNAL,
    "CAP-S007": ExitCode.USAGE,
    "CAP-T101": ExitCode.TRAINING_FAILED,
    "CAP-T102": ExitCode.TRAINING_FAILED,
    "CAP-T103": ExitCode.INCONCLUSIVE,
    "CAP-T104": ExitCode.TRAINING_FAILED,
    "CAP-T105": ExitCode.INCONCLUSIVE,
    "CAP-T106": ExitCode.TRAINING_FAILED,
    "CAP-T107": ExitCode.TRAINING_FAILED,
    "CAP-T108": ExitCode.TRAINING_FAILED,
    "CAP-T109": ExitCode.INCONCLUSIVE,
    "CAP-T110": ExitCode.INCONCLUSIVE,
    "CAP-T111": ExitCode.TRAINING_FAILED,
    "CAP-T112": ExitCode.USAGE,
    "CAP-T113": ExitCode.INCONCLUSIVE,
    "CAP-T114": ExitCode.INCONCLUSIVE,
    "CAP-T115": ExitCode.INCONCLUSIVE,
    "CAP-T116": ExitCode.INCONCLUSIVE,
    "CAP-T121": ExitCode.TRAINING_FAILED,
    "CAP-T131": ExitCode.TRAINING_FAILED,
    "CAP-T132": ExitCode.TRAINING_FAILED,
    "CAP-T133": ExitCode.TRAINING_FAILED,
    "CAP-T134": ExitCode.USAGE,
    "CAP-T141": ExitCode.TAMPERED,
    "CAP-T151": ExitCode.TRAINING_FAILED,
    "CAP-T161": ExitCode.TRAINING_FAILED,
    "CAP-T201": ExitCode.TRAINING_FAILED,
    "CAP-T211": ExitCode.TRAINING_FAILED,
    "CAP-T212": ExitCode.TRAINING_FAILED,
    "CAP-T213": ExitCode.TRAINING_FAILED,
    "CAP-T214": ExitCode.TRAINING_FAILED,
    "CAP-T215": ExitCode.TRAINING_FAILED,
    "CAP-T216": ExitCode.TRAINING_FAILED,
    "CAP-T217": ExitCode.TRAINING_FAILED,
    "CAP-T221": ExitCode.TRAINING_FAILED,
    "CAP-T222": ExitCode.TRAINING_FAILED,
    "CAP-T223": ExitCode.TRAINING_FAILED,
    "CAP-T231": ExitCode.TRAINING_FAILED,
    "CAP-T232": ExitCode.TRAINING_FAILED,
    "CAP-T241": ExitCode.TRAINING_FAILED,
    "CAP-T242": ExitCode.TRAINING_FAILED,
    "CAP-T243": ExitCode.USAGE,
    "CAP-T244": ExitCode.USAGE,
    "CAP-T301": ExitCode.TRAINING_FAILED,
    "CAP-T302": ExitCode.TRAINING_FAILED,
    "CAP-T303": ExitCode.TRAINING_FAILED,
    "CAP-T304": ExitCode.TRAINING_FAILED,
    "CAP-T305": ExitCode.TRAINING_FAILED,
    "CAP-T321": ExitCode.TRAINING_FAILED,
    "CAP-T331": ExitCode.TRAINING_FAILED,
    "CAP-T332": ExitCode.TRAINING_FAILED,
    "CAP-T341": ExitCode.TAMPERED,
    "CAP-T342": ExitCode.TRAINING_FAILED,
    "CAP-T343": ExitCode.TRAINING_FAILED,
    "CAP-T344": ExitCode.USAGE,
    "CAP-T351": ExitCode.INCONCLUSIVE,
    "CAP-T352": ExitCode.NO_ENGINE,
    "CAP-T353": ExitCode.TRAINING_FAILED,
    "CAP-T354": ExitCode.TRAINING_FAILED,
    "CAP-T361": ExitCode.TRAINING_FAILED,
    "CAP-T362": ExitCode.TRAINING_FAILED,
    "CAP-T371": ExitCode.USAGE,
    "CAP-T381": ExitCode.DIFFERS,
    "CAP-T382": ExitCode.TRAINING_FAILED,
    "CAP-T383": ExitCode.TRAINING_FAILED,
    "CAP-T384": ExitCode.USAGE,
    "CAP-T385": ExitCode.TAMPERED,
    "CAP-V074": ExitCode.USAGE,
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
