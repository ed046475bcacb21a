"""The verdict in words: what was shown, by which key, on which machine, and what was not shown.

The page and the terminal show the same statements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from capsule.bundle.claims import Observations, recorded_inputs
from capsule.bundle.reproducing import what_ran
from capsule.host.wording import agreeing, counted
from capsule.report.subject import ReportedRun
from capsule.report.text import listed, listed_relaxations
from capsule.verification.verdict import Report

Tone = Literal["good", "bad", "open"]

MAX_UNCHECKED = 4  # files that a sentence names

EXECUTED = ("reproduced", "not-reproduced")  # how verdicts begin that rest on a re-execution


@dataclass(frozen=True)
class Story:
    """The main statements about a subject.

    Attributes:
        tone: Good if a trusted receipt or, beside one, a report confirms the results and none
            contradicts them; bad if one contradicts them; open otherwise.
        headline: The verdict in a few words.
        sentence: The verdict in one sentence.
        shown: Statements that were shown, with their sources.
        not_shown: Statements that were not shown.
    """

    tone: Tone
    headline: str
    sentence: str
    shown: tuple[str, ...]
    not_shown: tuple[str, ...]


def tell(subject: ReportedRun) -> Story:
    """Return the main statements about a run."""
    attestations = _attestations(subject)
    good = [verdict for verdict in attestations if verdict != "not-reproduced"]
    signed = any(receipt.counts for receipt in subject.receipts.receipts)
    # Anyone can write an unsigned report, so reports alone have no good tone. A report that
    # contradicts is enough for a bad one.
    tone: Tone = "bad" if len(good) < len(attestations) else "good" if good and signed else "open"
    headline, sentence = _verdict(good, len(attestations), subject)
    if attestations and not signed:
        whose = "An unsigned report says" if len(attestations) == 1 else "Unsigned reports say"
        # As long as no receipt counts, the headline names its source.
        headline = f"{whose}: {headline[0].lower()}{headline[1:]}"
    return Story(tone, headline, sentence, _shown(subject), _not_shown(subject, bool(attestations)))


def _attestations(subject: ReportedRun) -> list[str]:
    """Return the verdict of each re-execution that counts."""
    reports = [report.verdict for _, report in subject.reports]
    receipts = [receipt.verdict for receipt in subject.receipts.receipts if receipt.counts]
    return [*(verdict for verdict in reports if verdict.startswith(EXECUTED)), *receipts]


def _verdict(good: list[str], executed: int, subject: ReportedRun) -> tuple[str, str]:
    if not executed:
        what = "no report is conclusive" if subject.reports else "its run was not executed again"
        return (
            "Signed, not reproduced yet" if subject.signers else "Not reproduced yet",
            f"The bundle is intact, but {what}. Its results are its signer's claims.",
        )
    receipts = sum(receipt.counts for receipt in subject.receipts.receipts)
    sources = ((executed - receipts, "report"), (receipts, "receipt"))
    named = " and ".join(counted(number, what) for number, what in sources if number)
    again = f"According to {named}, the run was executed again"
    if not good:
        return "Not reproduced", f"{again} and gave other results."
    if len(good) < executed:
        # A verification that was signed left a report and a receipt, so executions are not counted.
        kinds = " and ".join(f"{what}s" for number, what in sources if number)
        split = f"the results agreed in {len(good)} of {executed} {kinds}"
        return "Not always reproduced", f"{again}, and {split}."
    grades = set(good)
    if grades == {"reproduced-bitwise"}:
        return "Reproduced, bit for bit", f"{again} and gave identical results."
    if "reproduced-content" in grades and "reproduced-statistical" not in grades:
        content = "the content of every output, but not always the same dates or packaging"
        return "Reproduced in content", f"{again} and gave {content}."
    if "reproduced-statistical" in grades:
        tolerance = "returns within the tolerance that the spec declares, but not always equal bits"
        return "Reproduced statistically", f"{again} and gave {tolerance}."
    return "Reproduced in part", f"{again} with identical results, but not always to its end."


def _shown(subject: ReportedRun) -> tuple[str, ...]:
    ran = what_ran(subject.lock.spec)
    agreeing = "its documents"
    if subject.unchecked:
        agreeing = "those of its documents that were checked"
    facts = [
        f"{ran[:1].upper()}{ran[1:]}, on {machine_of(subject.observations)}.",
        f"The {_unchanged(subject)}, and {agreeing} agree with each other.",
    ]
    if subject.signers:
        facts.append(f"It was signed with a trusted key: {', '.join(subject.signers)}.")
    facts += [_of_report(name, report) for name, report in subject.reports]
    if any(receipt.counts for receipt in subject.receipts.receipts):
        facts.append(f"Receipts by trusted keys: {subject.receipts.summary}.")
    return tuple(facts)


def _unchanged(subject: ReportedRun) -> str:
    """Describe the state of the files. Without a trusted key, no signature was checked."""
    if subject.signers:
        return "file is unchanged since it was signed"
    return "files are those that the bundle lists"


def _of_report(name: str, report: Report) -> str:
    here = {row.field: row.here for row in report.environment}
    parts = [here.get("cpu.name"), here.get("gpu.name"), here.get("os")]
    machine = ", ".join(part for part in parts if part and part not in ("unknown", "none"))
    place = f" on {machine}" if machine else ""
    summary = report.summary.partition("\n")[0]  # the output of a failed program follows
    said = f"{report.verdict}, {summary}{_cause(report)}."
    remedy = "" if report.error is None else f" {report.error['fix']}"
    return f"{name}, mode {report.mode}{place}: {said}{remedy}"


def _cause(report: Report) -> str:
    """Name the most likely cause of a difference, if one was found."""
    causes = () if report.divergence is None else report.divergence.causes
    return f"; cause: {causes[0].shown.replace('-', ' ')}" if causes else ""


def _not_shown(subject: ReportedRun, executed: bool) -> tuple[str, ...]:
    left = []
    if not subject.signers:
        left.append(
            f"Who signed it. The bundle names {subject.fingerprint}, but no trusted key was given "
            "to check this."
        )
    if unchecked := subject.unchecked:
        names = ", ".join(unchecked[:MAX_UNCHECKED])
        if (more := len(unchecked) - MAX_UNCHECKED) > 0:
            names += f" and {more} more"
        left.append(
            f"That these files follow from the run: {names}. The bundle states that another "
            "version of Capsule made it, so they were not checked."
        )
    if not executed:
        left.append("That the run took place, or that executing it again gives the same results.")
    # There can be any number of rejected receipts, so these come before them.
    if subject.claims.relaxations:
        given_up = listed_relaxations(subject.claims.relaxations)
        left.append(f"Guarantees that were given up (relaxations): {given_up}.")
    if records := [*recorded_inputs(subject.claims)]:
        left.append(
            f"That the recorded {' and '.join(each.removeprefix('the ') for each in records)} came "
            "about by itself. A re-execution follows what the signer recorded, or chose."
        )
    if subject.reports:
        left.append(
            "That the reports are true, because they are not signed. Run capsule verify to check "
            "them."
        )
    left += [
        f"What {refused.file} states. It was rejected: {refused.message}."
        for refused in subject.receipts.refused
    ]
    silent = [receipt for receipt in subject.receipts.receipts if not receipt.counts]
    if silent:
        state = agreeing(len(silent), "states. It does", "state. They do")
        reasons = ", ".join(sorted({receipt.standing for receipt in silent}))
        left.append(f"What {len(silent)} of the receipts {state} not count: {reasons}.")
    if open_sources := [row.source for row in subject.ledger.uncontrolled]:
        left.append(f"Control over these sources of nondeterminism: {listed(open_sources)}.")
    left.append(
        f"How the results vary with the seed. This is one run, with root seed "
        f"{subject.lock.spec.seeds.root}."
    )
    return tuple(left)


def machine_of(observations: Observations) -> str:
    """Name the machine of a run in a few words: processor, GPUs, memory, system, engine."""
    machine, engine = observations.fingerprint, observations.engine.get("name")
    parts = [
        machine.cpu.name or "an unknown processor",
        *(gpu.name or "an unknown GPU" for gpu in machine.gpus),
        f"{machine.memory_bytes / (1 << 30):.0f} GiB",
        machine.os.title,
    ]
    place = "" if engine in (None, "process") else f" in {engine}"
    return ", ".join(part for part in parts if part) + place
