"""The comparison of two runs' returns, in rows of text."""

from __future__ import annotations

from collections.abc import Iterator

from capsule.host.wording import counted
from capsule.verification.equivalence.returns import (
    METRIC_NAMES,
    Interval,
    ReturnStatistics,
    TaskReturns,
)


def returns_rows(found: ReturnStatistics) -> Iterator[tuple[str, str]]:
    """Yield label and text of each row; every interval has the statistics' confidence."""
    for task in found.tasks:
        yield "returns of", f"{task.task}, network of step {found.step:,}: {_sample(task)}"
        yield from _sizes(task, f"{100 * found.confidence:.3g} %", METRIC_NAMES[found.metric])
        yield "tests", _tests(task)
        for criterion in task.criteria:
            what = METRIC_NAMES[found.metric] if criterion.name == "metric" else "Cliff's delta"
            yield "tolerance", f"{what} ±{criterion.bound:.6g}: {criterion.outcome}"
    yield "", found.not_shown


def _sample(task: TaskReturns) -> str:
    both = zip(task.recorded, task.found, strict=True)
    equal = sum(recorded == found for recorded, found in both)
    if task.paired:
        return f"{counted(len(task.recorded), 'common start')}, {equal} with equal returns"
    return f"{counted(len(task.recorded), 'different start')} for each run"


def _sizes(task: TaskReturns, confidence: str, metric: str) -> Iterator[tuple[str, str]]:
    yield metric, f"recorded {_shown(task.recorded_metric)}, here {_shown(task.found_metric)}"
    difference = f"difference {_shown(task.difference)}, Cliff's delta {_shown(task.cliffs_delta)}"
    yield "", f"{difference}; brackets are {confidence} bootstrap intervals"


def _tests(task: TaskReturns) -> str:
    named = {"rank sum": task.rank_sum, "signed rank": task.signed_rank, "sign": task.sign}
    shown = [f"{name} p = {test.p_value:.3g}" for name, test in named.items() if test is not None]
    return ", ".join(shown) + " (for a difference; a high p shows nothing)"


def _shown(interval: Interval) -> str:
    return f"{interval.estimate:.6g} [{interval.low:.6g}, {interval.high:.6g}]"
