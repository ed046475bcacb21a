"""A run's requests for randomness: counted by the launcher, seen by strace, drawn by each thread.

Randomness is derived for each thread of each process. Where a pool gives a task to whichever worker
is ready, another worker draws, and the two runs' accounts differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from capsule.diagnosis.findings import Finding, finding
from capsule.entropy.evidence import is_own
from capsule.entropy.journal import FILE_NAME, read_journal
from capsule.entropy.report import EntropyReport
from capsule.experiment import contract
from capsule.experiment.files import open_regular
from capsule.host.wording import agreeing, counted

Draws = Mapping[tuple[str, str], int]  # process path and thread path to requests
STRACE = ("strace", "-f", "-qq", "-e", "trace=getrandom")
# A call that was interrupted has two lines, of which the second one has its arguments. Calls for
# one byte without flags are left out: the interposer makes them to find out whether a buffer can be
# written to, and the supervisor lets them through.
_CALL = re.compile(
    rb"^(?:\d+ +)?(?:getrandom\(|<\.\.\. getrandom resumed>)(?!.*<unfinished)(?!.*, 1, 0\) += )"
)
_SHOWN = 3  # threads named in a finding


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
    # These requests were answered, which makes them a note. Devices without an answer are a
    # warning.
    if report.bypassed and report.mode != "system":
        found.append(finding("CAP-D302", _bypassing(report), level="note"))
    if unanswered := sum(program.unanswered for program in report.programs):
        devices = counted(unanswered, "random device was", "random devices were")
        message = f"{devices} opened without an answer by Capsule"
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
        f"{counted(report.bypassed, 'request')} of {', '.join(sorted(names))} reached the "
        f"supervisor, which answered {agreeing(report.bypassed, 'it', 'them')}"
    )


def _checked_by_strace(report: EntropyReport, strace: Path) -> list[Finding]:
    """Compare the supervisor's count of system calls with strace's."""
    # Without the supervisor, no system calls were counted.
    if not report.supervised:
        return []
    try:
        # Without strace, the program can put a link to any file of this machine here.
        with open_regular(strace, follow=False) as stream:
            seen = sum(_CALL.match(line) is not None for line in stream)
    except OSError:
        return []
    # glibc's own requests are counted apart, and strace sees both kinds.
    known = sum(program.getrandom.calls + program.inside_libc.calls for program in report.programs)
    if seen <= known:
        return []
    message = f"strace saw {counted(seen, 'getrandom call')}, the supervisor saw {known:,}"
    return [finding("CAP-D303", message)]


def read_draws(run_directory: Path) -> Draws:
    """Count the requests of each thread in the last start of a run that has just ended.

    Capsule's own interpreter is left out, and so is what a run without a journal drew.

    Raises:
        CapsuleError: CAP-R201, CAP-R202, the journal cannot be read.
    """
    draws: dict[tuple[str, str], int] = {}
    starts = sorted((run_directory / contract.ENTROPY_STARTS).glob("start-*"))
    if not starts or not (starts[-1] / FILE_NAME).exists():
        return draws
    for use in read_journal(starts[-1]).uses:
        if not is_own(use.process):
            who = use.process, use.thread
            draws[who] = draws.get(who, 0) + use.calls
    return draws


def race_findings(first: Draws, second: Draws) -> list[Finding]:
    """Return a finding if a thread drew more in one run than in the other."""
    differing = [
        who for who in sorted({*first, *second}) if first.get(who, 0) != second.get(who, 0)
    ]
    if not differing:
        return []
    shown = [
        f"thread {thread} of process {process} {first.get((process, thread), 0)} and "
        f"{second.get((process, thread), 0)}"
        for process, thread in differing[:_SHOWN]
    ]
    left = len(differing) - _SHOWN
    more = f", and {counted(left, 'more thread')}" if left > 0 else ""
    message = f"requests for randomness in the two runs: {', '.join(shown)}{more}"
    return [finding("CAP-D111", message)]
