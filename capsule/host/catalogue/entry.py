"""What the catalogue says of an error code."""

from __future__ import annotations

from typing import NamedTuple

from capsule.experiment.errors import ExitCode


class ErrorTexts(NamedTuple):
    """The cause of an error and what to do about it, in Markdown."""

    cause: str
    fix: str


class ErrorEntry(NamedTuple):
    """The exit status of a command that fails with a code, and the texts of :class:`ErrorTexts`."""

    exit_code: ExitCode
    cause: str
    fix: str
