"""A bundle that was opened, and how its contradictions are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from capsule.bundle.bundle import OpenedBundle
from capsule.bundle.claims import ProgramClaims, TrainingClaims
from capsule.experiment.lock import Lock
from capsule.host.errors import CapsuleError

_SHOWN_CHARACTERS = 100


@dataclass(frozen=True)
class Contents:
    """A bundle that was opened, with its two central documents."""

    bundle: OpenedBundle
    lock: Lock
    claims: TrainingClaims | ProgramClaims


def equal(name: str, what: str, claimed: Any, found: Any) -> None:
    """Refuse a bundle in which two statements differ that must be equal.

    Raises:
        CapsuleError: CAP-V010.
    """
    if claimed != found:
        raise inconsistent(
            "CAP-V010",
            f"the bundle contradicts itself: {what} in {name} is not what claims.json says "
            f"(claimed {_shown(claimed)}, found {_shown(found)})",
        )


def inconsistent(code: str, message: str) -> CapsuleError:
    """Return the error of a bundle that does not agree with itself."""
    return CapsuleError(
        code, message, fix="Do not trust this bundle; ask its signer for a consistent one."
    )


def _shown(value: Any) -> str:
    """Return the beginning of a stranger's text in ASCII, without control characters."""
    return ascii(str(value)[:_SHOWN_CHARACTERS])[1:-1]
