"""What a bundle, a run directory or a lock contains, on one screen and as JSON values.

Nothing is judged here: no key is trusted, nothing is executed, and the claims of a bundle are shown
as its signer states them.
"""

from __future__ import annotations

import math
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from capsule.bundle import run_bundle
from capsule.bundle.bundle import OpenedBundle
from capsule.bundle.claims import Observations, ProgramClaims, TrainingClaims
from capsule.bundle.manifest import BundleFile
from capsule.bundle.reproducing import what_ran
from capsule.bundle.run_bundle import RecordedRun
from capsule.entropy.ledger import Ledger
from capsule.experiment.canonical import parse_canonical_json
from capsule.experiment.lock import Lock, LockedProject
from capsule.host.wording import counted
from capsule.image.data.listing import size_text
from capsule.report.facts import claimed_results, lasted
from capsule.report.runs import FoundRun
from capsule.report.story import machine_of
from capsule.report.subject import claimed_evaluation
from capsule.report.text import bytes_text, listed_relaxations, print_line, printable

if TYPE_CHECKING:
    from rich.console import Console

LABEL = 9  # columns, so that 'sha256:' and a digest fit on the rest of a line
COLUMNS = 80
MAX_LINES = 3  # of one value
MAX_ROLES = 6
UNCHECKED = "stated by the bundle; the signature was not checked"
VALID = "its signature is valid; whether to trust its owner was not checked"

Row = tuple[str, str]


class Inspected(NamedTuple):
    """The contents of a file or folder, as rows of label and text, and as JSON values."""

    rows: tuple[Row, ...]
    document: dict[str, Any]


def show_rows(rows: Iterable[Row], console: Console) -> None:
    """Print rows in at most 80 columns, each value in at most three lines; words stay whole.

    A narrower terminal gets more lines, because the end of a value may be what limits it.
    """
    widest = COLUMNS - LABEL
    width = max(min(console.width, COLUMNS) - LABEL, 1)
    max_lines = MAX_LINES * math.ceil(widest / width)
    for label, value in rows:
        lines = textwrap.wrap(
            printable(value),
            width,
            max_lines=max_lines,
            placeholder=" …",
            break_on_hyphens=False,
            break_long_words=False,  # paths and digests are copied
        )
        for number, line in enumerate(lines):
            print_line(console, f"{'' if number else label:<{LABEL}}{line}")


def inspect_run(opened: OpenedBundle) -> Inspected:
    """Return what is in the bundle of a run.

    Raises:
        CapsuleError: CAP-B144, CAP-B145: a document is missing or malformed; CAP-P103: a claimed
            return is not a number.
    """
    run = RecordedRun.read(opened)
    claims, seen = run.claims, run.observations()
    ledger = opened.read(run_bundle.LEDGER, Ledger)
    treatments = _treatments(ledger)
    embedded = run_bundle.IMAGE_ARCHIVE in opened.files
    with_data = run_bundle.carries_data(run.lock, opened.files)
    rows = (
        *bundle_rows(opened, run.lock.spec.name),
        ("run", what_ran(run.lock.spec)),
        ("result", claimed_results(run.lock, claims, claimed_evaluation(opened, claims))),
        ("claims", _claimed(claims)),
        ("relaxed", listed_relaxations(claims.relaxations) or "none"),
        ("sources", _randomness(ledger)),
        ("machine", machine_of(seen)),
        ("executed", _executed(seen)),
        ("lock", claims.lock),
        ("image", "none (plain process)" if claims.image is None else claims.image.config),
        ("made of", _made_of(run.lock) + ("; the bundle has the image" if embedded else "")),
        *_data_rows(run.lock, "; the bundle has them" if with_data else ""),
        ("files", files_text(opened.manifest.files)),
    )
    document = {
        **bundle_document(opened),
        # These are the stored forms, without fields whose value stands for their absence.
        "claims": parse_canonical_json(claims.document()),
        "observations": parse_canonical_json(seen.document()),
        "sources_of_nondeterminism": treatments,
        "spec": parse_canonical_json(run.lock.spec.document()),
        "image_embedded": embedded,
    }
    return Inspected(rows, document)


def _data_rows(lock: Lock, where: str) -> Iterator[Row]:
    if lock.data is not None:
        sets = "; ".join(f"{name} ({size_text(pin)})" for name, pin in lock.data.items())
        yield "data", sets + where


def inspect_lock(lock: Lock) -> Inspected:
    """Return what is in a lock."""
    rows: list[Row] = [
        ("lock", "of a run"),
        ("name", lock.spec.name),
        ("digest", lock.digest()),
        ("run", what_ran(lock.spec)),
        ("made of", _made_of(lock)),
        *_data_rows(lock, ""),
        ("packages", ", ".join(f"{each.name} {each.version}" for each in lock.image.wheels)),
    ]
    if lock.project is not None:
        rows.append(("program", _project(lock.project)))
    document = {
        "schema": "capsule/shown/v1",
        "kind": "lock",
        "digest": lock.digest(),
        "lock": parse_canonical_json(lock.document()),
    }
    return Inspected(tuple(rows), document)


def inspect_directory(run: FoundRun) -> Inspected:
    """Return what is in a run directory."""
    rows: list[Row] = [
        ("folder", f"of a run, {run.state}; {bytes_text(run.bytes)}"),
        ("started", f"{run.started:%Y-%m-%d %H:%M:%S} UTC"),
    ]
    if run.problem is not None:
        rows.append(("problem", run.problem))
    if run.step:
        total = "" if run.total_steps is None else f" of {run.total_steps:,}"
        rows.append(("steps", f"{run.step:,}{total}"))
    if run.evaluation_return is not None:
        rows.append(("result", f"mean return {run.evaluation_return:.6g} of the last evaluation"))
    elif run.episode_return is not None:
        rows.append(("training", f"mean return {run.episode_return:.6g} of the last 100 episodes"))
    if run.lock is not None:
        rows += [
            ("name", run.lock.spec.name),
            ("run", what_ran(run.lock.spec)),
            ("lock", run.lock.digest()),
            ("made of", _made_of(run.lock)),
        ]
    rows += [("bundle", str(run.bundle))] if run.bundle is not None else []
    if run.state in ("interrupted", "failed", "not started"):
        rows.append(("next", f"capsule run --resume {shlex.quote(str(run.path))}"))
    document = {"schema": "capsule/shown/v1", "kind": "run-directory", **run.document()}
    return Inspected(tuple(rows), document)


def bundle_rows(opened: OpenedBundle, name: str) -> Iterator[Row]:
    """Yield the rows of a run's and of a study's bundle: what it is, and who signed it."""
    yield "bundle", f"of a {opened.manifest.kind}; intact: its files are those that it lists"
    yield "name", name
    yield "claim id", opened.claim_id
    for signer in opened.signers:
        # An SSH signature contains its key, with which open_bundle() has checked it. The envelope
        # names a key only by its fingerprint.
        yield "signer", f"{signer.key} ({VALID if signer.kind == 'sshsig' else UNCHECKED})"


def bundle_document(opened: OpenedBundle) -> dict[str, Any]:
    """Return the JSON values of a run's and of a study's bundle."""
    return {
        "schema": "capsule/shown/v1",
        "kind": f"{opened.manifest.kind}-bundle",
        "claim_id": opened.claim_id,
        "signers": [
            {"key": signer.key, "kind": signer.kind, "checked": signer.kind == "sshsig"}
            for signer in opened.signers
        ],
        "files": [file.model_dump(mode="json", by_alias=True) for file in opened.manifest.files],
    }


def files_text(files: Iterable[BundleFile]) -> str:
    """Return the number and size of files, in all and by role."""
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for file in files:
        sizes[file.role] += file.size
        counts[file.role] += 1
    roles = [f"{counts[role]:,} {role} ({bytes_text(size)})" for role, size in sizes.most_common()]
    others = ["..."] * (len(roles) > MAX_ROLES)
    return f"{counts.total():,} of {bytes_text(sizes.total())}: " + ", ".join(
        (*roles[:MAX_ROLES], *others)
    )


def _claimed(claims: TrainingClaims | ProgramClaims) -> str:
    if isinstance(claims, ProgramClaims):
        return claims.described
    parts = (
        f"a trace of {counted(claims.trace.records, 'record')}",
        counted(len(claims.checkpoints), "checkpoint"),
        counted(len(claims.streams), "random stream"),
        counted(len(claims.evaluation.points), "evaluation"),
        counted(claims.steps, "agent step"),
        counted(claims.episodes, "episode"),
    )
    return ", ".join(parts)


def _treatments(ledger: Ledger) -> dict[str, list[str]]:
    """Return the sources of nondeterminism by their treatment."""
    found: dict[str, list[str]] = {}
    for row in ledger.rows:
        found.setdefault(row.treatment, []).append(row.source)
    return found


def _randomness(ledger: Ledger) -> str:
    """Describe the ledger: how many sources of nondeterminism were treated how."""
    counts = Counter(row.treatment for row in ledger.rows)
    treated = ", ".join(f"{number} {treatment}" for treatment, number in counts.items())
    left = ", ".join(row.source for row in ledger.uncontrolled)
    return f"{treated}; not controlled: {left}" if left else treated


def _executed(seen: Observations) -> str:
    speed = "" if seen.steps_per_second is None else f", {seen.steps_per_second:,.0f} steps/s"
    return f"{seen.started}, {lasted(seen)}{speed}, by Capsule {seen.capsule}"


def _made_of(lock: Lock) -> str:
    image = lock.image
    packages = (
        f"{counted(len(image.wheels), 'wheel')}, {counted(len(image.debian), 'Debian package')}"
    )
    return f"{packages}, training code {image.code.version} ({image.recipe})"


def _project(project: LockedProject) -> str:
    git = project.git
    commit = "" if git is None else f", commit {git.commit[:12]}{' with changes' * git.dirty}"
    return f"{counted(len(project.files), 'file')} of {bytes_text(project.size)}{commit}"
