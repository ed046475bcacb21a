"""Which experiment a reader expects: a valid bundle of another one must not pass for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capsule.bundle.claims import Claims
from capsule.experiment.lock import Lock, without_sources
from capsule.experiment.spec import Spec
from capsule.host.errors import CapsuleError
from capsule.image.lockfile import read_lock

OTHER_SPEC, OTHER_CLAIM, OTHER_LOCK = "CAP-V041", "CAP-V042", "CAP-V057"
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class Expectation:
    """What the reader knows from elsewhere, such as a paper.

    Attributes:
        spec: The experiment, as its authors published it.
        claim: The claim id.
        lock: Digest of the lock, which pins every package and, unlike a spec, the source tree.
    """

    spec: Spec | None = None
    claim: str | None = None
    lock: str | None = None

    def check(self, lock: Lock, claims: Claims) -> None:
        """Refuse the bundle of another experiment, or of other results.

        Raises:
            CapsuleError: CAP-V041 another spec, CAP-V042 another claim id, CAP-V057 another lock.
        """
        if self.claim is not None and (found := claims.claim_id()) != self.claim:
            raise _unexpected(OTHER_CLAIM, f"its claim id is {found}, not {self.claim}")
        if self.lock is not None and (digest := lock.digest()) != self.lock:
            raise _unexpected(OTHER_LOCK, f"its lock is {digest}, not {self.lock}")
        if self.spec is not None and (wanted := without_sources(self.spec)) != lock.spec:
            left, right = (spec.model_dump(mode="json") for spec in (wanted, lock.spec))
            raise _unexpected(OTHER_SPEC, f"in its spec, {next(_differences(left, right, ()))}")


def parse_claim(text: str) -> str:
    """Return a claim id as it was given.

    Raises:
        CapsuleError: CAP-V043, it is not one.
    """
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise CapsuleError(
            "CAP-V043",
            f"--expect-claim {text!r} is not a claim id",
            fix="Give all 64 hexadecimal digits: fewer could be forged.",
        )
    return text


def parse_lock(text: str) -> str:
    """Return the digest of a lock that was given as a file or as its digest.

    Raises:
        CapsuleError: CAP-V058 it is neither; CAP-L001, CAP-L002 the file is not a lock.
    """
    if re.fullmatch(r"[0-9a-f]{64}", text):
        return text
    if not Path(text).is_file():
        raise CapsuleError(
            "CAP-V058",
            f"--expect-lock {text!r} is neither a file nor the digest of a lock",
            fix="Name a lock file, or give all 64 hexadecimal digits that 'capsule lock' prints.",
        )
    return read_lock(Path(text)).digest()


def _differences(wanted: Any, found: Any, path: tuple[str, ...]) -> Iterator[str]:
    if isinstance(wanted, dict) and isinstance(found, dict):
        for name in sorted({*wanted, *found}):
            yield from _differences(wanted.get(name), found.get(name), (*path, name))
    elif wanted != found:
        shown = [str(value)[:_SHOWN_CHARACTERS] for value in (found, wanted)]
        yield f"{'.'.join(path)} is {shown[0]}, not {shown[1]}"


def _unexpected(code: str, what: str) -> CapsuleError:
    return CapsuleError(
        code,
        f"the bundle is intact, but not the one you expect: {what}",
        fix="Ask for the bundle of the experiment that you mean.",
    )
