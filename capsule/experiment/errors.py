"""The one error type that people see: a code, a cause and a fix."""

from __future__ import annotations

from enum import IntEnum


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


class CapsuleError(Exception):
    """A foreseen failure.

    Attributes:
        code: Stable identifier such as ``CAP-S002``; catalogued in ``docs/errors.md``. The letter
            names the room: S spec, L lock, I image, E engine, T training, B bundle, V verification,
            M machine, N native parts, R random profiles (entropy), D diagnosis.
        message: One sentence: what is wrong, with the field and the value.
        fix: What to do about it.
        exit_code: Status the command ends with.
    """

    def __init__(self, code: str, message: str, *, fix: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.fix = fix
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.code} {self.message}"
