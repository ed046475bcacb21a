"""``capsule verify``: integrity, trust, environment, image, execution, comparison, verdict."""

from __future__ import annotations

import time
from collections.abc import Iterator

from capsule import execution
from capsule.bundle import run_bundle
from capsule.bundle.bundle import OpenedBundle, open_bundle
from capsule.bundle.claims import (
    Observations,
    ProgramClaims,
    TrainingClaims,
    claims_model,
    collect_program_claims,
    collect_training_claims,
)
from capsule.bundle.trust import UNTRUSTED, UntrustedError
from capsule.engine.interface import Engine
from capsule.engine.select import open_engine
from capsule.entropy.ledger import Ledger
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.lock import Lock
from capsule.experiment.spec import Spec
from capsule.host.errors import CapsuleError, ExitCode, refusal_of
from capsule.image.cache import Cache
from capsule.image.closure import check_packages
from capsule.machine.compare import check_requirements, compare, expected_grade
from capsule.machine.fingerprint import Fingerprint, take_fingerprint
from capsule.machine.kind import machine_kind
from capsule.verification.analysis.comparison import compare_checkpoints, compare_claims
from capsule.verification.analysis.divergence import analyse
from capsule.verification.analysis.outputs import compare_outputs, recorded_outputs
from capsule.verification.analysis.runs import read_checkpoint_index
from capsule.verification.content.times import Times, stated_span
from capsule.verification.equivalence.returns import compare_returns
from capsule.verification.execution.admission import (
    check_code,
    check_embedded,
    check_gpu_host,
    check_unconfined,
    other_code,
)
from capsule.verification.execution.challenge import (
    RecordedRun,
    challenge,
    check_challengeable,
    fresh_seed,
    judge_challenge,
)
from capsule.verification.execution.claimed_image import (
    identify_image,
    prepare_image,
    require_claimed_image,
)
from capsule.verification.execution.grading import (
    beyond_arithmetic,
    grade_replica,
    inconsistent,
    judge_program,
    judge_training,
)
from capsule.verification.execution.limits import lowered
from capsule.verification.execution.reexecution import ReexecutionPlan, reexecute
from capsule.verification.execution.scratch import reexecution_folder
from capsule.verification.expectation import OTHER_CLAIM, OTHER_LOCK, OTHER_SPEC
from capsule.verification.findings import (
    ComparisonFinding,
    EnvironmentFinding,
    IntegrityFinding,
    TrustFinding,
    VerificationFindings,
)
from capsule.verification.integrity.consistency import check_consistency
from capsule.verification.integrity.contents import Contents
from capsule.verification.mode import check_prefix
from capsule.verification.request import VerifyRequest
from capsule.verification.verdict import Grade, ImageSource, Judgement, Report

INTACT = "the bundle is unchanged since it was signed, and agrees with itself"
SIGNERS: dict[ImageSource | None, str] = {
    "embedded": "; the image was the signer's own and was not rebuilt from the lock",
    "supplied-base": "; the base layer was the signer's own and was not built from the packages",
}
WITHOUT_IMAGE = "executed without the claimed image, which decides nothing about the run: "
NO_KEY = "CAP-V002"


def verify(request: VerifyRequest, cache: Cache, reporter: execution.Reporter) -> Report:
    """Check a bundle as far as ``request.mode`` says. The bundle itself is never touched.

    Every foreseen failure becomes a verdict with its coded error, so that the caller always gets a
    report: *tampered* or *untrusted* for what the bundle did wrong, *inconclusive* for what this
    machine cannot decide.

    Raises:
        CapsuleError: The request itself is at fault (exit status 2); CAP-V007, it was interrupted.
    """
    started = time.monotonic()
    found = VerificationFindings(request.bundle.name, str(request.mode), request.required)
    failure: CapsuleError | None = None
    try:
        judgement = _verify_here(request, cache, reporter, found)
    except CapsuleError as error:
        if error.exit_code == ExitCode.INTERRUPTED:
            raise CapsuleError(
                "CAP-V007",
                "the verification was interrupted; nothing was decided",
                fix="Start it again, perhaps with --mode prefix:N.",
            ) from error
        if error.exit_code == ExitCode.USAGE:
            raise
        if isinstance(error, UntrustedError):
            found.trust = TrustFinding(
                authentic=False, signer=error.signers[0].key, signers=error.signers
            )
        failure, judgement = error, Judgement(_verdict_of(error), error.message)
    return found.report(judgement, failure, time.monotonic() - started)


def _verdict_of(error: CapsuleError) -> Grade:
    """A failed check of the bundle is its fault; most failed executions decide nothing."""
    if error.exit_code == ExitCode.DIFFERS:  # a replay that asks for other randomness
        return "not-reproduced"
    if error.exit_code != ExitCode.TAMPERED:
        return "inconclusive"
    unwanted = (NO_KEY, OTHER_SPEC, OTHER_LOCK, OTHER_CLAIM, *UNTRUSTED)
    return "untrusted" if error.code in unwanted else "tampered"


def _verify_here(
    request: VerifyRequest,
    cache: Cache,
    reporter: execution.Reporter,
    found: VerificationFindings,
) -> Judgement:
    """Do what was asked; what this machine refuses decides nothing about the bundle.

    Raises:
        CapsuleError: Also CAP-X003, the operating system refused something.
    """
    try:
        return _verify(request, cache, reporter, found)
    except OSError as error:
        refusal = refusal_of(error)
        if refusal is None:
            raise
        raise refusal from error


def _verify(
    request: VerifyRequest,
    cache: Cache,
    reporter: execution.Reporter,
    found: VerificationFindings,
) -> Judgement:
    """Go through the stages that execute nothing, and on to the others if the mode asks for it."""
    reporter.note(f"checking {request.bundle.name}")
    with open_bundle(request.bundle, request.trust) as bundle:
        lock = bundle.read(run_bundle.LOCK, Lock)
        claims = bundle.read(run_bundle.CLAIMS, claims_model(lock))
        observations = bundle.read(run_bundle.OBSERVATIONS, Observations)
        contents = Contents(bundle, lock, claims)
        found.integrity = integrity = _check_integrity(request, contents)

        found.trust = TrustFinding(bundle.authentic, bundle.fingerprint, bundle.signers)
        _require_trust(request, bundle)
        request.expected.check(lock, claims)
        if request.mode.name == "integrity":
            nothing = isinstance(claims, ProgramClaims) and claims.nothing
            return Judgement("intact", INTACT + (", but it claims nothing" if nothing else ""))

        check_unconfined(request.engine, image=claims.image is not None)
        engine = open_engine(request.engine, strange=True, progress=reporter.note)
        check_embedded(request.image, engine)
        here = take_fingerprint(engine.describe())
        found.environment = environment = _compare_machines(lock.spec, observations, here)
        if unmet := check_requirements(lock.spec, here):
            raise unmet[0]
        reporter.note(f"expected before running: {environment.expected}")
        if request.mode.name == "environment":
            able = "this machine can re-execute the run"
            expected = f"{environment.grade} reproduction is expected"
            return Judgement("environment-matches", f"{able}; {expected}")

        plan = _prepare(request, contents, engine, cache, reporter, found)
        if request.mode.challenges and isinstance(claims, TrainingClaims):
            judgement = _challenge(plan, RecordedRun(bundle, lock, claims), found)
        else:
            judgement = _reexecute(plan, integrity, environment, found)
        return _qualified(judgement, plan, found)


def _check_integrity(request: VerifyRequest, contents: Contents) -> IntegrityFinding:
    """Check that an unchanged bundle agrees with itself, and note what it says."""
    bundle, claims = contents.bundle, contents.claims
    unchecked = check_consistency(contents)
    return IntegrityFinding(
        claim_id=claims.claim_id(),
        manifest=sha256_hex(bundle.manifest.document()),
        unchecked=(*unchecked, *_left(request, bundle)),
        relaxations=claims.relaxations,
        ledger=bundle.read(run_bundle.LEDGER, Ledger),
        claimed=claims.described if isinstance(claims, ProgramClaims) else None,
    )


def _left(request: VerifyRequest, bundle: OpenedBundle) -> Iterator[str]:
    """Yield the members that only other requests check."""
    if run_bundle.IMAGE_ARCHIVE in bundle.files and request.image != "embedded":
        yield run_bundle.IMAGE_ARCHIVE
    if request.mode.name != "segments":
        yield from (path for path in bundle.files if path.startswith(run_bundle.STATES))


def _require_trust(request: VerifyRequest, bundle: OpenedBundle) -> None:
    if bundle.authentic or request.allow_untrusted:
        return
    raise CapsuleError(
        NO_KEY,
        f"the bundle is intact and names {bundle.fingerprint} as its signer, but no key was given "
        "to check that with",
        fix="Get the signer's public key from a source you trust and pass --key; or pass "
        "--allow-untrusted to check everything but who signed it.",
    )


def _compare_machines(
    spec: Spec, observations: Observations, here: Fingerprint
) -> EnvironmentFinding:
    rows = compare(observations.fingerprint, here, spec)
    grade, reason = expected_grade(rows)
    return EnvironmentFinding(rows, grade, reason, machine_kind(here, spec))


def _prepare(
    request: VerifyRequest,
    contents: Contents,
    engine: Engine,
    cache: Cache,
    reporter: execution.Reporter,
    found: VerificationFindings,
) -> ReexecutionPlan:
    """Make ready what is going to run, if the verifier accepts it: the claimed image."""
    lock, mode = contents.lock, request.mode
    found.own_code = check_code(lock, request.code)
    check_prefix(mode, lock)
    if mode.challenges:
        check_challengeable(lock, segments=mode.name == "segments", number=mode.segments)
    check_gpu_host(lock, engine, strange=request.image == "embedded", note=reporter.note)
    image = prepare_image(request, contents, engine, cache, reporter)
    found.image = identify_image(request, contents, image)
    require_claimed_image(request, contents, image)
    if request.image == "rebuilt":  # whose wheels are in the signer's own image, nobody knows
        found.packages = check_packages(lock, cache, debian=False)
    limits = lowered(lock.spec.limits, request.limits)
    return ReexecutionPlan(mode, contents, image, engine, limits, reporter)


def _challenge(
    plan: ReexecutionPlan, recorded: RecordedRun, found: VerificationFindings
) -> Judgement:
    """Have a fresh seed's prefix executed, and then segments if they are asked for."""
    note = plan.reporter.note
    note("executing a prefix with a fresh seed, twice")
    found.fresh_seed = fresh_seed(recorded, plan.execute_segment, note)
    if plan.mode.name == "segments":
        note("executing segments of the recorded run")
        found.challenge = challenge(recorded, plan.mode.segments, plan.execute_segment, note)
    return judge_challenge(found.challenge, found.fresh_seed)


def _reexecute(
    plan: ReexecutionPlan,
    integrity: IntegrityFinding,
    environment: EnvironmentFinding,
    found: VerificationFindings,
) -> Judgement:
    """Execute the run again, compare what it left with the claims, and judge."""
    bundle, lock, claims = plan.contents.bundle, plan.contents.lock, plan.contents.claims
    engine, image = plan.engine, plan.image_claim
    with reexecution_folder(plan.reporter.note) as directory:
        found.execution = executed = reexecute(plan, directory, integrity.ledger)

        if isinstance(claims, ProgramClaims):
            program = collect_program_claims(lock, image, engine.name, directory)
            observed = bundle.read(run_bundle.OBSERVATIONS, Observations)
            recorded = stated_span(observed.started, observed.finished, time.time())
            outputs = compare_outputs(
                claims,
                program,
                recorded_outputs(bundle, claims),
                directory,
                Times(recorded, executed.span),
            )
            found.comparison = compared = ComparisonFinding(
                compare_claims(claims, program), outputs
            )
            found.analysis = analyse(bundle, lock, engine, directory, compared)
            return judge_program(claims, compared)

        if plan.mode.steps is not None:
            index = read_checkpoint_index(directory)
            found.comparison = compared = ComparisonFinding(
                compare_checkpoints(claims.checkpoints, index, plan.mode.steps)
            )
            found.analysis = analysed = analyse(bundle, lock, engine, directory, compared)
            return judge_training(plan.mode, executed, compared, analysed)

        replica = collect_training_claims(lock, image, engine.name, directory)
        found.comparison = compared = ComparisonFinding(compare_claims(claims, replica))
        found.analysis = analysed = analyse(bundle, lock, engine, directory, compared)
        judgement = judge_training(plan.mode, executed, compared, analysed)
        if not compared.differences:
            return judgement
        found.statistics = compare_returns(
            lock.spec, claims.claim_id(), claims.evaluation, replica.evaluation
        )
        return grade_replica(
            judgement.summary,
            environment.grade,
            lock.spec.evaluation.tolerance,
            inconsistent(analysed.first_difference, analysed.divergence)
            or beyond_arithmetic(claims, replica),
            found.statistics,
        )


def _qualified(
    judgement: Judgement, plan: ReexecutionPlan, found: VerificationFindings
) -> Judgement:
    """Say beside a verdict what was executed, if that is not the image that the lock produces."""
    if plan.image is None and plan.contents.claims.image is not None:
        return Judgement("inconclusive", WITHOUT_IMAGE + judgement.summary)
    source = found.image.source if found.image else None
    beside = SIGNERS.get(source, "") + other_code(plan.contents.lock)
    return Judgement(judgement.verdict, judgement.summary + beside)
