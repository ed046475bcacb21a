"""Threads and processes that race for work, recognised by the randomness that each of them drew.

Randomness is derived for each thread of each process. Where a pool gives a task to whichever worker
is ready, another worker draws, and the two runs' accounts differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from capsule.diagnosis.findings import Finding, finding
from capsule.entropy.evidence import is_own
from capsule.entropy.journal import FILE_NAME, read_journal
from capsule.experiment import contract

Draws = Mapping[tuple[str, str], int]  # process path and thread path to requests
_SHOWN = 3


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
    more = f", and {len(differing) - _SHOWN} more threads" if len(differing) > _SHOWN else ""
    message = f"requests for randomness in the two runs: {', '.join(shown)}{more}"
    return [finding("CAP-D111", message)]
