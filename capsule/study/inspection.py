"""What the bundle or the lock of a study contains, on one screen and as JSON values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from capsule.bundle.bundle import OpenedBundle
from capsule.host.wording import counted
from capsule.report.inspection import Inspected, Row, bundle_document, bundle_rows, files_text
from capsule.study.lock import StudyLock
from capsule.study.study_bundle import CLAIMS, LOCK
from capsule.study.tables import GroupRow, StudyClaims

MAX_SCORES = 8  # of groups in their tasks


def inspect_study(opened: OpenedBundle) -> Inspected:
    """Return what is in the bundle of a study, without computing its tables again.

    Raises:
        CapsuleError: CAP-B144, CAP-B145: a document is missing or malformed.
    """
    claims, lock = opened.read(CLAIMS, StudyClaims), opened.read(LOCK, StudyLock)
    rows = (
        *bundle_rows(opened, lock.study.name),
        ("members", _members(lock)),
        *_scores(claims),
        ("lock", claims.lock),
        ("files", files_text(opened.manifest.files)),
    )
    document = {
        **bundle_document(opened),
        "claims": claims.model_dump(mode="json", by_alias=True),
        "study": lock.study.model_dump(mode="json", by_alias=True),
    }
    return Inspected(rows, document)


def inspect_study_lock(lock: StudyLock) -> Inspected:
    """Return what is in the lock of a study."""
    rows = (
        ("lock", "of a study"),
        ("name", lock.study.name),
        ("digest", lock.digest()),
        ("members", _members(lock)),
        ("images", f"{len(lock.pins)}, of {counted(len(lock.specs), 'spec')}"),
    )
    document = {
        "schema": "capsule/shown/v1",
        "kind": "study-lock",
        "digest": lock.digest(),
        "lock": lock.model_dump(mode="json", by_alias=True),
    }
    return Inspected(rows, document)


def _members(lock: StudyLock) -> str:
    counts = Counter(lock.planned[member.name].group for member in lock.members)
    groups = ", ".join(f"{name} ({count})" for name, count in counts.items())
    return f"{counted(len(lock.members), 'run')} in {counted(len(counts), 'group')}: {groups}"


def _scores(claims: StudyClaims) -> Iterator[Row]:
    """Yield the scores of the first groups' final networks, as the study claims them."""
    rows = [row for row in claims.tables.groups if row.network == "final"]
    for row in rows[:MAX_SCORES]:
        yield "scores", f"{row.group}, {row.task}: {_summary(row)}, {counted(row.runs, 'run')}"
    if len(rows) > MAX_SCORES:
        more = counted(len(rows) - MAX_SCORES, "more score")
        yield "", f"and {more} ('capsule study report' has all)"


def _summary(row: GroupRow) -> str:
    """Return the means of a group. The bootstrap of one run says nothing about its spread."""
    mean, iqm = f"mean {row.mean:.6g}", row.interquartile_mean
    if row.runs == 1:
        return mean
    return f"{mean}, interquartile mean {iqm.estimate:.6g} ({iqm.low:.6g} to {iqm.high:.6g})"
