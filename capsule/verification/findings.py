"""What each stage of a verification finds, and the report that is built from the findings.

A stage returns its finding, which is frozen. A stage that fails leaves those before it as they are,
so that the report of a failed verification has everything that was found until then.
"""

from __future__ import annotations

from dataclasses import dataclass

from capsule.bundle.trust import Signer
from capsule.entropy.ledger import Ledger, LedgerDifference
from capsule.host.errors import CapsuleError
from capsule.image.closure import Packages
from capsule.machine.compare import ExpectedGrade, FactComparison
from capsule.machine.kind import MachineKind
from capsule.verification.content.times import Span
from capsule.verification.equivalence.returns import ReturnStatistics
from capsule.verification.verdict import (
    Challenge,
    ComponentDifference,
    Divergence,
    FreshSeed,
    ImageSource,
    Judgement,
    OutputComparison,
    OutputDifference,
    ReplicaResults,
    Report,
    RequiredGrade,
    TraceDifference,
)


@dataclass(frozen=True)
class IntegrityFinding:
    """Of a bundle that is unchanged since it was signed, and agrees with itself.

    Attributes:
        claim_id: Digest of its claims.
        manifest: Digest of its manifest.
        unchecked: Members that this verification does not look into.
        relaxations: Guarantees that the recorded run gave up.
        ledger: Sources of nondeterminism in the recorded run.
        claimed: What a program's run claims, in words; None for a trainer's.
    """

    claim_id: str
    manifest: str
    unchecked: tuple[str, ...]
    relaxations: tuple[str, ...]
    ledger: Ledger
    claimed: str | None


@dataclass(frozen=True)
class TrustFinding:
    """Who signed an unchanged bundle.

    Attributes:
        authentic: Whether the verifier trusts a key that signed it.
        signer: Fingerprint of the signing key; None for a keyless signature.
        signers: Everyone who signed, and whether it counts.
    """

    authentic: bool
    signer: str | None
    signers: tuple[Signer, ...]


@dataclass(frozen=True)
class EnvironmentFinding:
    """The recorded machine and this one.

    Attributes:
        rows: The comparison.
        grade: What a re-execution can be expected to give.
        reason: Why.
        machine: The kind of this machine.
    """

    rows: tuple[FactComparison, ...]
    grade: ExpectedGrade
    reason: str
    machine: MachineKind

    @property
    def expected(self) -> str:
        """The expected grade with its reason."""
        return f"{self.grade}: {self.reason}"


@dataclass(frozen=True)
class ImageFinding:
    """The image that is ready to be executed.

    Attributes:
        source: Where it is from; None if the engine uses no image.
        rebuilt: Whether the claimed identity was obtained by rebuilding the image from the lock.
    """

    source: ImageSource | None
    rebuilt: bool


@dataclass(frozen=True)
class ExecutionFinding:
    """A finished re-execution.

    Attributes:
        span: When it took place.
        steps: Agent steps that were executed; None for a program.
        ledger: Its sources of nondeterminism.
        ledger_differences: Sources that the recorded run treated differently.
        relaxations: Guarantees that were given up by the recorded run or by this one.
    """

    span: Span
    steps: int | None
    ledger: Ledger
    ledger_differences: tuple[LedgerDifference, ...]
    relaxations: tuple[str, ...]


@dataclass(frozen=True)
class ComparisonFinding:
    """What differs between the claims of the bundle and those of the re-execution.

    Attributes:
        differences: The facts that differ, causes before effects.
        outputs: The outputs of a program that differ, by content; None if none does.
    """

    differences: tuple[ComponentDifference, ...]
    outputs: OutputComparison | None = None


@dataclass(frozen=True)
class AnalysisFinding:
    """Where the two runs diverge.

    Attributes:
        first_difference: The first trace record that differs; None for a program, too.
        divergence: The analysis; None if the runs are equal.
        replica: What a whole run of a trainer gave, to be shown beside the recorded one.
        compared_steps: Step of the last trace record that both runs have; None for a program.
    """

    first_difference: TraceDifference | None
    divergence: Divergence | None
    replica: ReplicaResults | None
    compared_steps: int | None


@dataclass
class VerificationFindings:
    """The findings so far, in the order of the stages. Each is assigned once, by :func:`verify`.

    Attributes:
        bundle: File name of the bundle.
        mode: How far the verification goes.
        required: Least grade that counts as reproduced.
        own_code: Whether the image's training code is this Capsule's own.
        fresh_seed: Answer of a challenge to a seed that was drawn for it.
        challenge: Segments of the recorded run that were executed again.
        statistics: Comparison of returns, where the bits of a whole run differ.
    """

    bundle: str
    mode: str
    required: RequiredGrade
    integrity: IntegrityFinding | None = None
    trust: TrustFinding | None = None
    environment: EnvironmentFinding | None = None
    own_code: bool | None = None
    image: ImageFinding | None = None
    packages: Packages | None = None
    fresh_seed: FreshSeed | None = None
    challenge: Challenge | None = None
    execution: ExecutionFinding | None = None
    comparison: ComparisonFinding | None = None
    analysis: AnalysisFinding | None = None
    statistics: ReturnStatistics | None = None

    def report(self, judgement: Judgement, error: CapsuleError | None, seconds: float) -> Report:
        """Build the report.

        Args:
            judgement: The verdict.
            error: What ended the verification early.
            seconds: How long it took.
        """
        integrity, trust, environment = self.integrity, self.trust, self.environment
        image, packages, execution = self.image, self.packages, self.execution
        latest = execution or integrity
        return Report(
            bundle=self.bundle,
            mode=self.mode,
            verdict=judgement.verdict,
            summary=judgement.summary,
            claim_id=integrity.claim_id if integrity else None,
            signer=trust.signer if trust else None,
            signers=trust.signers if trust else (),
            # What is found later may still show that an unchanged bundle was forged.
            integrity=False if judgement.verdict == "tampered" else True if trust else None,
            authentic=trust.authentic if trust else None,
            required=self.required,
            expected=environment.expected if environment else None,
            expected_grade=environment.grade if environment else None,
            machine=environment.machine if environment else None,
            manifest=integrity.manifest if integrity else None,
            environment=environment.rows if environment else (),
            image_rebuilt=image.rebuilt if image else None,
            image_source=image.source if image else None,
            besides=packages.besides if packages else None,
            startup=packages.startup if packages else None,
            own_code=self.own_code,
            claimed=integrity.claimed if integrity else None,
            first_difference=self._first_difference(),
            outputs=self.comparison.outputs if self.comparison else None,
            differences=self._differences(),
            statistics=self.statistics,
            divergence=self.analysis.divergence if self.analysis else None,
            replica=self.analysis.replica if self.analysis else None,
            challenge=self.challenge,
            fresh_seed=self.fresh_seed,
            unchecked=integrity.unchecked if integrity else (),
            relaxations=latest.relaxations if latest else (),
            recorded_ledger=integrity.ledger if integrity else None,
            ledger=execution.ledger if execution else None,
            ledger_differences=execution.ledger_differences if execution else (),
            reexecuted_steps=self._reexecuted_steps(),
            seconds=round(seconds, 3),
            error={"code": error.code, "message": error.message, "fix": error.fix}
            if error
            else None,
        )

    def _first_difference(self) -> TraceDifference | OutputDifference | None:
        """Return the first record or output that differs, of the run or of a segment."""
        if self.comparison is not None and self.comparison.outputs is not None:
            return self.comparison.outputs.files[0]
        if self.analysis is not None:
            return self.analysis.first_difference
        segment = self.challenge and self.challenge.first_unequal
        return segment.first_difference if segment else None

    def _differences(self) -> tuple[ComponentDifference, ...]:
        """Return the claims that differ, of the run or of a segment."""
        if self.comparison is not None:
            return self.comparison.differences
        segment = self.challenge and self.challenge.first_unequal
        return segment.differences if segment else ()

    def _reexecuted_steps(self) -> int | None:
        if self.challenge is not None:
            return sum(segment.ends - segment.begins for segment in self.challenge.segments)
        return self.execution.steps if self.execution else None
