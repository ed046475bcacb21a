"""Contenders take turns: each is a process that waits while another runs a short segment.

So changes of the machine's speed affect all contenders equally, and a ratio is taken between
adjacent segments. Contenders in environments without Capsule use this module, too, so it imports
only the standard library.
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
    """Run as a contender: measure a segment for each request, until the requests end."""
    for _ in sys.stdin:
        print(measure(), flush=True)


def segment(process: subprocess.Popen[str]) -> float:
    """Run the next segment of one contender, and return its measurement."""
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
        rounds: Number of measured segments of each, after one segment to warm up.

    Returns:
        Name to measurements, one per round.
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
    """End a contender by closing its requests."""
    try:
        process.communicate(timeout=SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def median_ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """Return the median, over the rounds, of the ratio of one contender's value to another's."""
    return statistics.median(one / other for one, other in zip(values, others, strict=True))
