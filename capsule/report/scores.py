"""Scores of runs and of groups of runs (Nagarajan et al. 2019, arXiv:1809.05676, Table 1).

The score of a network in a game is the mean return of its evaluation episodes. A run has two: that
of the *final* network, which the last evaluation played with, and that of the *best* one, which has
the highest score of all evaluations of the run (the earliest of equals).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, stdev
from typing import Literal, NamedTuple

from capsule.experiment.lock import Lock
from capsule.experiment.scores import (
    Aggregate,
    ReferenceScores,
    aggregate,
    human_normalized,
    reference_of,
)
from capsule.experiment.spec import task_name, tasks_of
from capsule.report.subject import NetworkReturns, ReportedRun, drawable

DDOF = 1  # divisors are N - 1: five runs are a sample of the runs that could have been made
Network = Literal["final", "best"]
NETWORKS: tuple[Network, ...] = ("final", "best")
HEADS = ("mean", "SD", "relative SD")
NOTE = (
    "SD: standard deviation with divisor n - 1. Relative SD: SD divided by the absolute value of "
    "the mean."
)


class ScoredTask(NamedTuple):
    """A game, an environment, or a program that the user wrote."""

    suite: Literal["atari", "gymnasium", "minatar", "program"]
    name: str

    @property
    def reference(self) -> ReferenceScores | None:
        """Scores of random play and of a person, where they were published."""
        # MinAtar's games have the names of Atari's and other scores.
        return reference_of(self.name) if self.suite in ("atari", "gymnasium") else None


class SampleSummary(NamedTuple):
    """Mean and spread of a sample.

    Attributes:
        mean: Arithmetic mean.
        standard_deviation: With divisor N - 1; None of a single value.
        relative_standard_deviation: As a share of the mean's size, 1 being 100 %; None where there
            is no standard deviation, or the mean is 0.
    """

    mean: float
    standard_deviation: float | None
    relative_standard_deviation: float | None


class Score(NamedTuple):
    """The score of one network of a run in one task: a summary over ``episodes`` returns."""

    step: int
    episodes: int
    summary: SampleSummary


class RunScores(NamedTuple):
    """The two scores of one run in one task.

    ``training`` is equal for runs of one spec, seed included, that computed the same, wherever they
    were executed.
    """

    bundle: str
    claim_id: str
    training: str
    task: ScoredTask
    scores: Mapping[Network, Score]


class GroupScores(NamedTuple):
    """The scores of ``runs`` runs in one task: summaries over the runs' scores.

    ``human_normalized`` holds (mean - random) / (human - random), or None without references.
    """

    task: ScoredTask
    runs: int
    summaries: Mapping[Network, SampleSummary]
    human_normalized: Mapping[Network, float | None]


def summarize(values: Sequence[float]) -> SampleSummary:
    """Summarise a sample of at least one finite value."""
    mean = fmean(values)
    if len(values) <= DDOF:
        return SampleSummary(mean, None, None)
    deviation = stdev(values)
    return SampleSummary(mean, deviation, deviation / abs(mean) if mean else None)


def tasks(lock: Lock) -> tuple[ScoredTask, ...]:
    """Return what a run was evaluated on; with several tasks, its returns take turns."""
    spec = lock.spec
    if spec.environment is None:
        return (ScoredTask("program", spec.name),)
    return tuple(ScoredTask(task.suite, task_name(task)) for task in tasks_of(spec.environment))


def by_task(
    lock: Lock, points: Iterable[NetworkReturns]
) -> Iterator[tuple[ScoredTask, list[NetworkReturns]]]:
    """Part the returns of evaluations by task."""
    # The points are read once for each task.
    found, points = tasks(lock), list(points)
    for number, task in enumerate(found):
        returns = slice(number, None, len(found))
        yield task, [NetworkReturns(each.step, each.returns[returns]) for each in points]


def run_scores(subject: ReportedRun) -> list[RunScores]:
    """Return the scores of a run, by task.

    Raises:
        ValueError: It has no evaluation, or one with a return that is not a finite number.
    """
    claim_id, training = subject.claims.claim_id(), _training(subject)
    return [
        RunScores(subject.bundle, claim_id, training, task, network_scores(points))
        for task, points in by_task(subject.lock, subject.evaluation)
    ]


def _training(subject: ReportedRun) -> str:
    """Return the digest of the claims without what the engine and the image determine."""
    results: dict[str, object] = {
        "lock": subject.lock.spec.digest(),
        "image": None,
        "relaxations": (),
        "flags": {},
        "libraries": {},
    }
    return subject.claims.model_copy(update=results).claim_id()


def network_scores(points: Iterable[NetworkReturns]) -> dict[Network, Score]:
    """Return the scores of the final and the best network of a run in one task.

    Raises:
        ValueError: It has no evaluation, or one with a return that is not a finite number.
    """
    played = sorted((point for point in points if point.returns), key=lambda point: point.step)
    if not played:
        raise ValueError("the run has no evaluation")
    for point in played:
        if not all(map(drawable, point.returns)):
            raise ValueError(
                f"the evaluation of step {point.step} has a return that is not a finite number"
            )
    # max() returns the first of equals, which is the earliest, as the points are in order.
    best = max(played, key=lambda point: fmean(point.returns))
    return {"final": _score(played[-1]), "best": _score(best)}


def _score(point: NetworkReturns) -> Score:
    return Score(point.step, len(point.returns), summarize(point.returns))


def group_scores(runs: Iterable[RunScores]) -> list[GroupScores]:
    """Summarise the scores of all runs in each task, in alphabetical order."""
    groups: dict[ScoredTask, list[RunScores]] = {}
    for run in runs:
        groups.setdefault(run.task, []).append(run)
    return [_group(task, members) for task, members in sorted(groups.items())]


def _group(task: ScoredTask, members: Sequence[RunScores]) -> GroupScores:
    summaries = {
        network: summarize([run.scores[network].summary.mean for run in members])
        for network in NETWORKS
    }
    normalized = {network: normalize(task, summaries[network].mean) for network in NETWORKS}
    return GroupScores(task, len(members), summaries, normalized)


def normalize(task: ScoredTask, score: float) -> float | None:
    """Return a score of which 0 is random play and 1 a person; None without references."""
    return None if task.reference is None else human_normalized(task.name, score)


def aggregates(groups: Sequence[GroupScores]) -> dict[Network, Aggregate] | None:
    """Aggregate over the tasks that have references; None if there are none."""
    known = [group for group in groups if group.task.reference is not None]
    if not known:
        return None
    return {
        network: aggregate({group.task.name: group.summaries[network].mean for group in known})
        for network in NETWORKS
    }


def cells(summary: SampleSummary) -> tuple[str, str, str]:
    """Return the texts below :data:`HEADS`."""
    deviation = summary.standard_deviation
    return (
        f"{summary.mean:.6g}",
        "-" if deviation is None else f"{deviation:.6g}",
        percentage(summary.relative_standard_deviation),
    )


def percentage(share: float | None) -> str:
    """Return a share as text; None is a dash."""
    return "-" if share is None else f"{share:.1%}"
