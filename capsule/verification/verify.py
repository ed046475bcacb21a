"""``capsule verify``: integrity, trust, environment, image, execution, comparison, verdict."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import partial

from capsule.bundle import run_bundle
from capsule.bundle.archive import UntrustedError
from capsule.bundle.bundle import open_bundle
from capsule.bundle.claims import ProgramClaims, recorded_inputs
from capsule.bundle.run_bundle import RecordedRun
from capsule.bundle.trust import UntrustedSignersError
from capsule.engine.interface import Engine
from capsule.entropy.ledger import Ledger
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.lock import LockedProject
from capsule.host.errors import CapsuleError, ExitCode, refusal_of
from capsule.host.reporter import Reporter
from capsule.host.wording import counted
from capsule.image.cache import Cache
from capsule.image.closure import check_packages
from capsule.image.data.listing import size_text
from capsule.machine.compare import compare, expected_grade, unrepeatable
from capsule.machine.fingerprint import take_fingerprint
from capsule.machine.kind import machine_kind
from capsule.machine.requirements import check_requirements, gpu_warning
from capsule.verification.analysis.divergence import analyse, compare_results
from capsule.verification.execution.admission import (
    check_code,
    confined_engine,
    prepare_executor,
    require_claimed_image,
)
from capsule.verification.execution.challenge import challenge, fresh_seed, judge_challenge
from capsule.verification.execution.grading import judge, reservations
from capsule.verification.execution.reexecution import reexecution_folder
from capsule.verification.findings import (
    EnvironmentFinding,
    IntegrityFinding,
    TrustFinding,
    VerificationFindings,
)
from capsule.verification.integrity.consistency import check_consistency
from capsule.verification.integrity.data import data_digests
from capsule.verification.receipt import check_clock
from capsule.verification.request import VerifyRequest
from capsule.verification.verdict import Grade, Judgement, Report

INTACT = "the bundle is unchanged since it was signed, and agrees with itself"
UNSIGNED = "the files are those that the bundle lists, and its documents agree with each other"
WITHOUT_IMAGE = "executed without the claimed image, so nothing is decided about the run: "


def verify(request: VerifyRequest, cache: Cache, reporter: Reporter) -> Report:
    """Check a bundle as far as ``request.mode`` says. The bundle itself is never touched.

    Every foreseen failure becomes a verdict with its coded error, so that the caller always gets a
    report: *tampered* or *untrusted* for what the bundle did wrong, *inconclusive* for what this
    machine cannot decide.

    Raises:
        CapsuleError: The request itself is at fault, or this machine's clock (exit status 2);
            CAP-V007, it was interrupted.
    """
    started = time.monotonic()
    found = VerificationFindings(request.bundle.name, str(request.mode), request.required)
    failure: CapsuleError | None = None
    try:
        judgement = _verify(request, cache, reporter, found)
    except (CapsuleError, OSError, MemoryError) as raised:
        error = deciding_error(raised)
        # The bundle was rejected while it was opened, before the trust stage could leave its
        # finding. The report names the signers all the same.
        if isinstance(error, UntrustedSignersError):
            found.trust = TrustFinding(
                authentic=False, signer=error.signers[0].key, signers=error.signers
            )
        # The findings of the stages that passed stay in the report.
        failure, judgement = error, _failed(error, found)
    return found.report(judgement, failure, time.monotonic() - started)


def deciding_error(raised: CapsuleError | OSError | MemoryError) -> CapsuleError:
    """Return the error from which :func:`verdict_of` gets a verdict, with its code.

    Raises:
        CapsuleError: The request itself is at fault, or this machine's clock (exit status 2);
            CAP-V007, the verification was interrupted.
        OSError: A defect of Capsule, which decides nothing about the bundle (CAP-X001).
    """
    error = raised if isinstance(raised, CapsuleError) else refusal_of(raised)
    if error is None:
        raise raised
    if error.exit_code == ExitCode.INTERRUPTED:
        raise CapsuleError(
            "CAP-V007",
            "the verification was interrupted; nothing was decided",
            fix="Start it again. 'capsule verify --mode prefix:N' executes only a part of a run.",
        ) from raised
    if error.exit_code == ExitCode.USAGE:
        raise raised
    return error


def verdict_of(error: CapsuleError) -> Grade:
    """Return the verdict of a verification that an error ended early.

    A failed check of the bundle is its fault; most failed executions decide nothing.
    """
    if error.exit_code == ExitCode.TAMPERED:
        return "untrusted" if isinstance(error, UntrustedError) else "tampered"
    # A replay that asks for other randomness differs.
    return "not-reproduced" if error.exit_code == ExitCode.DIFFERS else "inconclusive"


def _failed(error: CapsuleError, found: VerificationFindings) -> Judgement:
    """Judge by what ended the verification early."""
    verdict = verdict_of(error)
    if verdict == "not-reproduced" and found.image is not None and found.image.unclaimed:
        return Judgement("inconclusive", WITHOUT_IMAGE + error.message)
    return Judgement(verdict, error.message)


def _verify(
    request: VerifyRequest, cache: Cache, reporter: Reporter, found: VerificationFindings
) -> Judgement:
    """Go through the stages that execute nothing, and on to the others if the mode asks for it."""
    reporter.note(f"checking {request.bundle.name}")
    with open_bundle(request.bundle, request.trust) as bundle:
        run = RecordedRun.read(bundle)
        lock, claims = run.lock, run.claims

        # Integrity: the unchanged bundle agrees with itself.
        unchecked = check_consistency(run)
        found.integrity = IntegrityFinding(
            claim_id=claims.claim_id(),
            manifest=sha256_hex(bundle.manifest.document()),
            unchecked=(*unchecked, *request.unchecked(bundle)),
            relaxations=claims.relaxations,
            recorded_ledger=bundle.read(run_bundle.LEDGER, Ledger),
            claimed=claims.described if isinstance(claims, ProgramClaims) else None,
            source_tree=None if lock.project is None else _described(lock.project),
            data=tuple(
                f"{name}: {size_text(pin)}, SHA-256 {pin.sha256}"
                for name, pin in (lock.data or {}).items()
            ),
            records=tuple(recorded_inputs(claims)),
        )

        # Trust: who signed it, and whether it is of the experiment that the verifier expects.
        # This finding is assigned before the check, so that the report of an untrusted bundle names
        # its signers, too.
        found.trust = TrustFinding(bundle.authentic, bundle.signer.key, bundle.signers)
        request.require_trust(bundle)
        request.expected.check(lock, claims)
        request.expected.check_data(partial(data_digests, run))
        request.expected.check_tree(lock.project, cache)
        # A mode in which the run can never be verified is rejected on every machine.
        request.mode.check(lock)
        if request.signs:
            check_clock(run.observations().finished, datetime.now(UTC))
        if request.mode.name == "integrity":
            nothing = isinstance(claims, ProgramClaims) and claims.nothing
            intact = INTACT if bundle.authentic else UNSIGNED
            return Judgement("intact", intact + (", but it claims nothing" if nothing else ""))

        # Environment: what this machine lets the verifier expect of a re-execution.
        # Whatever comes before this line works on every platform, and whatever follows needs Linux
        # on x86-64.
        engine = confined_engine(request, run, reporter.note)
        here = take_fingerprint(engine.describe())
        rows = compare(run.observations().fingerprint, here, lock.spec, run.compilers())
        grade, reason = expected_grade(rows)
        unmet = check_requirements(lock, here)
        expected, machine = f"{grade}: {reason}", machine_kind(here, lock.spec)
        # This finding, too, is assigned before the check below: a report on a machine that lacks
        # something has the table of both machines.
        found.environment = EnvironmentFinding(rows, grade, expected, machine, here)
        if unmet:
            raise unmet[0]
        reporter.note(f"expected before running: {expected}")
        if warning := gpu_warning(lock.spec, here):
            reporter.note(warning)
        if request.mode.name == "environment":
            able = "this machine meets the requirements of the run"
            return Judgement("environment-matches", f"{able}; {grade} reproduction is expected")
        return _execute(request, run, engine, cache, reporter, found.environment, found)


def _described(tree: LockedProject) -> str:
    return f"{counted(len(tree.files), 'file')}, SHA-256 {tree.sha256}"


def _execute(
    request: VerifyRequest,
    run: RecordedRun,
    engine: Engine,
    cache: Cache,
    reporter: Reporter,
    environment: EnvironmentFinding,
    found: VerificationFindings,
) -> Judgement:
    """Prepare the claimed image, execute the run again or challenge it, and judge."""
    lock, mode, note = run.lock, request.mode, reporter.note

    # Image: the claimed one, if the verifier accepts what it is made of.
    # The code is checked before the image is prepared: prepare_image() relies on it.
    found.own_code = check_code(lock, request.code)
    executor, image = prepare_executor(request, run, engine, cache, reporter)
    found.image = image
    require_claimed_image(request, run, image)
    if request.image == "rebuilt":  # what the signer's own image is made of is not known
        found.packages = check_packages(lock, cache, debian=False)

    # Execution, comparison, verdict.
    if mode.challenges:
        note("executing a prefix with a fresh seed, twice")
        found.fresh_seed = fresh_seed(run, executor.segment, note)
        if mode.name == "segments":
            note("executing segments of the recorded run")
            found.challenge = challenge(run, mode.segments, executor.segment, note)
        judgement = judge_challenge(found.challenge, found.fresh_seed, unrepeatable(lock.spec))
    else:
        # Everything that reads the run directory is inside this block, at whose end it is removed.
        with reexecution_folder(note) as directory:
            found.execution = executed = executor.whole(
                run, mode.steps, directory, request.variation
            )
            found.comparison = compared = compare_results(
                run, image.claim, engine.name, directory, mode.steps, executed
            )
            found.analysis = analysed = analyse(run, environment.here, directory, compared)
        judgement = judge(run, mode, environment, executed, compared, analysed)
    if image.unclaimed:
        return Judgement("inconclusive", WITHOUT_IMAGE + judgement.summary)
    return Judgement(judgement.verdict, judgement.summary + reservations(lock, image))
