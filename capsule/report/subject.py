"""The subject of a report: a bundle with the reports and receipts on it, read once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path, PurePosixPath
from statistics import fmean
from typing import Any, BinaryIO

from pydantic import ValidationError

from capsule.bundle import run_bundle
from capsule.bundle.bundle import OpenedBundle
from capsule.bundle.claims import (
    Claims,
    Observations,
    ProgramClaims,
    TrainingClaims,
    has_population,
)
from capsule.bundle.crate import CRATE, run_crate
from capsule.bundle.keys import PublicKey
from capsule.bundle.manifest import BundleFile
from capsule.bundle.run_bundle import RecordedRun
from capsule.bundle.tally import Original, Receipts, read_receipts
from capsule.entropy.ledger import Ledger
from capsule.experiment import contract
from capsule.experiment.canonical import canonical_json, parse_canonical_json, sha256_hex
from capsule.experiment.files import open_regular
from capsule.experiment.lock import Lock
from capsule.host.errors import CapsuleError
from capsule.host.streams import read_whole
from capsule.verification.integrity.consistency import check_consistency
from capsule.verification.vary import VARY_REPORT, VaryReport
from capsule.verification.verdict import Report

# Files that capsule.training.own_program.recorder writes.
METRICS = "metrics.jsonl"
EVALUATIONS = "evaluation.jsonl"
MAX_REPORT_BYTES = 16 << 20
MAX_LINE_BYTES = 1 << 16
MAX_LINES = 1_000_000
MAX_NAMES = 1_000  # of the quantities in a program's log
MAX_VALUES = 2_000_000  # of a program's log; each takes some hundred bytes of memory
MAX_SERIES = 8
MAX_STEP = 2**53 - 1
SHOWN_CHARACTERS = 40  # of a return that is not a number
NOT_ASSERTED = "not asserted"  # in the place of a component's licence
HUGE = 1e90  # larger numbers are not plotted, like infinities


@dataclass(frozen=True)
class Series:
    """A quantity over the steps of a run: finite values in ascending order of steps."""

    name: str
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class NetworkReturns:
    """The returns of one network, one per start, in the order of the starts."""

    step: int
    returns: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean of at least one return; NaN if they have none, or their sum is too large."""
        try:
            return fmean(self.returns)
        except (OverflowError, ValueError):  # of infinities of both signs
            return nan


@dataclass(frozen=True)
class Inventory:
    """A summary of the image's SBOM: components by kind and by licence.

    Of the main packages, it has the names, versions and licences.
    """

    kinds: Mapping[str, int]
    packages: tuple[tuple[str, str, str], ...]
    licences: Mapping[str, int]


@dataclass(frozen=True)
class ReportedRun:
    """An intact and consistent bundle, and the results of its re-executions.

    Attributes:
        bundle: File name.
        fingerprint: Fingerprint of the signer's key, as the bundle states it.
        signers: Trusted keys that signed the bundle, with identities if there are any.
        files: Every file of the manifest.
        unchecked: Files that this Capsule cannot judge, because another one is said to have made
            the bundle.
        evaluation: Claimed evaluations. For a program, those in its ``evaluation.jsonl``.
        series: Quantities that the run logged while it ran.
        unread: Number of lines of the log that could not be read.
        reports: Unsigned reports of ``capsule verify``, each with its file name; of those with
            ``--vary`` the control.
        varied: Reports of ``capsule verify --vary``, likewise.
        receipts: Receipts of ``capsule verify --sign``. Only those by trusted keys count, and
            none by the signer of the bundle.
    """

    bundle: str
    fingerprint: str
    signers: tuple[str, ...]
    files: tuple[BundleFile, ...]
    unchecked: tuple[str, ...]
    lock: Lock
    claims: TrainingClaims | ProgramClaims
    observations: Observations
    ledger: Ledger
    evaluation: tuple[NetworkReturns, ...]
    series: tuple[Series, ...]
    unread: int
    ancestry: contract.Ancestry | None
    inventory: Inventory
    reports: tuple[tuple[str, Report], ...]
    varied: tuple[tuple[str, VaryReport], ...]
    receipts: Receipts


def read_subject(
    bundle: OpenedBundle, name: str, files: Sequence[Path], keys: Sequence[PublicKey]
) -> ReportedRun:
    """Check the consistency of a bundle, and read it with the reports and receipts on it.

    Args:
        bundle: The bundle.
        name: Its file name.
        files: Reports and receipts, in any order. Equal ones are read once.
        keys: Trusted keys, whose receipts count.

    Raises:
        CapsuleError: CAP-V010, V011: the bundle is inconsistent; CAP-B144: a document is missing
            or malformed; CAP-P101: a file is not a report; CAP-P102: a report is about other
            claims; CAP-P103: a claimed return is not a number.
    """
    run = RecordedRun.read(bundle)
    lock, claims = run.lock, run.claims
    # What follows relies on this check: for example, the form of the SBOM and the requirements in
    # the lock.
    unchecked = check_consistency(run)
    evaluation, series, unread = _curves(bundle, claims)
    files = _different(files)
    signed = [path for path in files if _is_signed(path)]
    read = [(path.name, read_report(path, claims)) for path in files if path not in signed]
    return ReportedRun(
        bundle=name,
        fingerprint=bundle.fingerprint,
        signers=tuple(str(each) for each in bundle.signers if each.rejection_reason is None),
        files=bundle.manifest.files,
        unchecked=unchecked,
        lock=lock,
        claims=claims,
        observations=run.observations(),
        ledger=bundle.read(run_bundle.LEDGER, Ledger),
        evaluation=evaluation,
        series=series,
        unread=unread,
        ancestry=(
            bundle.read(run_bundle.POPULATION, contract.Ancestry) if has_population(lock) else None
        ),
        inventory=read_inventory(bundle.content(run_bundle.IMAGE_SBOM), lock),
        reports=tuple((each, _control(report)) for each, report in read),
        varied=tuple((each, report) for each, report in read if isinstance(report, VaryReport)),
        receipts=read_receipts(Original.of(bundle), signed, keys),
    )


def _different(files: Sequence[Path]) -> Sequence[Path]:
    """Return the first of each group of equal files, which would be counted several times."""
    found: dict[str, Path] = {}
    for path in files:
        try:
            found.setdefault(sha256_hex(_bytes(path)), path)
        except (OSError, ValueError):  # its reader reports it
            found[str(path)] = path
    return list(found.values())


def _is_signed(path: Path) -> bool:
    """Tell a receipt, which is a DSSE envelope, from a report and anything else."""
    try:
        document = json.loads(_bytes(path))
    except (OSError, ValueError, RecursionError):  # read_report reports it
        return False
    return isinstance(document, dict) and "payloadType" in document


def _bytes(path: Path) -> bytes:
    with open_regular(path) as stream:
        return read_whole(stream, MAX_REPORT_BYTES)


def _reason(error: OSError | ValueError | RecursionError) -> str:
    """Say why a file is not a report, in the words of this page and not in those of a library."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, json.JSONDecodeError):
        place = f"the first mistake is in line {error.lineno}, column {error.colno}"
        return f"it is not JSON; {place}" if error.doc.strip() else "it is empty"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not text in UTF-8; the first mistake is in byte {error.start + 1:,}"
    if isinstance(error, RecursionError):
        return "its lists are nested too deeply"
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    if not first["loc"]:
        return "it is not a JSON object"
    field = f"the field {'.'.join(map(str, first['loc']))}"
    kinds = {"missing": f"{field} is missing", "extra_forbidden": f"{field} is not known"}
    return kinds.get(first["type"], f"{field} has an invalid value")


def _control(report: Report | VaryReport) -> Report:
    return report.control if isinstance(report, VaryReport) else report


def read_report(path: Path, claims: Claims) -> Report | VaryReport:
    """Read a report of ``capsule verify`` on the run of ``claims``.

    Raises:
        CapsuleError: CAP-P101, P102.
    """
    try:
        data = _bytes(path)
        document = json.loads(data)
        canonical_json(document)  # no NaN, no integer that is not exact
        varied = isinstance(document, dict) and document.get("schema") == VARY_REPORT
        found = (VaryReport if varied else Report).model_validate_json(data)
        report = _control(found)
        if report.replica is not None and report.replica.evaluation is not None:
            # This rejects malformed returns here, since the page reads them without a handler.
            evaluation_points(report.replica.evaluation)
    except (OSError, ValueError, RecursionError) as error:
        raise CapsuleError(
            "CAP-P101",
            f"{path.name} is neither a report nor a receipt of capsule verify: {_reason(error)}",
            fix="Give files that 'capsule verify --report FILE' or --sign wrote.",
        ) from error
    if report.claim_id is None:
        raise CapsuleError(
            "CAP-P102",
            f"{path.name} is about no claim id: verify did not read the claims of "
            f"{report.bundle}, with the verdict {report.verdict}",
            fix="Give a report of a verification that read the claims of this bundle.",
        )
    if report.claim_id != claims.claim_id():
        raise CapsuleError(
            "CAP-P102",
            f"{path.name} is about claim id {report.claim_id}, not {claims.claim_id()}",
            fix="Give reports on this bundle only.",
        )
    return found


def crate_of(subject: ReportedRun) -> str:
    """Return ``ro-crate-metadata.json`` of a bundle, made again from its other documents."""
    files = {each.path: (each.role, each.media_type) for each in subject.files}
    files.pop(CRATE, None)
    crate = run_crate(subject.lock, subject.claims, subject.observations, files)
    return json.dumps(json.loads(crate), indent=2, ensure_ascii=False) + "\n"


# --- curves -------------------------------------------------------------------------------------


def evaluation_points(evaluation: contract.Evaluation) -> tuple[NetworkReturns, ...]:
    """Return evaluations as numbers.

    Raises:
        ValueError: A return is not a C99 hexadecimal float.
    """
    return tuple(
        NetworkReturns(point.step, tuple(_return(point.step, value) for value in point.returns))
        for point in evaluation.points
    )


def _return(step: int, text: str) -> float:
    try:
        return float.fromhex(text)
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f"step {step} has the return {text[:SHOWN_CHARACTERS]!a}, which is not a C99 "
            "hexadecimal float of double precision"
        ) from error


def claimed_points(claims: TrainingClaims) -> tuple[NetworkReturns, ...]:
    """Return the evaluations of a training as numbers.

    Raises:
        CapsuleError: CAP-P103, one is not a C99 hexadecimal float.
    """
    try:
        return evaluation_points(claims.evaluation)
    except ValueError as error:
        raise CapsuleError(
            "CAP-P103",
            f"the evaluation in claims.json is malformed: {error}",
            fix="Do not trust this bundle; ask its signer for a consistent one.",
        ) from error


def claimed_evaluation(
    bundle: OpenedBundle, claims: TrainingClaims | ProgramClaims
) -> tuple[NetworkReturns, ...]:
    """Return the claimed evaluations; for a program, those in its ``evaluation.jsonl``.

    Raises:
        CapsuleError: CAP-P103, a return of a training is not a C99 hexadecimal float.
    """
    if isinstance(claims, TrainingClaims):
        return claimed_points(claims)
    return evaluations_of(recorded_lines(bundle, claims, EVALUATIONS))


def _curves(
    bundle: OpenedBundle, claims: TrainingClaims | ProgramClaims
) -> tuple[tuple[NetworkReturns, ...], tuple[Series, ...], int]:
    if isinstance(claims, TrainingClaims):
        events = bundle.member(run_bundle.RUN + contract.EVENTS)
        lines = JsonLines(lambda: events.open("rb"))
        # Lines are counted as they are read, so unread is known only after this.
        series = _series(lines, ("episode_return", "loss"))
        return claimed_points(claims), series, lines.unread
    metrics, returns = (recorded_lines(bundle, claims, name) for name in (METRICS, EVALUATIONS))
    series, points = _series(metrics.bounded(), None), evaluations_of(returns)
    return points, series, metrics.unread + returns.unread


class JsonLines:
    """The JSON objects of an untrusted file. Lines that are not JSON objects are counted.

    Attributes:
        unread: How many such lines there were.
    """

    def __init__(self, open_file: Callable[[], BinaryIO] | None) -> None:
        """Read lines from the file that ``open_file`` opens; None: there are none."""
        self._open = open_file
        self.unread = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._open is None:
            return
        with self._open() as stream:
            for _ in range(MAX_LINES):
                # A longer line comes in pieces, and each of them is taken for a line.
                line = stream.readline(MAX_LINE_BYTES)
                if not line:
                    return
                document = _object(line)
                if document is None:
                    self.unread += 1
                else:
                    yield document

    def bounded(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of a program that have room in memory; the others count as unread.

        A program chooses the names of its quantities, and how many values a line has.
        """
        names: set[str] = set()
        values = 0
        for line in self:
            sizes = {
                name: len(value) if isinstance(value, list) else 1
                for name, value in line.items()
                if name != "step"
            }
            added, more = sizes.keys() - names, sum(sizes.values())
            if len(names) + len(added) > MAX_NAMES or values + more > MAX_VALUES:
                self.unread += 1
                continue
            names |= added
            values += more
            yield line


def recorded_lines(bundle: OpenedBundle, claims: ProgramClaims, name: str) -> JsonLines:
    """Return the lines of a file that the recorder wrote to any folder of a program's outputs."""
    members = run_bundle.claimed_outputs(claims.outputs)
    found = first_named(members, name)
    if found is None:
        return JsonLines(None)
    path = bundle.member(members[found])
    return JsonLines(lambda: path.open("rb"))


def first_named(paths: Iterable[str], name: str) -> str | None:
    """Return the first path, in their order as text, of a file with some name; None without one."""
    return min((path for path in paths if PurePosixPath(path).name == name), default=None)


def _object(line: bytes) -> dict[str, Any] | None:
    """Parse a line. Return None if it is not an object with a step."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):  # counted by the caller
        return None
    step = document.get("step") if isinstance(document, dict) else None
    return document if type(step) is int and 0 <= step <= MAX_STEP else None


def _series(lines: Iterable[dict[str, Any]], names: Sequence[str] | None) -> tuple[Series, ...]:
    """Gather numbers by step. A resumed run logs some steps again, and the last value counts.

    Args:
        lines: Objects with a step.
        names: Quantities to gather, or None for the first :data:`MAX_SERIES`.
    """
    values: dict[str, dict[int, float]] = {name: {} for name in names or ()}
    for line in lines:
        for name in line.keys() - {"step"} if names is None else names:
            value = line.get(name)
            # JSON's true is an int in Python.
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                values.setdefault(name, {})[line["step"]] = value
    kept = [name for name in (names or sorted(values)) if values[name]][:MAX_SERIES]
    return tuple(
        Series(name, tuple((at, float(n)) for at, n in sorted(values[name].items()) if drawable(n)))
        for name in kept
    )


def drawable(value: float) -> bool:
    """Tell whether a number can be plotted."""
    return abs(value) <= HUGE  # false for NaN, too


def evaluations_of(lines: JsonLines) -> tuple[NetworkReturns, ...]:
    """Return the evaluations that the recorder of a program wrote, by step; the last ones count."""
    points = {}
    for line in lines.bounded():
        returns = line.get("returns")
        if not isinstance(returns, list) or not returns:
            lines.unread += 1
            continue
        try:
            points[line["step"]] = tuple(float(value) for value in returns)
        except (TypeError, ValueError, OverflowError):
            lines.unread += 1
    return tuple(NetworkReturns(step, points[step]) for step in sorted(points))


# --- the image's SBOM ---------------------------------------------------------------------------


def read_inventory(sbom: bytes, lock: Lock) -> Inventory:
    """Summarise an image's SBOM, whose form :func:`check_consistency` has checked."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    components = parse_canonical_json(sbom)["components"]
    asked: set[str] = {
        canonicalize_name(Requirement(each).name) for each in lock.spec.image.packages
    }
    # What every program of an image uses.
    foundation = ("libc6", f"libpython{lock.spec.image.python}-stdlib")
    asked |= {*lock.spec.image.debian, *foundation}
    return Inventory(
        kinds=Counter(_kind(component) for component in components),
        packages=tuple(
            (component["name"], component.get("version", ""), _licence(component))
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
        # In CycloneDX, a choice is an expression, or a licence with an SPDX identifier or a name.
        names.append(choice.get("expression") or licence.get("id") or licence.get("name"))
    return ", ".join(name for name in names if name) or NOT_ASSERTED
