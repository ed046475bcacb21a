"""Contenders take turns: each is a process that waits while another runs a short segment.

So a machine's changing mood meets all alike, and a ratio is taken between segments that ran next to
each other. Used by contenders of other environments too, so nothing but the standard library is
imported at the top.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

SECONDS_TO_END = 10.0


def start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a contender, which then waits for its turn (:func:`serve`)."""
    return subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def serve(measure: Callable[[], float]) -> None:
    """Be a contender: measure a segment whenever one is asked for, until nobody asks any more."""
    for _ in sys.stdin:
        print(measure(), flush=True)


def segment(process: subprocess.Popen[str]) -> float:
    """Let one contender run its next segment; return what it measured."""
    stdin, stdout = process.stdin, process.stdout
    if stdin is None or stdout is None:
        raise ValueError("the process was started without pipes")
    stdin.write("go\n")
    stdin.flush()
    return float(stdout.readline())


def take_turns(
    processes: Mapping[str, subprocess.Popen[str]], rounds: int
) -> dict[str, list[float]]:
    """Let contenders run their segments in turn, and end them.

    Args:
        processes: Name to contender, each started by :func:`start`.
        rounds: Segments of each that count, after one each to warm up.

    Returns:
        Name to what was measured, a value a round.
    """
    try:
        for process in processes.values():
            segment(process)  # warm up, one at a time
        found: dict[str, list[float]] = {name: [] for name in processes}
        for _ in range(rounds):
            for name, process in processes.items():
                found[name].append(segment(process))
    finally:
        for process in processes.values():
            end(process)
    return found


def end(process: subprocess.Popen[str]) -> None:
    """End a contender: nobody asks it any more."""
    try:
        process.communicate(timeout=SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def median_ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over the rounds of one contender's value by another's."""
    return statistics.median(one / other for one, other in zip(values, others, strict=True))
