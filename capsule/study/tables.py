"""The tables of a study, each a pure function of what its members claim.

A *score* is the mean return of one evaluation of one network. Nagarajan et al. 2019
(arXiv:1809.05676, table 1) summarise the final and the best scores of the runs of a group; Agarwal
et al. 2021 (arXiv:2108.13264) ask for interquartile means with intervals.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any, Literal, NamedTuple

from pydantic import Field

from capsule.experiment.fields import Model
from capsule.experiment.lock import Sha256
from capsule.report.scores import NETWORKS, ScoredTask, normalize, summarize
from capsule.study.results import MemberIdentity, MemberResult, StudyResults, grouped, means
from capsule.study.statistics.aggregates import (
    mean_of_means,
    median_of_means,
    optimality_gap,
    pooled_iqm,
)
from capsule.study.statistics.bootstrap import (
    IntervalRow,
    stratified_interval,
    stratified_intervals,
)
from capsule.study.statistics.comparison import (
    MIN_SCORES,
    equal_variance,
    holm,
    probability_of_improvement,
)

P_DIGITS = 6  # after the point; further ones depend on the mathematical library
AGGREGATES = {
    "interquartile_mean": pooled_iqm,
    "median": median_of_means,
    "mean": mean_of_means,
    "optimality_gap": optimality_gap,
}
_COMPARABLE = 2  # settings, or tasks, that a comparison needs


class GroupRow(Model):
    """Scores of one network of each run of a group, in one task."""

    group: str
    task: str
    network: Literal["final", "best"]
    runs: int
    claim_ids: int = Field(description="Number of different claim ids among the runs.")
    mean: float
    standard_deviation: float | None = Field(
        description="Sample standard deviation, with the divisor runs - 1; null for a single run."
    )
    relative_standard_deviation: float | None = Field(
        description="Standard deviation divided by the absolute value of the mean; null if there "
        "is no standard deviation or the mean is 0."
    )
    interquartile_mean: IntervalRow


class CurvePoint(Model):
    """Scores of the runs of a group at one evaluation."""

    step: int
    mean: float
    standard_deviation: float | None


class CurveRow(Model):
    """The learning curve of a group, over the evaluations that all of its runs have."""

    group: str
    task: str
    points: tuple[CurvePoint, ...]


class VarianceRow(Model):
    """A test whether two groups' scores have equal variance.

    It is the test of Brown and Forsythe 1974, doi:10.1080/01621459.1974.10482955.
    """

    task: str
    network: Literal["final", "best"]
    first: str
    second: str
    statistic: float | None = Field(
        description="The statistic F; null where it is infinite or undefined."
    )
    p_value: float = Field(description="P-value by the F distribution.")
    permutation_p_value: float
    exact: bool = Field(
        description="Whether every permutation was counted, rather than a sample of them."
    )
    holm_p_value: float = Field(
        description="Permutation p-value, corrected for all pairs of groups (Holm 1979)."
    )


class ImprovementRow(Model):
    """Probability that a final score of the first group exceeds one of the second."""

    first: str
    second: str
    probability: IntervalRow


class SettingRow(Model):
    """The final score of one setting of a group, as a mean over its runs."""

    group: str
    setting: int
    task: str
    values: dict[str, Any] = Field(
        description="Values of the fields in which the settings of the group differ."
    )
    runs: int
    score: float


class AggregateRow(Model):
    """Human-normalised final scores of a group over several tasks; 1 is a person's."""

    group: str
    tasks: int
    interquartile_mean: IntervalRow
    median: IntervalRow
    mean: IntervalRow
    optimality_gap: IntervalRow = Field(
        description="Mean amount by which scores fall short of 1, where higher scores count as 1."
    )


class StudyTables(Model):
    """All tables of a study."""

    groups: tuple[GroupRow, ...]
    curves: tuple[CurveRow, ...]
    variances: tuple[VarianceRow, ...]
    improvements: tuple[ImprovementRow, ...]
    settings: tuple[SettingRow, ...]
    aggregates: tuple[AggregateRow, ...]


class StudyClaims(Model):
    """The claims of a study: its members by their claim ids, and the tables that follow."""

    schema_id: Literal["capsule/study-claims/v1"] = Field("capsule/study-claims/v1", alias="schema")
    lock: Sha256 = Field(description="Digest of the study's lock.")
    members: tuple[MemberIdentity, ...]
    tables: StudyTables


Groups = dict[tuple[str, ScoredTask], list[MemberResult]]


def tables_of(results: StudyResults) -> StudyTables:
    """Compute the tables of a study.

    The draws of its intervals follow from the digest of the study's lock, so that the tables are
    the same on every machine.
    """
    groups, seed = grouped(results.members), results.lock.digest()
    rows = {**_tables(groups, seed), "variances": _corrected([*_tests(groups, seed)])}
    return StudyTables.model_validate({name: tuple(each) for name, each in rows.items()})


def differing_table(results: StudyResults, stated: StudyTables) -> str | None:
    """Return the first table that does not follow from the results; None if all of them do.

    Rows are computed one by one, and none after the first that differs. Tests of a thousand pairs
    of groups take hours, which thus cannot be caused by a file whose tables were invented.
    """
    groups, seed = grouped(results.members), results.lock.digest()
    for name, rows in _tables(groups, seed).items():
        if any(row != other for row, other in zip_longest(rows, getattr(stated, name))):
            return name
    tests = []
    for test, other in zip_longest(_tests(groups, seed), stated.variances):
        # The corrected p-value is known only after all tests.
        if test is None or other is None or test.row != _uncorrected(other):
            return "variances"
        tests.append(test)
    return None if tuple(_corrected(tests)) == stated.variances else "variances"


def _tables(groups: Groups, seed: str) -> dict[str, Iterator[Model]]:
    """Return the rows of each table but the variances, which are computed when they are asked for.

    Args:
        groups: The members of each group and task.
        seed: Digest of the study's lock.
    """
    return {
        "groups": _group_rows(groups, seed),
        "curves": (_curve(*key, members) for key, members in groups.items()),
        "settings": _settings(groups),
        "aggregates": _aggregates(groups, seed),
        "improvements": _improvements(groups, seed),
    }


def _group_rows(groups: Groups, seed: str) -> Iterator[GroupRow]:
    for (group, task), members in groups.items():
        for network in NETWORKS:
            scores = means(members, task, network)
            label = f"{seed}/iqm/{group}/{task.name}/{network}"
            yield GroupRow(
                group=group,
                task=task.name,
                network=network,
                runs=len(members),
                claim_ids=len({member.identity.claim_id for member in members}),
                **summarize(scores)._asdict(),
                interquartile_mean=stratified_interval([[scores]], pooled_iqm, label),
            )


def _curve(group: str, task: ScoredTask, members: list[MemberResult]) -> CurveRow:
    curves = [
        {point.step: fmean(point.returns) for point in dict(member.tasks)[task]}
        for member in members
    ]
    # The outputs of programs may have different numbers of evaluations.
    common = sorted(set.intersection(*(set(curve) for curve in curves)))
    points = []
    for step in common:
        summary = summarize([curve[step] for curve in curves])
        points.append(
            CurvePoint(step=step, mean=summary.mean, standard_deviation=summary.standard_deviation)
        )
    return CurveRow(group=group, task=task.name, points=tuple(points))


def _pairs(groups: Groups) -> Iterator[tuple[str, str]]:
    yield from itertools.combinations(dict.fromkeys(group for group, _ in groups), 2)


class _Test(NamedTuple):
    """The test of a pair of groups, before its correction for all pairs.

    Attributes:
        row: Its row, in which the corrected p-value is 1.
        p_value: The p-value that is corrected, which is not rounded: the correction multiplies an
            error, too.
    """

    row: VarianceRow
    p_value: float


def _tests(groups: Groups, seed: str) -> Iterator[_Test]:
    tasks = dict.fromkeys(task for _, task in groups)
    for task, network, pair in itertools.product(tasks, NETWORKS, [*_pairs(groups)]):
        scores = [means(groups.get((name, task), ()), task, network) for name in pair]
        if min(map(len, scores)) < MIN_SCORES:
            continue
        label = f"{seed}/variance/{task.name}/{network}/{pair[0]}/{pair[1]}"
        test = equal_variance(scores, label)
        # JSON has no infinity.
        finite = test.statistic is not None and test.statistic != float("inf")
        row = VarianceRow(
            task=task.name,
            network=network,
            first=pair[0],
            second=pair[1],
            statistic=test.statistic if finite else None,
            p_value=round(test.p_value, P_DIGITS),
            permutation_p_value=round(test.permutation_p_value, P_DIGITS),
            exact=test.exact,
            holm_p_value=1.0,
        )
        yield _Test(row, test.permutation_p_value)


def _uncorrected(row: VarianceRow) -> VarianceRow:
    return row.model_copy(update={"holm_p_value": 1.0})


def _corrected(tests: Sequence[_Test]) -> Iterator[VarianceRow]:
    """Yield the rows of tests, corrected for all pairs of groups with the same task and network."""
    for _, each in itertools.groupby(tests, key=lambda test: (test.row.task, test.row.network)):
        family = {f"{test.row.first}\n{test.row.second}": test for test in each}
        corrected = holm({pair: test.p_value for pair, test in family.items()})
        for pair, test in family.items():
            p_value = round(corrected[pair], P_DIGITS)
            yield test.row.model_copy(update={"holm_p_value": p_value})


def _improvements(groups: Groups, seed: str) -> Iterator[ImprovementRow]:
    for first, second in _pairs(groups):
        tasks = [task for group, task in groups if group == first and (second, task) in groups]
        if tasks:
            samples = [
                [means(groups[name, task], task) for task in tasks] for name in (first, second)
            ]
            interval = stratified_interval(
                samples, probability_of_improvement, f"{seed}/improvement/{first}/{second}"
            )
            yield ImprovementRow(first=first, second=second, probability=interval)


def _settings(groups: Groups) -> Iterator[SettingRow]:
    for (group, task), members in groups.items():
        settings: dict[int, list[MemberResult]] = {}
        for member in members:
            settings.setdefault(member.plan.setting, []).append(member)
        if len(settings) < _COMPARABLE:
            continue
        for setting, runs in settings.items():
            yield SettingRow(
                group=group,
                setting=setting,
                task=task.name,
                values=runs[0].plan.setting_values,
                runs=len(runs),
                score=fmean(means(runs, task)),
            )


def _aggregates(groups: Groups, seed: str) -> Iterator[AggregateRow]:
    for group in dict.fromkeys(group for group, _ in groups):
        tasks = {task: members for (name, task), members in groups.items() if name == group}
        if len(tasks) < _COMPARABLE or any(task.reference is None for task in tasks):
            continue
        scores = [
            [score for final in means(members, task)
             if (score := normalize(task, final)) is not None]
            for task, members in tasks.items()
        ]  # fmt: skip
        intervals = stratified_intervals(
            [scores],
            lambda drawn: [aggregate(drawn) for aggregate in AGGREGATES.values()],
            f"{seed}/aggregate/{group}",
        )
        yield AggregateRow(
            group=group, tasks=len(tasks), **dict(zip(AGGREGATES, intervals, strict=True))
        )
