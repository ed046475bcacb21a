"""The verdict in words: what was shown, by whom, on what machine, and what was not shown.

The page and the terminal tell this one story.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from capsule.bundle.claims import Observations
from capsule.bundle.reproducing import what_ran
from capsule.report.subject import Subject
from capsule.verification.verdict import Report

Tone = Literal["good", "bad", "open"]

EXECUTED = ("reproduced", "not-reproduced")  # how verdicts begin that rest on a re-execution


@dataclass(frozen=True)
class Story:
    """What to say of a subject.

    Attributes:
        tone: Good if somebody signed that it was run again and is the same; bad if anybody says
            that it is not; open otherwise.
        headline: In a few words.
        sentence: In one sentence.
        shown: What was shown, by whom and where.
        not_shown: What was not.
    """

    tone: Tone
    headline: str
    sentence: str
    shown: tuple[str, ...]
    not_shown: tuple[str, ...]


def tell(subject: Subject) -> Story:
    """Tell what is known of a run."""
    voices = _voices(subject)
    good = [verdict for verdict, reproduced in voices if reproduced]
    signed = any(receipt.counts for receipt in subject.receipts.receipts)
    tone: Tone = "bad" if len(good) < len(voices) else "good" if good and signed else "open"
    headline, sentence = _verdict(good, len(voices), subject)
    if voices and not signed:
        whose = "An unsigned report says" if len(voices) == 1 else "Unsigned reports say"
        headline = f"{whose}: {headline[0].lower()}{headline[1:]}"
    return Story(tone, headline, sentence, _shown(subject), _not_shown(subject, bool(voices)))


def _voices(subject: Subject) -> list[tuple[str, bool]]:
    """Return the verdict of each re-execution that counts, and whether the run was reproduced."""
    reports = [
        (report.verdict, report.verdict != "not-reproduced")
        for _, report in subject.reports
        if report.verdict.startswith(EXECUTED)
    ]
    receipts = [
        (receipt.verdict, receipt.verdict != "not-reproduced")
        for receipt in subject.receipts.receipts
        if receipt.counts
    ]
    return [*reports, *receipts]


def _verdict(good: list[str], executed: int, subject: Subject) -> tuple[str, str]:
    if not executed:
        what = "no report decides whether it recurs" if subject.reports else "it was not run again"
        return (
            "Signed, not reproduced yet",
            f"The bundle is intact, and {what}: its results are its signer's claims.",
        )
    say = "A report says" if executed == 1 else f"{executed} reports and receipts say"
    again = f"{say} that it was run again"
    if not good:
        return "Not reproduced", f"{again}, and gave something else."
    if len(good) < executed:
        bad = executed - len(good)
        return "Not always reproduced", f"{again}: {len(good)} that it is the same, {bad} not."
    grades = set(good)
    if grades == {"reproduced-bitwise"}:
        return "Reproduced, bit for bit", f"{again}, with the very same results."
    if "reproduced-content" in grades and "reproduced-statistical" not in grades:
        content = "the content of every output; dates or packaging differ"
        return "Reproduced in content", f"{again}: not always the same bits, but {content}."
    if "reproduced-statistical" in grades:
        tolerance = "its returns agree within the tolerance that the spec declares"
        return "Reproduced statistically", f"{again}: not always the same bits, but {tolerance}."
    return "Reproduced in part", f"{again}; not every time to the end."


def _shown(subject: Subject) -> tuple[str, ...]:
    facts = [
        f"{_capital(what_ran(subject.lock.spec))}, on {machine_of(subject.observations)}.",
        "The file is unchanged since it was signed, and its documents agree with each other.",
    ]
    if subject.signers:
        facts.append(f"It was signed with {', '.join(subject.signers)}, which the reader named.")
    facts += [_of_report(name, report) for name, report in subject.reports]
    if any(receipt.counts for receipt in subject.receipts.receipts):
        facts.append(f"Receipts by keys that the reader named: {subject.receipts.summary}.")
    return tuple(facts)


def _of_report(name: str, report: Report) -> str:
    here = {row.field: row.here for row in report.environment}
    parts = [here.get("cpu.name"), here.get("gpu.name"), here.get("os")]
    machine = ", ".join(part for part in parts if part and part not in ("unknown", "none"))
    place = f" on {machine}" if machine else ""
    return f"{name}, mode {report.mode}{place}: {report.verdict}, {report.summary}{_cause(report)}."


def _cause(report: Report) -> str:
    """Name the most likely cause of a difference, if one was found."""
    causes = () if report.divergence is None else report.divergence.causes
    return f"; cause: {causes[0].shown.replace('-', ' ')}" if causes else ""


def _not_shown(subject: Subject, executed: bool) -> tuple[str, ...]:
    left = []
    if not subject.signers:
        left.append(
            f"Who signed it: the bundle names {subject.fingerprint}, and no key was given to check "
            "that with."
        )
    if not executed:
        left.append("That the run took place, or that it would give the same again.")
    if subject.reports:
        left.append(
            "That the reports are true: they are not signed. Run capsule verify to check for "
            "yourself."
        )
    silent = [receipt for receipt in subject.receipts.receipts if not receipt.counts]
    if silent:
        left.append(
            f"{len(silent)} of the receipts do not count: their signers are the bundle's own, or "
            "not trusted by the reader."
        )
    if subject.claims.relaxations:
        left.append(f"Guarantees that were given up: {', '.join(subject.claims.relaxations)}.")
    open_sources = [
        row.source for row in subject.ledger.rows if row.treatment in ("assumed", "unsupported")
    ]
    if open_sources:
        left.append(f"Control over: {', '.join(open_sources)}.")
    left.append(
        f"Anything about other seeds: this is one run, with root seed "
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
        " ".join(filter(None, (machine.os.id, machine.os.version_id))),
    ]
    place = "" if engine in (None, "process") else f" in {engine}"
    return ", ".join(part for part in parts if part) + place


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
