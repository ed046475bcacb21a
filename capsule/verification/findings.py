"""The findings of each stage of a verification, and the report that is built from them.

A stage returns its finding, which is frozen. A stage that fails leaves those before it as they are,
so that the report of a failed verification has everything that was found until then. The report is
built once, field by field, so that the type checker sees what it says.
"""

from __future__ import annotations

from dataclasses import dataclass

from capsule.bundle.claims import ImageClaim, ProgramClaims, TrainingClaims
from capsule.bundle.trust import Signer
from capsule.entropy.ledger import Ledger, LedgerDifference
from capsule.host.errors import CapsuleError
from capsule.image.closure import Packages
from capsule.machine.compare import ExpectedGrade, FactComparison
from capsule.machine.fingerprint import Fingerprint
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
    RunSurroundings,
    TraceDifference,
)


@dataclass(frozen=True)
class IntegrityFinding:
    """A bundle that is unchanged since it was signed, and agrees with itself.

    Attributes:
        claim_id: Digest of its claims.
        manifest: Digest of its manifest.
        unchecked: Members that this verification does not look into.
        relaxations: Guarantees that the recorded run gave up.
        recorded_ledger: Sources of nondeterminism in the recorded run.
        claimed: What a program's run claims, in words; None for a trainer's.
        source_tree: Size and digest of the signer's source tree, in words; None without one.
        data: Its data sets by name, size and digest, in words.
        records: The inputs that a re-execution takes from the bundle, in words.
    """

    claim_id: str
    manifest: str
    unchecked: tuple[str, ...]
    relaxations: tuple[str, ...]
    recorded_ledger: Ledger
    claimed: str | None
    source_tree: str | None = None
    data: tuple[str, ...] = ()
    records: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrustFinding:
    """The signers of an unchanged bundle.

    Attributes:
        authentic: Whether the verifier trusts a key that signed it.
        signer: Fingerprint of the first key whose signature counts, or else of the key that the
            bundle names; None for a keyless signature.
        signers: Everyone who signed, and whether it counts.
    """

    authentic: bool
    signer: str | None
    signers: tuple[Signer, ...]


@dataclass(frozen=True)
class EnvironmentFinding:
    """The recorded machine and this one.

    Attributes:
        environment: The comparison.
        expected_grade: What a re-execution can be expected to give.
        expected: The same, with the reason.
        machine: The kind of this machine.
        here: The fingerprint of this machine.
    """

    environment: tuple[FactComparison, ...]
    expected_grade: ExpectedGrade
    expected: str
    machine: MachineKind
    here: Fingerprint


@dataclass(frozen=True)
class ImageFinding:
    """The image that is ready to be executed.

    Attributes:
        image_source: Where it is from; None if the engine uses no image.
        image_rebuilt: Whether the claimed identity was obtained by rebuilding the image from the
            lock.
        claim: Its identity.
        unclaimed: Whether the run is executed without the claimed image, which decides nothing
            about it: equal bits and others may both be due to this machine's own libraries.
    """

    image_source: ImageSource | None
    image_rebuilt: bool
    claim: ImageClaim | None
    unclaimed: bool = False


@dataclass(frozen=True)
class ExecutionFinding:
    """A finished re-execution.

    Attributes:
        span: When it took place.
        reexecuted_steps: Agent steps that were executed; None for a program.
        ledger: Its sources of nondeterminism.
        ledger_differences: Sources that the recorded run treated differently.
        relaxations: Guarantees that were given up by the recorded run or by this one.
        compilers: Packages that it imported and whose functions depend on the processor, if any.
        surroundings: What was read back of its surroundings; None unless they are varied.
        varied: Flags that were to have other values, and are not compared.
    """

    span: Span
    reexecuted_steps: int | None
    ledger: Ledger
    ledger_differences: tuple[LedgerDifference, ...]
    relaxations: tuple[str, ...]
    compilers: str | None = None
    surroundings: RunSurroundings | None = None
    varied: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ComparisonFinding:
    """The differences between the claims of the bundle and those of the re-execution.

    Attributes:
        differences: The facts that differ, causes before effects.
        outputs: The outputs of a program that differ, by content; None if none does.
        claims: What a whole re-execution claims; None for a prefix.
        fewer_attempts: Whether a program made fewer of the attempts in its arrival log, which is
            the only difference between the two logs.
    """

    differences: tuple[ComponentDifference, ...]
    outputs: OutputComparison | None = None
    claims: TrainingClaims | ProgramClaims | None = None
    fewer_attempts: bool = False


@dataclass(frozen=True)
class AnalysisFinding:
    """Where the two runs diverge.

    Attributes:
        first_difference: The first trace record that differs; None for a program, too.
        divergence: The analysis; None if the runs are equal.
        replica: What a whole run of a trainer gave, to be shown beside the recorded one.
        compared_steps: Step of the last trace record that both runs have; None for a program.
        statistics: Comparison of returns, where the bits of a whole run differ.
        rejoined: Step of the last trace record that differs, if states differ and later records
            are equal again.
    """

    first_difference: TraceDifference | None
    divergence: Divergence | None
    replica: ReplicaResults | None
    compared_steps: int | None
    statistics: ReturnStatistics | None
    rejoined: int | None = None


@dataclass
class VerificationFindings:
    """The findings so far, in the order of the stages. Each is assigned once, by :func:`verify`.

    Attributes:
        bundle: File name of the bundle.
        mode: How far the verification goes.
        required: Lowest grade accepted as reproduced.
        own_code: Whether the image's training code is this Capsule's own.
        fresh_seed: Answer of a challenge to a seed that was drawn for it.
        challenge: Segments of the recorded run that were executed again.
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

    def report(self, judgement: Judgement, error: CapsuleError | None, seconds: float) -> Report:
        """Build the report. What no stage found has the default of its field.

        Args:
            judgement: The verdict.
            error: What ended the verification early.
            seconds: How long it took.
        """
        integrity, trust, environment = self.integrity, self.trust, self.environment
        image, packages, executed = self.image, self.packages, self.execution
        compared, analysed = self.comparison, self.analysis
        return Report(
            bundle=self.bundle,
            mode=self.mode,
            verdict=judgement.verdict,
            summary=judgement.summary,
            # What is found later may still show that an unchanged bundle was forged.
            integrity=False if judgement.verdict == "tampered" else True if trust else None,
            claim_id=integrity.claim_id if integrity else None,
            manifest=integrity.manifest if integrity else None,
            unchecked=integrity.unchecked if integrity else (),
            recorded_ledger=integrity.recorded_ledger if integrity else None,
            claimed=integrity.claimed if integrity else None,
            source_tree=integrity.source_tree if integrity else None,
            data=(integrity.data or None) if integrity else None,
            records=(integrity.records or None) if integrity else None,
            authentic=trust.authentic if trust else None,
            signer=trust.signer if trust else None,
            signers=trust.signers if trust else (),
            environment=environment.environment if environment else (),
            expected=environment.expected if environment else None,
            expected_grade=environment.expected_grade if environment else None,
            machine=environment.machine if environment else None,
            required=self.required,
            own_code=self.own_code,
            image_rebuilt=image.image_rebuilt if image else None,
            image_source=image.image_source if image else None,
            besides=packages.besides if packages else None,
            startup=packages.startup if packages else None,
            relaxations=self._relaxations(),
            ledger=executed.ledger if executed else None,
            ledger_differences=executed.ledger_differences if executed else (),
            surroundings=executed.surroundings if executed else None,
            outputs=compared.outputs if compared else None,
            statistics=analysed.statistics if analysed else None,
            divergence=analysed.divergence if analysed else None,
            replica=analysed.replica if analysed else None,
            fresh_seed=self.fresh_seed,
            challenge=self.challenge,
            reexecuted_steps=self._reexecuted_steps(),
            first_difference=self._first_difference(),
            differences=self._differences(),
            seconds=round(seconds, 3),
            error={"code": error.code, "message": error.message, "fix": error.fix}
            if error
            else None,
        )

    def _relaxations(self) -> tuple[str, ...]:
        """Return the relaxations of the re-execution, or those recorded until it has ended."""
        latest = self.execution or self.integrity
        return latest.relaxations if latest else ()

    def _reexecuted_steps(self) -> int | None:
        # A challenge has neither an execution nor a comparison of its own: each segment has both.
        if self.challenge is not None:
            return sum(each.ends - each.begins for each in self.challenge.segments)
        return self.execution.reexecuted_steps if self.execution else None

    def _first_difference(self) -> TraceDifference | OutputDifference | None:
        if self.challenge is not None:
            unequal = self.challenge.first_unequal
            return unequal.first_difference if unequal else None
        # The analysis knows first differences in traces only, and a program has no trace.
        if self.comparison is not None and self.comparison.outputs is not None:
            return self.comparison.outputs.files[0]
        return self.analysis.first_difference if self.analysis else None

    def _differences(self) -> tuple[ComponentDifference, ...]:
        if self.challenge is not None:
            unequal = self.challenge.first_unequal
            return unequal.differences if unequal else ()
        return self.comparison.differences if self.comparison else ()
