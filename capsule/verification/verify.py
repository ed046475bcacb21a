"""``capsule verify``: integrity, then environment, then re-execution, then comparison."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from capsule import execution
from capsule.bundle import run_bundle
from capsule.bundle.bundle import OpenedBundle, open_bundle
from capsule.bundle.claims import Observations, ProgramClaims, claims_model
from capsule.bundle.trust import UNTRUSTED, Policy, UntrustedError
from capsule.engine.interface import Engine
from capsule.engine.select import EngineChoice, open_engine
from capsule.entropy.ledger import Ledger
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.errors import CapsuleError, ExitCode, refusal_of
from capsule.experiment.lock import Lock
from capsule.experiment.spec import SourcesSpec
from capsule.image.assembly.assemble import Image
from capsule.image.assembly.base import is_genuine
from capsule.image.cache import Cache
from capsule.image.closure import check_packages
from capsule.image.code import training_code_digest
from capsule.machine.compare import check_requirements, compare, expected_grade
from capsule.machine.fingerprint import take_fingerprint
from capsule.machine.kind import machine_kind
from capsule.verification.execution.bounds import (
    check_code,
    check_embedded,
    check_gpu_host,
    check_unconfined,
    lowered,
)
from capsule.verification.execution.challenge import check_challengeable
from capsule.verification.execution.reexecution import Reexecution, reexecute
from capsule.verification.expectation import OTHER_CLAIM, OTHER_LOCK, OTHER_SPEC, Expectation
from capsule.verification.integrity.consistency import check_consistency
from capsule.verification.integrity.contents import Contents
from capsule.verification.integrity.image_documents import layer_identities
from capsule.verification.integrity.layers import Name, embedded_image, supplied_layers
from capsule.verification.mode import Mode, check_prefix
from capsule.verification.verdict import Grade, ImageSource, Report, RequiredGrade

INTACT = "the bundle is unchanged since it was signed, and agrees with itself"
SIGNERS = {
    "embedded": "; the image was the signer's own and was not rebuilt from the lock",
    "supplied-base": "; the base layer was the signer's own and was not built from the packages",
}
OTHER_CODE = "; the training code was the signer's own and not this Capsule's"
WITHOUT_IMAGE = "executed without the claimed image, which decides nothing about the run: "
NO_DEBIAN = ("CAP-I303", "CAP-I304")
NO_KEY = "CAP-V002"


@dataclass(frozen=True)
class Request:
    """What ``capsule verify`` was asked."""

    bundle: Path
    trust: Policy
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
        verdict, summary = _verify_here(request, cache, reporter, facts)
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


def _verify_here(
    request: Request, cache: Cache, reporter: execution.Reporter, facts: dict[str, Any]
) -> tuple[Grade, str]:
    """Do what was asked; what this machine refuses decides nothing about the bundle.

    Raises:
        CapsuleError: Also CAP-X003, the operating system refused something.
    """
    try:
        return _verify(request, cache, reporter, facts)
    except OSError as error:
        refusal = refusal_of(error)
        if refusal is None:
            raise
        raise refusal from error


def _verdict_of(error: CapsuleError) -> Grade:
    """A failed check of the bundle is its fault; most failed executions decide nothing."""
    if error.exit_code == ExitCode.DIFFERS:  # a replay that asks for other randomness
        return "not-reproduced"
    if error.exit_code != ExitCode.TAMPERED:
        return "inconclusive"
    unwanted = (NO_KEY, OTHER_SPEC, OTHER_LOCK, OTHER_CLAIM, *UNTRUSTED)
    return "untrusted" if error.code in unwanted else "tampered"


def _verify(
    request: Request, cache: Cache, reporter: execution.Reporter, facts: dict[str, Any]
) -> tuple[Grade, str]:
    reporter.note(f"checking {request.bundle.name}")
    with open_bundle(request.bundle, request.trust) as bundle:
        contents, observations = _read(bundle)
        lock, claims = contents.lock, contents.claims
        unchecked = check_consistency(contents)
        facts |= {
            "integrity": True,
            "authentic": bundle.authentic,
            "signer": bundle.fingerprint,
            "signers": bundle.signers,
            "claim_id": claims.claim_id(),
            "manifest": sha256_hex(bundle.manifest.document()),
            "unchecked": (*unchecked, *_left(request, bundle)),
            "relaxations": claims.relaxations,
            "recorded_ledger": bundle.read(run_bundle.LEDGER, Ledger),
        }
        if isinstance(claims, ProgramClaims):
            facts["claimed"] = claims.described
        _require_trust(bundle, request)
        request.expected.check(lock, claims)
        if request.mode.name == "integrity":
            nothing = isinstance(claims, ProgramClaims) and claims.nothing
            return "intact", INTACT + (", but it claims nothing" if nothing else "")
        check_unconfined(request.engine, image=claims.image is not None)
        engine = open_engine(request.engine, strange=True, progress=reporter.note)
        check_embedded(request.image, engine)
        expectation = _compare_environment(lock, observations, engine, facts)
        reporter.note(f"expected before running: {facts['expected']}")
        if request.mode.name == "environment":
            return "environment-matches", f"this machine can re-execute the run; {expectation}"
        return _execute(request, contents, engine, cache, reporter, facts)


def _execute(
    request: Request,
    contents: Contents,
    engine: Engine,
    cache: Cache,
    reporter: execution.Reporter,
    facts: dict[str, Any],
) -> tuple[Grade, str]:
    lock, mode = contents.lock, request.mode
    facts["own_code"] = check_code(lock, request.code)
    check_prefix(mode, lock)
    if mode.challenges:
        check_challengeable(lock, segments=mode.name == "segments", number=mode.segments)
    image = _prepare(request, contents, engine, cache, reporter)
    _check_image(request, image, contents, facts)
    if request.image == "rebuilt":  # whose wheels are in the signer's own image, nobody knows
        packages = check_packages(lock, cache, debian=False)
        facts |= {"besides": packages.besides, "startup": packages.startup}
    limits = lowered(lock.spec.limits, request.limits)
    verdict, summary = reexecute(
        Reexecution(mode, contents, image, engine, limits, reporter), facts
    )
    if image is None and contents.claims.image is not None:
        return "inconclusive", WITHOUT_IMAGE + summary
    summary += SIGNERS.get(facts["image_source"], "")
    return verdict, summary + ("" if facts["own_code"] else OTHER_CODE)


def _prepare(
    request: Request,
    contents: Contents,
    engine: Engine,
    cache: Cache,
    reporter: execution.Reporter,
) -> Image | None:
    """Make the engine ready: with the image rebuilt from the lock, or with the signer's own."""
    bundle, lock = contents.bundle, contents.lock
    check_gpu_host(lock, engine, strange=request.image == "embedded", note=reporter.note)
    identities = layer_identities(bundle, lock, contents.claims)
    if request.image == "embedded":
        with embedded_image(bundle, lock, identities) as image:
            engine.prepare(lock, image, cache, progress=reporter.note)
            return image
    with supplied_layers(bundle, identities, _wanted(request, lock)) as (supplied, project):
        try:
            return execution.prepare(
                lock,
                engine,
                cache,
                sources=request.sources,
                supplied=supplied,
                project=project,
                reporter=reporter,
            )
        except CapsuleError as error:
            if error.code not in NO_DEBIAN:
                raise
            raise _without_base(error) from error


def _wanted(request: Request, lock: Lock) -> list[Name]:
    """Choose what to take from the bundle, instead of building it here.

    That is what the user accepts, and a base layer whose digest Capsule itself ships.
    """
    base = request.base == "supplied" or is_genuine(lock.image)
    code = lock.image.code.sha256 != training_code_digest()
    names: dict[Name, bool] = {"base": base, "code": code}
    return [name for name, taken in names.items() if taken]


def _without_base(error: CapsuleError) -> CapsuleError:
    return CapsuleError(
        "CAP-V013",
        f"the base layer cannot be built from the locked packages: {error.message}",
        fix="Name a mirror that has the packages in apt's configuration; or pass --base supplied "
        "to execute the base layer that the signer put into the bundle.",
        exit_code=ExitCode.INCONCLUSIVE,
    )


def _image_source(request: Request, lock: Lock) -> ImageSource:
    if request.image == "embedded":
        return "embedded"
    genuine = request.base == "packages" or is_genuine(lock.image)
    return "rebuilt" if genuine else "supplied-base"


def _left(request: Request, bundle: OpenedBundle) -> Iterator[str]:
    """Yield the members that only other requests check."""
    if run_bundle.IMAGE_ARCHIVE in bundle.files and request.image != "embedded":
        yield run_bundle.IMAGE_ARCHIVE
    if request.mode.name != "segments":
        yield from (path for path in bundle.files if path.startswith(run_bundle.STATES))


def _read(bundle: OpenedBundle) -> tuple[Contents, Observations]:
    lock = bundle.read(run_bundle.LOCK, Lock)
    claims = bundle.read(run_bundle.CLAIMS, claims_model(lock))
    return Contents(bundle, lock, claims), bundle.read(run_bundle.OBSERVATIONS, Observations)


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


def _check_image(
    request: Request, image: Image | None, contents: Contents, facts: dict[str, Any]
) -> None:
    """Check that the image assembled or loaded here is the claimed one, layer by layer."""
    found, claims = run_bundle.image_claim(image), contents.claims
    facts["image_source"] = None if found is None else _image_source(request, contents.lock)
    facts["image_rebuilt"] = found == claims.image and facts["image_source"] == "rebuilt"
    if found is None or found == claims.image:
        return
    raise CapsuleError(
        "CAP-V005",
        f"the {request.image} image is {found.config}, the claimed one is "
        f"{claims.image.config if claims.image else 'none'}",
        fix="The lock does not produce the claimed image; compare image/config.json of the bundle.",
        exit_code=ExitCode.INCONCLUSIVE,
    )
