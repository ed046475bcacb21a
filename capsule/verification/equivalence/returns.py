"""Whether two runs of one lock that are not equal bit for bit are as good as each other.

The greedy returns of the two final networks are compared, one per start sequence (Nagarajan et al.
2019, arXiv:1809.05676): the starts are a sample, and the two networks are fixed. The argument is
one of equivalence, by two one-sided tests (Schuirmann 1987, doi:10.1007/BF01068419): at a risk of
alpha, the difference lies within the tolerance if its whole interval of confidence 1 - 2 alpha
does. That a test finds no difference is reported, and decides nothing. ``docs/grades.md`` has the
formulas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from capsule.experiment.contract import Evaluation
from capsule.experiment.evaluation import MAX_RELATIVE, ToleranceSpec
from capsule.experiment.fields import Model
from capsule.experiment.spec import Spec, task_name, tasks_of
from capsule.host.wording import counted
from capsule.verification.equivalence import statistics
from capsule.verification.equivalence.statistics import RankTest

DEFAULT_ALPHA = 0.05
# An interquartile mean leaves a quarter of the returns out at each end. Starts that many of which
# behave otherwise must not be missed altogether: (1 - 1/4)^n <= alpha.
TRIMMED = 0.25
MAX_RETURN = 1e100  # no game's; sums and squares of such numbers are still finite
MAX_WIDENING = 1e9  # of an interval by a lack of starts; its square is still a sensible number
METRICS = {"iqm": statistics.interquartile_mean, "mean": statistics.mean}
METRIC_NAMES = {"iqm": "interquartile mean", "mean": "mean"}


class Interval(Model):
    """An estimate with its percentile bootstrap interval, of the statistics' confidence."""

    estimate: float
    low: float
    high: float


class Criterion(Model):
    """A declared bound, and whether the difference is within it."""

    name: Literal["metric", "cliffs_delta"]
    bound: float = Field(description="Maximum size of the difference.")
    outcome: Literal["within", "outside", "undecided"] = Field(
        description="Result: 'within' if the whole interval is within the bound, 'outside' if none "
        "of it is, else 'undecided'."
    )
    starts_needed: int | None = Field(
        None,
        description="Number of starts that would give a decision at this difference and spread; "
        "null: no number would.",
    )


class TaskReturns(Model):
    """The returns of one task. If a run has several games, each is judged by itself."""

    task: str
    recorded: tuple[float, ...] = Field(
        description="Returns of the recorded run, one for each start."
    )
    found: tuple[float, ...] = Field(
        description="The returns of the re-execution, in the same order."
    )
    paired: bool = Field(description="Whether both runs played the same starts.")
    recorded_metric: Interval
    found_metric: Interval
    difference: Interval = Field(description="Difference of the metric: 'found' minus 'recorded'.")
    cliffs_delta: Interval = Field(
        description="Cliff's delta, which is positive if the re-execution scores more."
    )
    rank_sum: RankTest = Field(description="Wilcoxon's rank-sum test of the two samples.")
    signed_rank: RankTest | None = Field(description="Wilcoxon's signed-rank test of the pairs.")
    sign: RankTest | None = Field(description="Sign test of the pairs.")
    criteria: tuple[Criterion, ...] = Field(
        (), description="The declared bounds; empty if no tolerance is declared."
    )


class ReturnStatistics(Model):
    """A comparison of the returns of two runs' final networks."""

    step: int = Field(description="Agent step of the networks.")
    tolerance: ToleranceSpec | None = Field(description="The tolerance that the lock declares.")
    metric: Literal["iqm", "mean"]
    alpha: float
    confidence: float = Field(description="Confidence of every interval: 1 - 2 alpha.")
    tasks: tuple[TaskReturns, ...]
    shown: str = Field(description="What follows from the numbers, in one sentence.")
    not_shown: str = Field(description="What does not follow from the numbers, in one sentence.")


NOT_SHOWN = (
    "not shown: that the runs are the same, that the networks agree elsewhere than in the sum of "
    "rewards from such starts, that other seeds or machines give similar returns, or that the "
    "recorded machine was the one that the signer names"
)


def compare_returns(
    spec: Spec, claim_id: str, recorded: Evaluation, found: Evaluation
) -> ReturnStatistics | None:
    """Compare the returns of two final networks; None if they cannot be compared.

    Args:
        spec: The experiment; its tolerance gives metric, bounds and alpha.
        claim_id: Seeds the bootstrap, so that equal input gives equal intervals.
        recorded: Evaluation in the bundle, which is untrusted.
        found: Evaluation of the re-execution.
    """
    pairs = _final_pairs(recorded, found)
    if pairs is None or spec.environment is None:
        return None
    names = [task_name(task) for task in tasks_of(spec.environment)]
    if len(pairs) < len(names):
        return None
    tolerance = spec.evaluation.tolerance
    paired = recorded.starts == found.starts
    tasks = tuple(
        # The returns of several games take turns.
        _task(name, pairs[index :: len(names)], tolerance, f"{claim_id}/{index}", paired=paired)
        for index, name in enumerate(names)
    )
    alpha = DEFAULT_ALPHA if tolerance is None else tolerance.alpha
    return ReturnStatistics(
        step=recorded.points[-1].step,
        tolerance=tolerance,
        metric="iqm" if tolerance is None else tolerance.metric,
        alpha=alpha,
        confidence=1 - 2 * alpha,
        tasks=tasks,
        shown="; ".join(_sentence(task, tolerance) for task in tasks),
        not_shown=NOT_SHOWN,
    )


def outcome_of(found: ReturnStatistics) -> Literal["within", "outside", "undecided"]:
    """Join all criteria: one that is broken decides, and so does one that is undecided."""
    outcomes = {criterion.outcome for task in found.tasks for criterion in task.criteria}
    for outcome in ("outside", "undecided"):
        if outcome in outcomes:
            return outcome
    return "within" if outcomes else "undecided"


def minimum_starts(alpha: float) -> int:
    """Return the fewest starts that can decide at a risk of ``alpha``."""
    return math.ceil(math.log(alpha) / math.log(1 - TRIMMED))


def _final_pairs(recorded: Evaluation, found: Evaluation) -> list[tuple[float, float]] | None:
    """Return both returns of each start, if there are any to compare and all are numbers."""
    if not recorded.points or not found.points:
        return None
    before, after = recorded.points[-1], found.points[-1]
    if before.step != after.step or not 0 < len(before.returns) == len(after.returns):
        return None
    try:
        pairs = [
            (float.fromhex(left), float.fromhex(right))
            for left, right in zip(before.returns, after.returns, strict=True)
        ]
    except (ValueError, OverflowError):
        return None
    sizes = (abs(value) for pair in pairs for value in pair)
    return pairs if all(size <= MAX_RETURN for size in sizes) else None  # nor NaN


def _task(
    name: str,
    pairs: Sequence[tuple[float, float]],
    tolerance: ToleranceSpec | None,
    seed: str,
    *,
    paired: bool,
) -> TaskReturns:
    metric = METRICS["iqm" if tolerance is None else tolerance.metric]
    alpha = DEFAULT_ALPHA if tolerance is None else tolerance.alpha

    def numbers(first: Sequence[float], second: Sequence[float]) -> tuple[float, ...]:
        before, after = metric(first), metric(second)
        return before, after, after - before, statistics.cliffs_delta(first, second)

    recorded, found = (tuple(column) for column in zip(*pairs, strict=True))
    # All numbers are computed from one resample, so that the interval of the difference is that of
    # the same draws as its two sides.
    resampled = statistics.bootstrap_pairs(pairs, numbers, seed, paired=paired)
    before, after, difference, delta = (
        Interval(
            estimate=estimate,
            low=statistics.quantile(column, alpha),
            high=statistics.quantile(column, 1 - alpha),
        )
        for estimate, column in zip(numbers(recorded, found), resampled, strict=True)
    )
    apart = [right - left for left, right in pairs]
    return TaskReturns(
        task=name,
        recorded=recorded,
        found=found,
        paired=paired,
        recorded_metric=before,
        found_metric=after,
        difference=difference,
        cliffs_delta=delta,
        rank_sum=statistics.rank_sum(recorded, found),
        signed_rank=statistics.signed_rank(apart) if paired else None,
        sign=statistics.sign_test(apart) if paired else None,
        criteria=()
        if tolerance is None
        else _criteria(tolerance, before.estimate, difference, delta, found),
    )


def _criteria(
    tolerance: ToleranceSpec,
    recorded: float,
    difference: Interval,
    delta: Interval,
    found: Sequence[float],
) -> tuple[Criterion, ...]:
    starts = len(found)
    bound = _metric_bound(tolerance, recorded, found)
    criteria = [_criterion("metric", difference, bound, starts, tolerance.alpha)]
    if tolerance.cliffs_delta is not None:
        bound = tolerance.cliffs_delta
        criteria.append(_criterion("cliffs_delta", delta, bound, starts, tolerance.alpha))
    return tuple(criteria)


def _metric_bound(tolerance: ToleranceSpec, recorded: float, found: Sequence[float]) -> float:
    """Return how far the metric may be off.

    An absolute tolerance is the author's choice, and on a small scale of returns any number is
    large. The scale is therefore taken from the verifier's own returns, which the signer cannot
    forge.
    """
    if tolerance.absolute is None:
        return (tolerance.relative or 0.0) * abs(recorded)
    return min(tolerance.absolute, MAX_RELATIVE * max(map(abs, found)))


def _criterion(
    name: Literal["metric", "cliffs_delta"],
    difference: Interval,
    bound: float,
    starts: int,
    alpha: float,
) -> Criterion:
    """Hold an interval against a bound."""
    outcome: Literal["within", "outside", "undecided"] = "undecided"
    needed = None
    if starts < minimum_starts(alpha):
        needed = minimum_starts(alpha)
    elif -bound < difference.low and difference.high < bound:
        # Both comparisons are strict: a bound of 0, such as a share of a recorded score of 0,
        # decides nothing.
        outcome = "within"
    elif difference.low > bound or difference.high < -bound:
        outcome = "outside"
    else:
        needed = _starts_needed(difference, bound, starts)
    return Criterion(name=name, bound=bound, outcome=outcome, starts_needed=needed)


def _starts_needed(difference: Interval, bound: float, starts: int) -> int | None:
    """Return the starts with which this difference would keep the bound.

    The width of an interval shrinks with the square root of their number. None if the difference
    is itself as large as the bound: more starts are not expected to show that it is smaller.
    """
    estimate = difference.estimate
    rooms = (bound - estimate, bound + estimate)
    if min(rooms) <= 0:
        return None
    ratio = max((difference.high - estimate) / rooms[0], (estimate - difference.low) / rooms[1])
    return max(starts + 1, math.ceil(starts * min(ratio, MAX_WIDENING) ** 2))


def _sentence(task: TaskReturns, tolerance: ToleranceSpec | None) -> str:
    """Return the numbers of one task, and what follows from them, in a sentence."""
    name = METRIC_NAMES["iqm" if tolerance is None else tolerance.metric]
    percent = 100 * (1 - 2 * (DEFAULT_ALPHA if tolerance is None else tolerance.alpha))
    whose = "the same in both runs" if task.paired else "each run's own"
    starts = f"{counted(len(task.recorded), 'start')} of {task.task}, {whose},"
    numbers = (
        f"the {name} of the returns from {starts} is {task.found_metric.estimate:.6g}, recorded "
        f"{task.recorded_metric.estimate:.6g}; the {percent:.3g} % interval of the difference is "
        f"{_span(task.difference)}"
    )
    spans = {"metric": task.difference, "cliffs_delta": task.cliffs_delta}
    clauses = [_clause(criterion, spans[criterion.name]) for criterion in task.criteria]
    return "; ".join([numbers, *clauses])


def _clause(criterion: Criterion, span: Interval) -> str:
    what = "it" if criterion.name == "metric" else f"Cliff's delta, {_span(span)},"
    place = {"within": "lies within", "outside": "lies outside", "undecided": "is not decided by"}
    text = f"{what} {place[criterion.outcome]} the declared ±{criterion.bound:.6g}"
    if criterion.outcome != "undecided":
        return text
    if criterion.starts_needed is None:
        return f"{text}: the difference that was found is at least as large"
    return f"{text}: about {criterion.starts_needed} starts would be needed"


def _span(interval: Interval) -> str:
    return f"{interval.low:.6g} to {interval.high:.6g}"
