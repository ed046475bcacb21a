"""``capsule verify``: integrity, then environment, then re-execution, then comparison."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from capsule import execution
from capsule.bundle import run_bundle
from capsule.bundle.bundle import OpenedBundle, open_bundle
from capsule.bundle.claims import (
    Claims,
    Observations,
    ProgramClaims,
    TrainingClaims,
    claims_model,
    collect_claims,
    collect_program_claims,
    collect_training_claims,
    read_document,
)
from capsule.bundle.trust import UNTRUSTED, Policy, UntrustedError
from capsule.engine.interface import Engine
from capsule.engine.select import EngineChoice, open_engine
from capsule.entropy.ledger import Ledger
from capsule.experiment import contract
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.lock import Lock
from capsule.experiment.spec import LimitsSpec, SourcesSpec
from capsule.experiment.trainers import CommandTrainer
from capsule.image.assemble import Image
from capsule.image.cache import Cache
from capsule.image.code import training_code_digest
from capsule.machine.compare import check_requirements, compare, expected_grade
from capsule.machine.fingerprint import take_fingerprint
from capsule.machine.kind import machine_kind
from capsule.verification.bounds import check_embedded, check_gpu_host, lowered, reexecution_folder
from capsule.verification.challenge import (
    Recorded,
    challenge,
    check_challengeable,
    fresh_seed,
    judge,
    parse_number,
)
from capsule.verification.comparison import (
    STANDARD_OUTPUT,
    compare_checkpoints,
    compare_claims,
    compare_outputs,
)
from capsule.verification.consistency import Contents, check_consistency, recorded_outputs
from capsule.verification.divergence import analysis
from capsule.verification.equivalence import compare_returns
from capsule.verification.expectation import OTHER_CLAIM, OTHER_SPEC, Expectation
from capsule.verification.grading import beyond_arithmetic, grade_replica
from capsule.verification.image_documents import layer_identities
from capsule.verification.layers import embedded_image, supplied_layers
from capsule.verification.verdict import (
    ComponentDifference,
    Grade,
    OutputDifference,
    Report,
    RequiredGrade,
)

EMBEDDED = "; the image was the signer's own and was not rebuilt from the lock"
NO_KEY = "CAP-V002"


@dataclass(frozen=True)
class Mode:
    """How far to go."""

    name: Literal["integrity", "environment", "prefix", "full", "segments", "fresh-seed"]
    steps: int | None = None
    segments: int | None = None  # how many; None: all

    @property
    def challenges(self) -> bool:
        """Whether it asks for what the signer could not know."""
        return self.name in ("segments", "fresh-seed")

    @classmethod
    def parse(cls, text: str) -> Mode:
        """Parse a mode as ``--mode`` takes it; each is a name of the class, two with a number.

        Raises:
            CapsuleError: CAP-V001, anything else; CAP-V060, segments of no number.
        """
        if text.startswith("segments:"):
            return cls("segments", segments=parse_number(text.removeprefix("segments:")))
        if match := re.fullmatch(r"prefix:([1-9][0-9]{0,14})", text):
            return cls("prefix", int(match[1]))
        if text in ("integrity", "environment", "fresh-seed", "full"):
            return cls(text)  # type: ignore[arg-type]
        raise CapsuleError(
            "CAP-V001",
            f"--mode {text!r} is not known",
            fix="Use integrity, environment, prefix:N (N agent steps), segments:N, fresh-seed or "
            "full.",
            exit_code=ExitCode.USAGE,
        )

    def __str__(self) -> str:
        if self.name == "segments":
            return f"{self.name}:{self.segments or 'all'}"
        return self.name if self.steps is None else f"{self.name}:{self.steps}"


@dataclass(frozen=True)
class Request:
    """What ``capsule verify`` was asked."""

    bundle: Path
    trust: Policy
    mode: Mode
    engine: EngineChoice = "auto"
    allow_untrusted: bool = False
    image: Literal["rebuilt", "embedded"] = "rebuilt"
    limits: Mapping[str, int] = field(default_factory=dict)
    required: RequiredGrade = "statistical"
    sources: SourcesSpec = field(default_factory=SourcesSpec)
    expected: Expectation = field(default_factory=Expectation)


def verify(request: Request, cache: Cache, reporter: execution.Reporter) -> Report:
    """Check a bundle as far as ``request.mode`` says. The bundle itself is never touched.

    Every foreseen failure becomes a verdict with its coded error, so that the caller always gets a
    report: *tampered* or *untrusted* for what the bundle did wrong, *inconclusive* for what this
    machine cannot decide.
    """
    started = time.monotonic()
    facts: dict[str, Any] = {
        "bundle": request.bundle.name,
        "mode": str(request.mode),
        "required": request.required,
    }
    try:
        verdict, summary = _verify(request, cache, reporter, facts)
    except CapsuleError as error:
        if error.exit_code == ExitCode.INTERRUPTED:
            raise CapsuleError(
                "CAP-V007",
                "the verification was interrupted; nothing was decided",
                fix="Start it again, perhaps with --mode prefix:N.",
                exit_code=ExitCode.INTERRUPTED,
            ) from error
        if error.exit_code == ExitCode.USAGE:
            raise
        verdict, summary = _verdict_of(error), error.message
        if verdict == "tampered":
            facts["integrity"] = False
        if isinstance(error, UntrustedError):
            facts |= {"integrity": True, "authentic": False, "signers": error.signers}
            facts["signer"] = error.signers[0].key
        facts["error"] = {"code": error.code, "message": error.message, "fix": error.fix}
    facts["seconds"] = round(time.monotonic() - started, 3)
    return Report(verdict=verdict, summary=summary, **facts)


def _verdict_of(error: CapsuleError) -> Grade:
    """A failed check of the bundle is its fault; most failed executions decide nothing."""
    if error.exit_code == ExitCode.DIFFERS:  # a replay that asks for other randomness
        return "not-reproduced"
    if error.exit_code != ExitCode.TAMPERED:
        return "inconclusive"
    unwanted = (NO_KEY, OTHER_SPEC, OTHER_CLAIM, *UNTRUSTED)
    return "untrusted" if error.code in unwanted else "tampered"


def _verify(
    request: Request, cache: Cache, reporter: execution.Reporter, facts: dict[str, Any]
) -> tuple[Grade, str]:
    reporter.note(f"checking {request.bundle.name}")
    with open_bundle(request.bundle, request.trust) as bundle:
        lock, claims, observations = _read(bundle)
        check_consistency(Contents(bundle, lock, claims))
        facts |= {
            "integrity": True,
            "authentic": bundle.authentic,
            "signer": bundle.fingerprint,
            "signers": bundle.signers,
            "claim_id": claims.claim_id(),
            "manifest": sha256_hex(bundle.manifest.document),
            "relaxations": claims.relaxations,
            "ledger": bundle.read(run_bundle.LEDGER, Ledger),
        }
        _require_trust(bundle, request)
        request.expected.check(lock, claims)
        if request.mode.name == "integrity":
            return "intact", "the bundle is unchanged since it was signed, and agrees with itself"
        engine = open_engine(_engine_for(request.engine, claims), progress=reporter.note)
        check_embedded(request.image, engine)
        expectation = _compare_environment(lock, observations, engine, facts)
        reporter.note(f"expected before running: {facts['expected']}")
        if request.mode.name == "environment":
            return "environment-matches", f"this machine can re-execute the run; {expectation}"
        check_prefix(request.mode, lock)
        if request.mode.challenges:
            check_challengeable(
                lock,
                segments=request.mode.name == "segments",
                number=request.mode.segments,
                confined=engine.name != "process" or request.engine == "process",
            )
        image = _prepare(request, bundle, lock, claims, engine, cache, reporter)
        _check_image(request, image, claims, facts)
        facts["own_code"] = lock.image.code.sha256 == training_code_digest()
        limits = lowered(lock.spec.limits, request.limits)
        if request.mode.challenges and isinstance(claims, TrainingClaims):
            recorded = Recorded(bundle, lock, claims)
            verdict, summary = _challenge(request.mode, recorded, engine, limits, reporter, facts)
        else:
            verdict, summary = _reexecute(
                request.mode, bundle, lock, claims, image, engine, limits, reporter, facts
            )
        return verdict, summary + (EMBEDDED if request.image == "embedded" else "")


def _prepare(
    request: Request,
    bundle: OpenedBundle,
    lock: Lock,
    claims: Claims,
    engine: Engine,
    cache: Cache,
    reporter: execution.Reporter,
) -> Image | None:
    """Make the engine ready: with the image rebuilt from the lock, or with the signer's own."""
    check_gpu_host(lock, engine, strange=request.image == "embedded", note=reporter.note)
    identities = layer_identities(bundle, lock, claims)
    if request.image == "embedded":
        with embedded_image(bundle, lock, identities) as image:
            engine.prepare(lock, image, cache, progress=reporter.note)
            return image
    with supplied_layers(bundle, identities) as (supplied, project):
        return execution.prepare(
            lock,
            engine,
            cache,
            sources=request.sources,
            supplied=supplied,
            project=project,
            reporter=reporter,
        )


def _read(
    bundle: OpenedBundle,
) -> tuple[Lock, TrainingClaims | ProgramClaims, Observations]:
    lock = bundle.read(run_bundle.LOCK, Lock)
    return (
        lock,
        bundle.read(run_bundle.CLAIMS, claims_model(lock)),
        bundle.read(run_bundle.OBSERVATIONS, Observations),
    )


def _require_trust(bundle: OpenedBundle, request: Request) -> None:
    if bundle.authentic or request.allow_untrusted:
        return
    raise CapsuleError(
        NO_KEY,
        f"the bundle is intact and names {bundle.fingerprint} as its signer, but no key was given "
        "to check that with",
        fix="Get the signer's public key from a source you trust and pass --key; or pass "
        "--allow-untrusted to check everything but who signed it.",
        exit_code=ExitCode.TAMPERED,
    )


def _engine_for(choice: EngineChoice, claims: Claims) -> EngineChoice:
    """A run without an image can only be repeated without one.

    Raises:
        CapsuleError: CAP-V009, that would run a stranger's program without a container, and nobody
            said that it may.
    """
    if choice != "auto" or claims.image is not None:
        return choice
    if isinstance(claims, ProgramClaims):
        raise CapsuleError(
            "CAP-V009",
            "the bundle was made without a container, and so would its program run on this machine",
            fix="If you trust the program, and not only its signature, pass --engine process.",
            exit_code=ExitCode.INCONCLUSIVE,
        )
    return "process"


def _compare_environment(
    lock: Lock, observations: Observations, engine: Engine, facts: dict[str, Any]
) -> str:
    here = take_fingerprint(engine.describe())
    facts["environment"] = compare(observations.fingerprint, here, lock.spec)
    grade, reason = expected_grade(facts["environment"])
    facts["expected"] = f"{grade}: {reason}"
    facts["expected_grade"] = grade
    facts["machine"] = machine_kind(here, lock.spec)
    findings = check_requirements(lock.spec, here)
    if findings:
        raise findings[0]
    return f"{grade} reproduction is expected"


def check_prefix(mode: Mode, lock: Lock) -> None:
    """Refuse a prefix that does not end on a trace record, or of a program, which has none.

    Raises:
        CapsuleError: CAP-V003, CAP-V008.
    """
    if mode.steps is None:
        return
    if isinstance(lock.spec.trainer, CommandTrainer):
        raise CapsuleError(
            "CAP-V008",
            f"--mode {mode}: only Capsule's own trainers count steps; this bundle runs a program",
            fix="Use --mode full.",
            exit_code=ExitCode.USAGE,
        )
    interval = lock.spec.recording.trace_interval
    total = lock.spec.trainer.total_steps
    if mode.steps % interval or mode.steps > total:
        raise CapsuleError(
            "CAP-V003",
            f"--mode {mode}: the run has {total} steps with a trace record each {interval}",
            fix=f"Give a multiple of {interval} up to {total}.",
            exit_code=ExitCode.USAGE,
        )


def _check_image(
    request: Request, image: Image | None, claims: Claims, facts: dict[str, Any]
) -> None:
    """The image assembled or loaded here must be the claimed one, layer by layer."""
    found = run_bundle.image_claim(image)
    facts["image_source"] = None if found is None else request.image
    facts["image_rebuilt"] = (
        request.image == "rebuilt" and found is not None and found == claims.image
    )
    if found is None or found == claims.image:
        return
    raise CapsuleError(
        "CAP-V005",
        f"the {request.image} image is {found.config}, the claimed one is "
        f"{claims.image.config if claims.image else 'none'}",
        fix="The lock does not produce the claimed image; compare image/config.json of the bundle.",
        exit_code=ExitCode.INCONCLUSIVE,
    )


def _challenge(
    mode: Mode,
    recorded: Recorded,
    engine: Engine,
    limits: LimitsSpec,
    reporter: execution.Reporter,
    facts: dict[str, Any],
) -> tuple[Grade, str]:
    """Have a fresh seed's prefix executed, and then segments if they are asked for."""

    def execute(lock: Lock, directory: Path, *, stop_after: int, schedule: Path | None) -> object:
        return execution.execute(
            lock,
            engine,
            directory,
            stop_after=stop_after,
            schedule=schedule,
            segment=True,
            limits=limits,
            reporter=reporter,
        )

    reporter.note("executing a prefix with a fresh seed, twice")
    facts["fresh_seed"] = fresh_seed(recorded, execute, reporter.note)
    if mode.name == "segments":
        reporter.note("executing segments of the recorded run")
        facts["challenge"] = challenge(recorded, mode.segments, execute, reporter.note)
        segments = facts["challenge"].segments
        facts["reexecuted_steps"] = sum(each.ends - each.begins for each in segments)
        different = next((each for each in segments if not each.equal), None)
        if different is not None:
            facts["first_difference"] = different.first_difference
            facts["differences"] = different.differences
    return judge(facts.get("challenge"), facts["fresh_seed"])


def _reexecute(
    mode: Mode,
    bundle: OpenedBundle,
    lock: Lock,
    claims: TrainingClaims | ProgramClaims,
    image: Image | None,
    engine: Engine,
    limits: LimitsSpec,
    reporter: execution.Reporter,
    facts: dict[str, Any],
) -> tuple[Grade, str]:
    with reexecution_folder(reporter.note) as directory:
        result = execution.execute(
            lock,
            engine,
            directory,
            stop_after=mode.steps,
            replay=(
                None
                if claims.entropy_profile is None
                else bundle.member(run_bundle.ENTROPY_PROFILE)
            ),
            schedule=(
                bundle.member(run_bundle.SCHEDULE)
                if isinstance(claims, TrainingClaims) and claims.schedule is not None
                else None
            ),
            limits=limits,
            reporter=reporter,
        )
        if isinstance(claims, ProgramClaims):
            found = collect_program_claims(
                lock, run_bundle.image_claim(image), engine.name, directory
            )
            facts["first_difference"] = _first_output(bundle, claims, found, directory)
            facts["differences"] = compare_claims(claims, found)
            facts |= analysis(bundle, lock, engine, directory, facts["differences"])
        elif isinstance(result, contract.Result):
            facts["reexecuted_steps"] = result.steps
            facts["differences"] = _differences(mode, lock, claims, image, engine, directory)
            facts |= analysis(bundle, lock, engine, directory, facts["differences"])
            if mode.steps is None and facts["differences"]:
                replica = collect_training_claims(
                    lock, run_bundle.image_claim(image), engine.name, directory
                )
                return _judge_returns(lock, claims, replica, facts)
    return _judge(mode, facts)


def _judge_returns(
    lock: Lock, claims: TrainingClaims, replica: TrainingClaims, facts: dict[str, Any]
) -> tuple[Grade, str]:
    """Judge a whole training that gave other bits, by the returns of its final network."""
    _, difference = _judge(Mode("full"), facts)
    facts["statistics"] = compare_returns(
        lock.spec, claims.claim_id(), claims.evaluation, replica.evaluation
    )
    return grade_replica(
        difference,
        facts["expected_grade"],
        lock.spec.evaluation.tolerance,
        beyond_arithmetic(claims, replica),
        facts["statistics"],
    )


def _first_output(
    bundle: OpenedBundle, claims: ProgramClaims, found: ProgramClaims, directory: Path
) -> OutputDifference | None:
    recorded = recorded_outputs(bundle, claims)
    if claims.standard_output is not None:
        recorded[STANDARD_OUTPUT] = bundle.member(run_bundle.STANDARD_OUTPUT)
    return compare_outputs(claims, found, recorded, directory)


def _differences(
    mode: Mode,
    lock: Lock,
    claims: TrainingClaims,
    image: Image | None,
    engine: Engine,
    directory: Path,
) -> tuple[ComponentDifference, ...]:
    if mode.steps is None:
        found = collect_claims(lock, run_bundle.image_claim(image), engine.name, directory)
        return compare_claims(claims, found)
    checkpoints = contract.CheckpointIndex(checkpoints=())
    if (directory / contract.CHECKPOINT_INDEX).exists():  # a short prefix has none
        checkpoints = read_document(directory / contract.CHECKPOINT_INDEX, contract.CheckpointIndex)
    return compare_checkpoints(claims.checkpoints, checkpoints, mode.steps)


def _judge(mode: Mode, facts: dict[str, Any]) -> tuple[Grade, str]:
    first, differences = facts["first_difference"], facts["differences"]
    if isinstance(first, OutputDifference):
        line = "" if first.line is None else f", at line {first.line:,}"
        return "not-reproduced", f"the outputs first differ in {first.path}{line}"
    if first is not None:
        where = f" ({first.name})" if first.name else ""
        return (
            "not-reproduced",
            f"the runs first differ at step {first.step}, in {first.component}{where}",
        )
    if differences:
        what = "traces" if "reexecuted_steps" in facts else "outputs"
        return "not-reproduced", f"the {what} are equal, but {differences[0].component} differs"
    if mode.steps is not None:
        return (
            "reproduced-prefix",
            (
                f"the first {facts['reexecuted_steps']:,} steps are the same, bit for bit; "
                "the rest was not re-executed"
            ),
        )
    return "reproduced-bitwise", "every claim was obtained again, bit for bit"
