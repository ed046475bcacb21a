"""``capsule verify``: integrity, then environment, then re-execution, then comparison."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from capsule import execution
from capsule.bundle import run_bundle
from capsule.bundle.bundle import OpenedBundle, open_bundle
from capsule.bundle.claims import Claims, Observations, collect_claims, read_document
from capsule.bundle.keys import PublicKey
from capsule.engine.interface import Engine
from capsule.engine.select import EngineChoice, open_engine
from capsule.experiment import contract
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.lock import Lock
from capsule.experiment.spec import SourcesSpec
from capsule.image.assemble import Image
from capsule.image.cache import Cache
from capsule.machine.compare import check_requirements, compare, expected_grade
from capsule.machine.fingerprint import take_fingerprint
from capsule.verification.comparison import compare_checkpoints, compare_claims, compare_traces
from capsule.verification.consistency import Contents, check_consistency
from capsule.verification.verdict import ComponentDifference, Grade, Report

MAX_LAYER_BYTES = 1 << 30
NO_KEY, UNKNOWN_SIGNER = "CAP-V002", "CAP-B125"


@dataclass(frozen=True)
class Mode:
    """How far to go."""

    name: Literal["integrity", "environment", "prefix", "full"]
    steps: int | None = None

    @classmethod
    def parse(cls, text: str) -> Mode:
        """Parse ``integrity``, ``environment``, ``prefix:N`` or ``full``.

        Raises:
            CapsuleError: CAP-V001, anything else.
        """
        if match := re.fullmatch(r"prefix:([1-9][0-9]{0,14})", text):
            return cls("prefix", int(match[1]))
        if text in ("integrity", "environment", "full"):
            return cls(text)  # type: ignore[arg-type]
        raise CapsuleError(
            "CAP-V001",
            f"--mode {text!r} is not known",
            fix="Use integrity, environment, prefix:N (N agent steps) or full.",
            exit_code=ExitCode.USAGE,
        )

    def __str__(self) -> str:
        return self.name if self.steps is None else f"{self.name}:{self.steps}"


@dataclass(frozen=True)
class Request:
    """What ``capsule verify`` was asked."""

    bundle: Path
    keys: Sequence[PublicKey]
    mode: Mode
    engine: EngineChoice = "auto"
    allow_untrusted: bool = False
    sources: SourcesSpec = field(default_factory=SourcesSpec)


def verify(request: Request, cache: Cache, reporter: execution.Reporter) -> Report:
    """Check a bundle as far as ``request.mode`` says. The bundle itself is never touched.

    Every foreseen failure becomes a verdict with its coded error, so that the caller always gets a
    report: *tampered* or *untrusted* for what the bundle did wrong, *inconclusive* for what this
    machine cannot decide.
    """
    started = time.monotonic()
    facts: dict[str, Any] = {"bundle": request.bundle.name, "mode": str(request.mode)}
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
        facts["error"] = {"code": error.code, "message": error.message, "fix": error.fix}
    facts["seconds"] = round(time.monotonic() - started, 3)
    return Report(verdict=verdict, summary=summary, **facts)


def _verdict_of(error: CapsuleError) -> Grade:
    """A failed check of the bundle is its fault; a failed execution decides nothing."""
    if error.exit_code != ExitCode.TAMPERED:
        return "inconclusive"
    return "untrusted" if error.code in (NO_KEY, UNKNOWN_SIGNER) else "tampered"


def _verify(
    request: Request, cache: Cache, reporter: execution.Reporter, facts: dict[str, Any]
) -> tuple[Grade, str]:
    reporter.note(f"checking {request.bundle.name}")
    with open_bundle(request.bundle, request.keys) as bundle:
        lock, claims, observations = _read(bundle)
        check_consistency(Contents(bundle, lock, claims))
        facts |= {
            "integrity": True,
            "authentic": bundle.authentic,
            "signer": bundle.fingerprint,
            "claim_id": claims.claim_id(),
            "relaxations": claims.relaxations,
        }
        _require_trust(bundle, request)
        if request.mode.name == "integrity":
            return "intact", "the bundle is unchanged since it was signed, and agrees with itself"
        engine = open_engine(_engine_for(request.engine, claims), progress=reporter.note)
        expectation = _compare_environment(lock, observations, engine, facts)
        if request.mode.name == "environment":
            return "environment-matches", f"this machine can re-execute the run; {expectation}"
        check_prefix(request.mode, lock)
        with _supplied_layers(bundle) as supplied:
            image = execution.prepare(
                lock, engine, cache, sources=request.sources, supplied=supplied, reporter=reporter
            )
        _check_image(image, claims, facts)
        return _reexecute(request.mode, bundle, lock, claims, image, engine, reporter, facts)


def _read(bundle: OpenedBundle) -> tuple[Lock, Claims, Observations]:
    return (
        bundle.read(run_bundle.LOCK, Lock),
        bundle.read(run_bundle.CLAIMS, Claims),
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
    """A run without an image can only be repeated without one."""
    return "process" if choice == "auto" and claims.image is None else choice


def _compare_environment(
    lock: Lock, observations: Observations, engine: Engine, facts: dict[str, Any]
) -> str:
    here = take_fingerprint(engine.describe())
    facts["environment"] = compare(observations.fingerprint, here, lock.spec)
    grade, reason = expected_grade(facts["environment"])
    facts["expected"] = f"{grade}: {reason}"
    findings = check_requirements(lock.spec, here)
    if findings:
        raise findings[0]
    return f"{grade} reproduction is expected"


def check_prefix(mode: Mode, lock: Lock) -> None:
    """Refuse a prefix that does not end on a trace record.

    Raises:
        CapsuleError: CAP-V003.
    """
    interval = lock.spec.recording.trace_interval
    total = lock.spec.trainer.total_steps
    if mode.steps is not None and (mode.steps % interval or mode.steps > total):
        raise CapsuleError(
            "CAP-V003",
            f"--mode {mode}: the run has {total} steps with a trace record each {interval}",
            fix=f"Give a multiple of {interval} up to {total}.",
            exit_code=ExitCode.USAGE,
        )


@contextmanager
def _supplied_layers(bundle: OpenedBundle) -> Iterator[dict[Literal["base", "code"], Path]]:
    """Unpack the layers that the bundle carries, bounded in size."""
    import zstandard

    with tempfile.TemporaryDirectory(prefix="capsule-layers-") as scratch:
        supplied: dict[Literal["base", "code"], Path] = {}
        for name in ("base", "code"):
            member = run_bundle.LAYER.format(name=name)
            if member not in bundle.files:
                continue
            target = Path(scratch) / f"{name}.tar"
            with bundle.files[member].open("rb") as packed, target.open("wb") as out:
                reader = zstandard.ZstdDecompressor().stream_reader(packed)
                try:
                    _copy_bounded(reader, out, member)
                except zstandard.ZstdError as error:
                    raise _bad_layer(member, str(error)) from error
            supplied[name] = target
        yield supplied


def _copy_bounded(reader: Any, out: Any, member: str) -> None:
    remaining = MAX_LAYER_BYTES
    while chunk := reader.read(1 << 20):
        remaining -= len(chunk)
        if remaining < 0:
            raise _bad_layer(member, f"it unpacks to more than {MAX_LAYER_BYTES} bytes")
        out.write(chunk)


def _bad_layer(member: str, reason: str) -> CapsuleError:
    return CapsuleError(
        "CAP-V004",
        f"{member} cannot be unpacked: {reason}",
        fix="Do not trust this bundle; ask its signer for a sound one.",
        exit_code=ExitCode.TAMPERED,
    )


def _check_image(image: Image | None, claims: Claims, facts: dict[str, Any]) -> None:
    """The image assembled here must be the claimed one, layer by layer."""
    found = run_bundle.image_claim(image)
    facts["image_rebuilt"] = found is not None and found == claims.image
    if found is None or found == claims.image:
        return
    raise CapsuleError(
        "CAP-V005",
        f"the image rebuilt from the lock is {found.config}, the claimed one is "
        f"{claims.image.config if claims.image else 'none'}",
        fix="The lock does not produce the claimed image; compare image/config.json of the bundle.",
        exit_code=ExitCode.INCONCLUSIVE,
    )


def _reexecute(
    mode: Mode,
    bundle: OpenedBundle,
    lock: Lock,
    claims: Claims,
    image: Image | None,
    engine: Engine,
    reporter: execution.Reporter,
    facts: dict[str, Any],
) -> tuple[Grade, str]:
    directory = Path(tempfile.mkdtemp(prefix="capsule-verify-"))
    try:
        result = execution.execute(
            lock, engine, directory, stop_after=mode.steps, reporter=reporter
        )
        facts["reexecuted_steps"] = result.steps
        facts["first_difference"] = compare_traces(
            bundle.member(run_bundle.RUN + contract.TRACE),
            directory / contract.TRACE,
            prefix=mode.steps is not None,
        )
        facts["differences"] = _differences(mode, lock, claims, image, engine, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return _judge(mode, facts)


def _differences(
    mode: Mode, lock: Lock, claims: Claims, image: Image | None, engine: Engine, directory: Path
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
    if first is not None:
        where = f" ({first.name})" if first.name else ""
        return (
            "not-reproduced",
            f"the runs first differ at step {first.step}, in {first.component}{where}",
        )
    if differences:
        return "not-reproduced", f"the traces are equal, but {differences[0].component} differs"
    if mode.steps is not None:
        return (
            "reproduced-prefix",
            (
                f"the first {facts['reexecuted_steps']:,} steps are the same, bit for bit; "
                "the rest was not re-executed"
            ),
        )
    return "reproduced-bitwise", "every claim was obtained again, bit for bit"
