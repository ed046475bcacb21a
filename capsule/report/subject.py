"""What a report is about: everything that a bundle and the reports on it say, read once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from capsule.bundle import run_bundle
from capsule.bundle.bundle import OpenedBundle
from capsule.bundle.claims import (
    Claims,
    Observations,
    ProgramClaims,
    TrainingClaims,
    claims_model,
    has_population,
)
from capsule.bundle.crate import CRATE, run_crate
from capsule.bundle.keys import PublicKey
from capsule.bundle.manifest import BundleFile
from capsule.bundle.tally import Original, Receipts, read_receipts
from capsule.entropy.ledger import Ledger
from capsule.experiment import contract
from capsule.experiment.canonical import canonical_json, open_regular, parse_canonical_json
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.lock import Lock
from capsule.verification.integrity.consistency import check_consistency
from capsule.verification.integrity.contents import Contents
from capsule.verification.verdict import Report

METRICS, EVALUATIONS = (
    "metrics.jsonl",
    "evaluation.jsonl",
)  # of capsule.training.own_program.recorder
FOUNDATION = ("libc6", "libpython3.11-stdlib")  # what every program of an image rests on
MAX_REPORT_BYTES = 16 << 20
MAX_LINE_BYTES = 1 << 16
MAX_LINES = 1_000_000
MAX_SERIES = 8
MAX_STEP = 2**53 - 1
HUGE = 1e90  # numbers beyond it are drawn no more than infinities are


@dataclass(frozen=True)
class Series:
    """One number over the steps of a run, in ascending order of steps; finite values only."""

    name: str
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class EvaluationPoint:
    """Returns of one network, one per start, in order."""

    step: int
    returns: tuple[float, ...]


@dataclass(frozen=True)
class Package:
    """One component of the image's SBOM."""

    name: str
    version: str
    licence: str


@dataclass(frozen=True)
class Inventory:
    """The image's SBOM in short: components by kind, packages of note, components by licence."""

    kinds: Mapping[str, int]
    packages: tuple[Package, ...]
    licences: Mapping[str, int]


@dataclass(frozen=True)
class Subject:
    """A bundle that is intact and agrees with itself, and what was found by running it again.

    Attributes:
        bundle: File name.
        fingerprint: Of the signer's key by the bundle's own account.
        signers: Whom the reader named and who signed the bundle: keys, with identities if any.
        files: Every file of the manifest.
        evaluation: Claimed evaluations; of a program those of its ``evaluation.jsonl``.
        series: What the run reported of itself on its way.
        unread: Lines of that report that are none.
        reports: What ``capsule verify`` wrote elsewhere, each with its file name. Nobody signed it.
        receipts: What ``capsule verify --sign`` wrote elsewhere; only those by keys that the
            reader named count, and none by the bundle's own signer.
    """

    bundle: str
    fingerprint: str
    signers: tuple[str, ...]
    files: tuple[BundleFile, ...]
    lock: Lock
    claims: TrainingClaims | ProgramClaims
    observations: Observations
    ledger: Ledger
    evaluation: tuple[EvaluationPoint, ...]
    series: tuple[Series, ...]
    unread: int
    ancestry: contract.Ancestry | None
    checkpoints: contract.CheckpointIndex | None
    inventory: Inventory
    reports: tuple[tuple[str, Report], ...]
    receipts: Receipts


def read_subject(
    bundle: OpenedBundle, name: str, files: Sequence[Path], keys: Sequence[PublicKey]
) -> Subject:
    """Read a bundle, after checking that it agrees with itself, and the reports and receipts on it.

    Args:
        bundle: The bundle.
        name: Its file name.
        files: Reports and receipts, in any order.
        keys: Whose receipts count.

    Raises:
        CapsuleError: CAP-V010, V011: it does not; CAP-B144: a document is missing or malformed;
            CAP-P101, P102: a report is none, or about other claims;
            CAP-P103: a claimed return is no number.
    """
    lock = bundle.read(run_bundle.LOCK, Lock)
    claims = bundle.read(run_bundle.CLAIMS, claims_model(lock))
    check_consistency(Contents(bundle, lock, claims))
    evaluation, series, unread = _curves(bundle, claims)
    index = run_bundle.RUN + contract.CHECKPOINT_INDEX
    signed = [path for path in files if _is_signed(path)]
    return Subject(
        bundle=name,
        fingerprint=bundle.fingerprint,
        signers=tuple(str(each) for each in bundle.signers if each.rejection_reason is None),
        files=bundle.manifest.files,
        lock=lock,
        claims=claims,
        observations=bundle.read(run_bundle.OBSERVATIONS, Observations),
        ledger=bundle.read(run_bundle.LEDGER, Ledger),
        evaluation=evaluation,
        series=series,
        unread=unread,
        ancestry=(
            bundle.read(run_bundle.POPULATION, contract.Ancestry) if has_population(lock) else None
        ),
        checkpoints=(
            bundle.read(index, contract.CheckpointIndex)
            if isinstance(claims, TrainingClaims)
            else None
        ),
        inventory=read_inventory(bundle.content(run_bundle.IMAGE_SBOM), lock),
        reports=tuple(
            (path.name, read_report(path, claims)) for path in files if path not in signed
        ),
        receipts=read_receipts(Original.of(bundle), signed, keys),
    )


def _is_signed(path: Path) -> bool:
    """Tell a receipt, a DSSE envelope, from a report; what is neither passes for a report."""
    try:
        document = json.loads(_bytes(path))
    except (OSError, ValueError, RecursionError):  # told by read_report
        return False
    return isinstance(document, dict) and "payloadType" in document


def _bytes(path: Path) -> bytes:
    with open_regular(path) as stream:
        data = stream.read(MAX_REPORT_BYTES + 1)
    if len(data) > MAX_REPORT_BYTES:
        raise ValueError(f"larger than {MAX_REPORT_BYTES >> 20} MiB")
    return data


def read_report(path: Path, claims: Claims) -> Report:
    """Read what ``capsule verify`` wrote about the run of ``claims``.

    Raises:
        CapsuleError: CAP-P101, P102.
    """
    try:
        data = _bytes(path)
        canonical_json(json.loads(data))  # no NaN, no integer that is not exact
        report = Report.model_validate_json(data)
        if report.replica is not None and report.replica.evaluation is not None:
            evaluation_points(report.replica.evaluation)
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error.strerror if isinstance(error, OSError) else error).splitlines()[0]
        raise CapsuleError(
            "CAP-P101",
            f"{path.name} is neither a report nor a receipt of capsule verify: {reason}",
            fix="Give files that 'capsule verify --report FILE' or --sign wrote.",
            exit_code=ExitCode.USAGE,
        ) from error
    if report.claim_id != claims.claim_id():
        raise CapsuleError(
            "CAP-P102",
            f"{path.name} is about claim id {report.claim_id}, the bundle's is {claims.claim_id()}",
            fix="Give reports on this bundle only.",
            exit_code=ExitCode.USAGE,
        )
    return report


def crate_of(subject: Subject) -> str:
    """Return ``ro-crate-metadata.json``: as the bundle has it, or would if it were made today."""
    files = {each.path: (each.role, each.media_type) for each in subject.files}
    files.pop(CRATE, None)
    crate = run_crate(subject.lock, subject.claims, subject.observations, files)
    return json.dumps(json.loads(crate), indent=2, ensure_ascii=False) + "\n"


# --- curves -------------------------------------------------------------------------------------


def evaluation_points(evaluation: contract.Evaluation) -> tuple[EvaluationPoint, ...]:
    """Return evaluations as numbers.

    Raises:
        ValueError: A return is no C99 hexadecimal float.
    """
    try:
        return tuple(
            EvaluationPoint(point.step, tuple(float.fromhex(value) for value in point.returns))
            for point in evaluation.points
        )
    except OverflowError as error:
        raise ValueError(str(error)) from error


def _claimed_points(claims: TrainingClaims) -> tuple[EvaluationPoint, ...]:
    try:
        return evaluation_points(claims.evaluation)
    except ValueError as error:
        raise CapsuleError(
            "CAP-P103",
            "the evaluation in claims.json holds something that is not a C99 hexadecimal float: "
            f"{error}",
            fix="Do not trust this bundle; ask its signer for a consistent one.",
            exit_code=ExitCode.TAMPERED,
        ) from error


def _curves(
    bundle: OpenedBundle, claims: TrainingClaims | ProgramClaims
) -> tuple[tuple[EvaluationPoint, ...], tuple[Series, ...], int]:
    if isinstance(claims, TrainingClaims):
        lines = _Lines(bundle.member(run_bundle.RUN + contract.EVENTS))
        series = _series(lines, ("episode_return", "loss"))
        return _claimed_points(claims), series, lines.unread
    metrics, returns = (_Lines(_output(bundle, claims, name)) for name in (METRICS, EVALUATIONS))
    series, points = _series(metrics, None), _evaluations(returns)
    return points, series, metrics.unread + returns.unread


def _output(bundle: OpenedBundle, claims: ProgramClaims, name: str) -> Path | None:
    """Find what the helper wrote, in whatever folder the program had it write."""
    members = run_bundle.claimed_outputs(claims)
    found = [path for path in sorted(members) if PurePosixPath(path).name == name]
    return bundle.member(members[found[0]]) if found else None


class _Lines:
    """The JSON objects of a file that nobody vouches for: what is none is counted and left out."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.unread = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._path is None:
            return
        with self._path.open("rb") as stream:
            for _ in range(MAX_LINES):
                line = stream.readline(MAX_LINE_BYTES)
                if not line:
                    return
                document = _object(line)
                if document is None:
                    self.unread += 1
                else:
                    yield document


def _object(line: bytes) -> dict[str, Any] | None:
    """Parse a line; None if it is no object with a step."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):  # counted by the caller
        return None
    step = document.get("step") if isinstance(document, dict) else None
    return document if type(step) is int and 0 <= step <= MAX_STEP else None


def _series(lines: _Lines, names: Sequence[str] | None) -> tuple[Series, ...]:
    """Gather numbers by step; a resumed run tells some steps again, and its last word counts.

    Args:
        lines: Objects with a step.
        names: What to gather; None: the first :data:`MAX_SERIES` that there are.
    """
    values: dict[str, dict[int, float]] = {name: {} for name in names or ()}
    for line in lines:
        for name in line.keys() - {"step"} if names is None else names:
            value = line.get(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                values.setdefault(name, {})[line["step"]] = value
    kept = [name for name in (names or sorted(values)) if values[name]][:MAX_SERIES]
    return tuple(Series(name, _sorted(values[name])) for name in kept)


def drawable(value: float) -> bool:
    """Tell whether a number has a place in a picture."""
    return abs(value) <= HUGE  # false for NaN, too


def _sorted(values: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    return tuple((step, float(value)) for step, value in sorted(values.items()) if drawable(value))


def _evaluations(lines: _Lines) -> tuple[EvaluationPoint, ...]:
    points = {}
    for line in lines:
        returns = line.get("returns")
        if not isinstance(returns, list) or not returns:
            lines.unread += 1
            continue
        try:
            points[line["step"]] = tuple(float(value) for value in returns)
        except (TypeError, ValueError, OverflowError):
            lines.unread += 1
    return tuple(EvaluationPoint(step, points[step]) for step in sorted(points))


# --- the image's SBOM ---------------------------------------------------------------------------


def read_inventory(sbom: bytes, lock: Lock) -> Inventory:
    """Sum up an image's SBOM, which :func:`check_consistency` has found to be one."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    components = parse_canonical_json(sbom)["components"]
    asked: set[str] = {
        canonicalize_name(Requirement(each).name) for each in lock.spec.image.packages
    }
    asked |= {*lock.spec.image.debian, *FOUNDATION}
    return Inventory(
        kinds=Counter(_kind(component) for component in components),
        packages=tuple(
            Package(component["name"], component.get("version", ""), _licence(component))
            for component in components
            if component["name"] in asked or component.get("group") == "NVIDIA"
        ),
        licences=Counter(_licence(component) for component in components),
    )


def _kind(component: Mapping[str, Any]) -> str:
    purl = str(component.get("purl", ""))
    if purl.startswith("pkg:pypi/"):
        return "Python package"
    if purl.startswith("pkg:deb/"):
        return "Debian package"
    return str(component["type"]).replace("-", " ")


def _licence(component: Mapping[str, Any]) -> str:
    choices = component.get("licenses") or []
    names = []
    for choice in choices:
        licence = choice.get("license", {})
        names.append(choice.get("expression") or licence.get("id") or licence.get("name"))
    return ", ".join(name for name in names if name) or "not asserted"
