"""What a verifier asks of ``capsule verify``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from capsule.bundle.trust import TrustPolicy
from capsule.engine.select import EngineChoice
from capsule.experiment.spec import SourcesSpec
from capsule.verification.expectation import Expectation
from capsule.verification.mode import Mode
from capsule.verification.verdict import RequiredGrade


@dataclass(frozen=True)
class VerifyRequest:
    """What ``capsule verify`` was asked.

    Attributes:
        bundle: The bundle, which is never changed.
        trust: Whose signatures count.
        mode: How far the verification goes.
        engine: Where the run is executed again.
        allow_untrusted: Accept that no key was given to check the signer with.
        image: Rebuild the image from the lock, or execute the signer's own.
        base: Build the base layer from the locked packages, or take the signer's own.
        code: Execute this Capsule's training code only, or the signer's own as well.
        limits: Limits that are lower than those of the bundle, by field of ``limits`` in a spec.
        required: Least grade that counts as reproduced.
        sources: Where missing packages may come from.
        expected: What the verifier knows of the experiment from elsewhere.
    """

    bundle: Path
    trust: TrustPolicy
    mode: Mode
    engine: EngineChoice = "auto"
    allow_untrusted: bool = False
    image: Literal["rebuilt", "embedded"] = "rebuilt"
    base: Literal["packages", "supplied"] = "packages"
    code: Literal["own", "supplied"] = "own"
    limits: Mapping[str, int] = field(default_factory=dict)
    required: RequiredGrade = "bitwise"
    sources: SourcesSpec = field(default_factory=SourcesSpec)
    expected: Expectation = field(default_factory=Expectation)
