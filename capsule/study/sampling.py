"""Verifying a study by a sample: members that the verifier chooses are run again.

The signer cannot know which members a verifier will choose. If m of n members were forged, k
members that are drawn without replacement miss all of them with probability C(n-m, k) / C(n, k).
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from math import comb

from capsule import execution
from capsule.bundle.claims import (
    ProgramClaims,
    TrainingClaims,
    collect_training_claims,
    read_document,
)
from capsule.bundle.run_bundle import image_claim
from capsule.engine.select import EngineChoice, open_engine
from capsule.experiment import contract
from capsule.experiment.lock import Lock
from capsule.experiment.mechanisms import Mechanisms
from capsule.experiment.spec import SourcesSpec, Spec
from capsule.host.errors import CapsuleError
from capsule.host.reporter import Reporter
from capsule.host.wording import counted
from capsule.image.cache import Cache
from capsule.machine.compare import expected_of_unknown
from capsule.machine.fingerprint import Fingerprint, take_fingerprint
from capsule.machine.requirements import check_requirements, gpu_warning
from capsule.study.results import MemberResult, StudyResults, files_needed
from capsule.verification.execution.admission import (
    check_code,
    check_unconfined,
)
from capsule.verification.execution.grading import (
    beyond_arithmetic,
    bitwise,
    inconsistent,
    judge_difference,
)
from capsule.verification.execution.reexecution import reexecution_folder
from capsule.verification.verdict import Grade

_ELSEWHERE = (
    "equal bits are only to be expected on a machine like the member's (its processor, GPU and C "
    "library), which only its own bundle describes"
)


@dataclass(frozen=True)
class VerifiedMember:
    """The result of verifying a member.

    Attributes:
        name: The member.
        agreement: The verdict on its bundle, or on what it claims.
        reason: The verdict in one sentence.
        fix: The remedy if an error ended the verification.
    """

    name: str
    agreement: Grade
    reason: str
    fix: str | None = None


def chosen_members(results: StudyResults, number: int) -> list[MemberResult]:
    """Draw members without replacement, by this machine's randomness, in the order of the study.

    Raises:
        CapsuleError: CAP-Y019, the study has fewer members, or the number is not positive.
    """
    if not 1 <= number <= len(results.members):
        raise CapsuleError(
            "CAP-Y019",
            f"--sample {number}: the study has {counted(len(results.members), 'member')}",
            fix=f"Give a number from 1 to {len(results.members)}.",
        )
    drawn = secrets.SystemRandom().sample(range(len(results.members)), number)
    return [results.members[place] for place in sorted(drawn)]


def chance_to_notice(members: int, forged: int, sampled: int) -> float:
    """Return the probability that a sample includes at least one forged member."""
    return 1 - comb(members - forged, sampled) / comb(members, sampled)


def rerun(
    result: MemberResult, lock: Lock, choice: EngineChoice, cache: Cache, reporter: Reporter
) -> VerifiedMember:
    """Run a member again from its lock, and compare what it claims.

    Raises:
        CapsuleError: It cannot be run here (CAP-V009, CAP-V014, CAP-M…, CAP-E…, CAP-I…).
    """
    name, claims = result.identity.name, result.claims
    # The lock comes from the signer. It is executed without a container only on request, and with
    # Capsule's own training code only: the bundle of a study contains no other.
    check_unconfined(choice, image=claims.image is not None)
    check_code(lock, "own")
    # The bundle of a study has claims, but no files of the runs that these would need.
    needed = files_needed(claims, lock, cache)
    if needed or isinstance(claims, ProgramClaims):
        return _inconclusive(result, f"it needs {needed}, which its own bundle has")
    engine = open_engine(choice, strange=True, progress=reporter.note)
    here = take_fingerprint(engine.describe())
    for unmet in check_requirements(lock, here):
        raise unmet
    if warning := gpu_warning(lock.spec, here):
        reporter.note(warning)
    reporter.note(f"running member {name} again")
    image = execution.prepare(lock, engine, cache, sources=SourcesSpec(), reporter=reporter)
    with reexecution_folder(reporter.note) as directory:
        execution.execute(lock, engine, directory, reporter=reporter)
        found = collect_training_claims(lock, image_claim(image), engine.name, directory)
        imported = read_document(directory / contract.MECHANISMS, Mechanisms).compilers
    return _compared(result, claims, found, lock.spec, here, imported)


def _inconclusive(result: MemberResult, reason: str) -> VerifiedMember:
    """Return that a member cannot be decided without its own bundle."""
    return VerifiedMember(
        result.identity.name,
        "inconclusive",
        f"{reason}: pass --members with a folder that has the bundle with SHA-256 "
        f"{result.identity.bundle}, or use 'capsule verify' on it",
    )


def _compared(
    result: MemberResult,
    claims: TrainingClaims,
    found: TrainingClaims,
    spec: Spec,
    here: Fingerprint,
    imported: str | None,
) -> VerifiedMember:
    name = result.identity.name
    # Not the claim ids, which also differ if only one of the machines has namespaces for the run.
    if (same := bitwise(claims, found, spec)) is not None:
        return VerifiedMember(name, *same)
    # Without the image, bits may differ because of the libraries of this machine.
    if claims.image is not None and found.image is None:
        return VerifiedMember(
            name, "inconclusive", "it was executed without the claimed image, so nothing is decided"
        )
    differs = _difference(claims, found)
    trace = None if claims.trace == found.trace else claims.trace
    unexplained = inconsistent(trace, None) or beyond_arithmetic(claims, found)
    judgement = judge_difference(differs, expected_of_unknown(here, spec, imported), unexplained)
    if judgement is None:
        return _inconclusive(result, f"{differs}; {_ELSEWHERE}")
    return VerifiedMember(name, judgement.verdict, judgement.summary)


def _difference(claims: TrainingClaims, found: TrainingClaims) -> str:
    """Name the claims in which two runs differ."""
    differing = [
        field
        for field in type(claims).model_fields
        if getattr(claims, field) != getattr(found, field)
    ]
    return f"these claims differ: {', '.join(differing)}{_where(claims, found)}"


def _where(claims: TrainingClaims, found: TrainingClaims) -> str:
    """Name the first checkpoint at which two runs differ."""
    for recorded, again in zip(claims.checkpoints, found.checkpoints, strict=False):
        if recorded != again:
            return f"; the first checkpoint that differs is that of step {recorded.step}"
    return "; all checkpoints are equal"
