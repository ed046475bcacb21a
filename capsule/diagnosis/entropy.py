"""A run's requests for entropy, as counted by the launcher and as seen by strace."""

from __future__ import annotations

import re
from pathlib import Path

from capsule.diagnosis.findings import Finding, finding
from capsule.entropy.report import EntropyReport

STRACE = ("strace", "-f", "-qq", "-e", "trace=getrandom")
_CALL = re.compile(rb"^(?:\d+ +)?getrandom\(", re.MULTILINE)  # not "resumed", its second half


def entropy_findings(report: EntropyReport, strace: Path) -> list[Finding]:
    """Return what the accounts of a run say about the system's randomness.

    Args:
        report: The launcher's account.
        strace: What strace wrote, if it was used.
    """
    found: list[Finding] = []
    if report.mode == "system":
        found.append(
            finding("CAP-D301", "entropy.mode is system, so the program used the system's entropy")
        )
    if report.bypassed and report.mode != "system":
        found.append(finding("CAP-D302", _bypassing(report), level="note"))
    if unanswered := sum(program.unanswered for program in report.programs):
        message = f"{unanswered} random devices were opened without an answer by Capsule"
        found.append(finding("CAP-D302", message))
    return found + _checked_by_strace(report, strace)


def unreached_findings(report: EntropyReport) -> list[Finding]:
    """Return the programs that the preloaded library was not mapped into."""
    names = {
        program.executable or program.process
        for program in report.programs
        if program.executed and not program.preloaded
    }
    return [finding("CAP-D112", ", ".join(sorted(names)))] if names else []


def _bypassing(report: EntropyReport) -> str:
    names = {
        program.executable or program.process
        for program in report.programs
        if program.getrandom.calls + program.devices.calls
    }
    return (
        f"{report.bypassed} requests of {', '.join(sorted(names))} reached the supervisor, which "
        "answered them"
    )


def _checked_by_strace(report: EntropyReport, strace: Path) -> list[Finding]:
    """Compare the supervisor's count of system calls with strace's."""
    if not report.supervised or not strace.exists():
        return []
    seen = len(_CALL.findall(strace.read_bytes()))
    known = sum(program.getrandom.calls + program.inside_libc.calls for program in report.programs)
    if seen <= known:
        return []
    message = f"strace saw {seen} getrandom calls, the supervisor saw {known}"
    return [finding("CAP-D303", message)]
