"""The tables and figures of a study: on a terminal, as a page, as CSV and as LaTeX."""

from __future__ import annotations

import csv
import io
import itertools
import shlex
from collections.abc import Iterator, Sequence
from itertools import islice
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from capsule.host.errors import CapsuleError
from capsule.host.wording import agreeing, counted
from capsule.report.charts import Band, Curve, LineChart, line_chart
from capsule.report.scores import NETWORKS, NOTE, percentage
from capsule.report.templates import TEMPLATES, code
from capsule.report.text import print_line, printable
from capsule.study.results import MemberResult, StudyResults, grouped, means
from capsule.study.statistics.bootstrap import IntervalRow
from capsule.study.statistics.profiles import profile_band
from capsule.study.study_bundle import sampling_options
from capsule.study.tables import (
    AGGREGATES,
    CurveRow,
    GroupRow,
    StudyTables,
    VarianceRow,
    tables_of,
)

if TYPE_CHECKING:
    from rich.console import Console

CURVES_OF_A_CHART = 4  # as many as the page has kinds of lines
SHOWN_SETTINGS = 10  # of a group, on a terminal
THRESHOLDS = 64  # of a performance profile
PROFILE_NOTE = (
    "The areas are pointwise 95 % intervals by stratified bootstrap (Agarwal et al. 2021, "
    "arXiv:2108.13264, section 4.2)."
)
SIGNIFICANT = 0.1  # level of Nagarajan et al. 2019


class StudyReport(NamedTuple):
    """The contents of a report on a study.

    Attributes:
        results: What the members claim.
        tables: The tables that follow.
        claim_id: The study's; None if it was not bundled yet.
        beside: The same study, run on another machine.
    """

    results: StudyResults
    tables: StudyTables
    claim_id: str | None = None
    beside: StudyReport | None = None

    @classmethod
    def of(cls, results: StudyResults) -> StudyReport:
        """Return the report of results that were not bundled."""
        return cls(results, tables_of(results))

    def compared(self, other: StudyReport) -> StudyReport:
        """Return a report that shows the same study from another machine, too.

        Raises:
            CapsuleError: CAP-Y040, it is another study.
        """
        if (first := self.results.lock.digest()) != (second := other.results.lock.digest()):
            raise CapsuleError(
                "CAP-Y040",
                f"--beside has the results of the study lock {second}, not of {first}",
                fix="Give the results of the same study from another machine.",
            )
        return self._replace(beside=other)

    @property
    def missing(self) -> str | None:
        """How many members have no results yet, in a sentence; None if all have."""
        some, planned = len(self.results.missing), len(self.results.lock.members)
        if not some:
            return None
        have = agreeing(some, "has", "have")
        return f"{some} of {counted(planned, 'member')} {have} no results yet."

    @property
    def joined(self) -> str | None:
        """Which groups join several settings, in a sentence; None if no group does."""
        settings: dict[str, int] = {}
        for plan in self.results.lock.planned.values():
            settings[plan.group] = max(plan.setting, settings.get(plan.group, 0))
        several = [f"{group} ({number})" for group, number in settings.items() if number > 1]
        if not several:
            return None
        return (
            "The statistics of a group include the differences between its settings where it has "
            f"several: {', '.join(several)}."
        )

    def claim_ids(self) -> dict[str, tuple[str, str]]:
        """Return the claim ids of the members on both machines, by their names."""
        if self.beside is None:
            return {}
        others = {each.identity.name: each.identity for each in self.beside.results.members}
        return {
            name: (member.identity.claim_id, others[name].claim_id)
            for member in self.results.members
            if (name := member.identity.name) in others
        }


# --- terminal -------------------------------------------------------------------------------------


def show_report(report: StudyReport, console: Console) -> None:
    """Print the scores of the groups and settings, and which groups differ in variance."""
    from rich.table import Table
    from rich.text import Text

    tasks = {row.task for row in report.tables.groups}
    shown = Table("group", "network", "runs", "mean", "SD", "relative SD", "IQM")
    # Long names are broken, since numbers must stay whole.
    shown.columns[0].overflow = "fold"
    for column in shown.columns[1:]:
        column.no_wrap = True
    for row in report.tables.groups:
        name = row.group if len(tasks) == 1 else f"{row.group}, {row.task}"
        cells = (*_spread(row), _short(row.interquartile_mean.estimate))
        # The names of a program's scores are the signer's choice.
        shown.add_row(Text(printable(name)), row.network, str(row.runs), *cells)
    console.print(shown)
    _show_settings(report, console)
    for test in report.tables.variances:
        # A p-value that equals the level is significant, by the definition of a level.
        if test.network == "final" and test.permutation_p_value <= SIGNIFICANT:
            # One of many pairs is below the level by chance alone.
            alone = "" if test.holm_p_value <= SIGNIFICANT else " only without a correction"
            found, corrected = map(_probability, (test.permutation_p_value, test.holm_p_value))
            print_line(
                console,
                f"The variances of {test.first} and {test.second} ({printable(test.task)}, final) "
                f"differ{alone}: p {found} by permutations, p {corrected} corrected for all pairs "
                f"(level {SIGNIFICANT}).",
            )
    if report.joined:
        console.print(report.joined, highlight=False)
    if report.beside is not None:
        print_line(console, _agreement(report))
    if report.missing:
        console.print(report.missing, highlight=False)


def _show_settings(report: StudyReport, console: Console) -> None:
    """Print the best settings of each group; the other table joins all settings of a group."""
    from rich.table import Table
    from rich.text import Text

    ranked = itertools.groupby(_ranked_settings(report), key=lambda cells: cells[:2])
    for (group, task), each in ranked:
        best, others = list(islice(each, SHOWN_SETTINGS)), sum(1 for _ in each)
        shown = Table("setting", "runs", "mean", "values", title_justify="left")
        shown.title = printable(f"settings of {group}, {task}, by their final score")
        shown.columns[0].overflow = shown.columns[3].overflow = "fold"
        for cells in best:
            shown.add_row(*(Text(printable(str(cell))) for cell in cells[2:]))
        console.print(shown)
        if others:
            text = f"{counted(others, 'further setting')} of {group}: see the page (-o FILE)."
            print_line(console, text)


def _ranked_settings(report: StudyReport) -> list[tuple[object, ...]]:
    """Return a row of cells for each setting of each group and task, the highest score first."""
    places = {
        # The part of a member's name between its group and the number of its run.
        (plan.group, plan.setting): plan.name.removeprefix(f"{plan.group}.").rpartition(".")[0]
        for plan in report.results.lock.planned.values()
    }
    return [
        (
            row.group,
            row.task,
            places[row.group, row.setting],
            row.runs,
            _short(row.score),
            ", ".join(f"{field} {value}" for field, value in row.values.items()),
        )
        for row in sorted(report.tables.settings, key=lambda row: (row.group, row.task, -row.score))
    ]


def _agreement(report: StudyReport) -> str:
    pairs, planned = report.claim_ids(), len(report.results.lock.members)
    differing = [name for name, (first, second) in pairs.items() if first != second]
    same = len(pairs) - len(differing)
    if not pairs:
        return f"None of {counted(planned, 'member')} has results on both machines."
    text = (
        f"{same} of {counted(len(pairs), 'member')} {agreeing(same, 'has', 'have')} the same claim "
        "id on both machines"
    )
    if len(pairs) < planned:
        text += f", of {planned:,} in the study"
    if not differing:
        return f"{text}."
    differ = agreeing(len(differing), "this one differs", "these differ")
    return f"{text}; {differ}: {', '.join(differing)}."


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def _probability(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"= {value:.3f}"


def _spread(row: GroupRow) -> tuple[str, str, str]:
    relative = percentage(row.relative_standard_deviation)
    return _short(row.mean), _short(row.standard_deviation), relative


def _estimated(row: IntervalRow) -> tuple[str, str]:
    return _short(row.estimate), _interval(row)


def _interval(row: IntervalRow) -> str:
    return f"[{_short(row.low)}, {_short(row.high)}]"


# --- CSV and LaTeX --------------------------------------------------------------------------------


def csv_report(report: StudyReport) -> str:
    """Return every score with the claim id that it comes from: one row per evaluation."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ("group", "setting", "run", "task", "step", "episodes", "score", "claim_id", "bundle")
    )
    for member in report.results.members:
        plan, identity = member.plan, member.identity
        for task, points in member.tasks:
            for point in points:
                # repr() writes the shortest text that is read back as the same double.
                score = (point.step, len(point.returns), repr(fmean(point.returns)))
                place = (plan.group, plan.setting, plan.run, task.name)
                writer.writerow((*place, *score, identity.claim_id, identity.bundle))
    return text.getvalue()


def latex_report(report: StudyReport) -> str:
    """Return the table of Nagarajan et al. 2019: a column per group, rows for both networks."""
    rows = report.tables.groups
    lines = []
    for task in dict.fromkeys(row.task for row in rows):
        of_task = [row for row in rows if row.task == task]
        groups = list(dict.fromkeys(row.group for row in of_task))
        lines += [
            f"% {report.results.lock.study.name}, {printable(task)}",
            f"% study lock {report.results.lock.digest()}",
            *([f"% Incomplete: {report.missing}"] if report.missing else []),
            *([f"% {report.joined}"] if report.joined else []),
            rf"\begin{{tabular}}{{l{'r' * len(groups)}}}",
            r"\hline",
            " & ".join(["Metric", *map(_escaped, groups)]) + r" \\",
            r"\hline",
        ]
        # In the table of the paper, the rows of the best networks come first.
        for network in reversed(NETWORKS):
            found = {row.group: row for row in of_task if row.network == network}
            cells = [_spread(found[group]) for group in groups]
            for place, name in enumerate(
                ("Average Score", "Standard Deviation", "Relative Standard Deviation")
            ):
                values = (_escaped(cell[place]) for cell in cells)
                lines.append(" & ".join([f"{name} ({network.title()})", *values]) + r" \\")
            lines.append(r"\hline")
        lines += [r"\end{tabular}", ""]
    return "\n".join(lines)


def _escaped(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "#$%&_{}" else letter for letter in text)


# --- page -----------------------------------------------------------------------------------------


def page_report(report: StudyReport, source: str, starts_of: str | None = None) -> str:
    """Return the page of a study.

    Args:
        report: What it is about.
        source: The folder or bundle, as commands on the page name it.
        starts_of: A member whose single start states are drawn; None: none are.
    """
    results, tables = report.results, report.tables
    planned = len(results.lock.members)
    # The page has commands to copy, in which a path must stay one word.
    word, single = shlex.quote(source), {row.group for row in tables.groups if row.runs == 1}
    check = (
        [f"capsule study verify {word} --key KEY.pub {sampling_options(results)}"]
        if report.claim_id
        else [f"capsule study bundle {word} --key KEY"]
    )
    return TEMPLATES.get_template("study.html.jinja").render(
        name=results.lock.study.name,
        runs=counted(planned, "run"),
        groups=list(results.lock.groups),
        missing=report.missing,
        claim_id=report.claim_id,
        lock=results.lock.digest(),
        note=NOTE,
        joined=report.joined,
        scores=[_score_cells(row) for row in tables.groups],
        aggregates=[
            (
                row.group,
                row.tasks,
                *itertools.chain(*(_estimated(getattr(row, name)) for name in AGGREGATES)),
            )
            for row in tables.aggregates
        ],
        machines=None if report.beside is None else _agreement(report),
        charts=[*_curve_charts(report), *_profiles(results), *_sensitivity(tables)],
        variances=[_variance_cells(row) for row in tables.variances],
        improvements=[
            (
                f"{row.first} > {row.second}",
                f"{row.probability.estimate:.3f}",
                # Two single runs are drawn anew as themselves, which tells of no spread.
                "-" if {row.first, row.second} <= single else _interval(row.probability),
            )
            for row in tables.improvements
        ],
        settings=_ranked_settings(report),
        small=list(_start_charts(results, starts_of)),
        small_member=starts_of,
        members=[_member_cells(member) for member in results.members],
        check=check,
    )


def _score_cells(row: GroupRow) -> tuple[object, ...]:
    estimate, interval = _estimated(row.interquartile_mean)
    return (
        *(row.group, row.task, row.network, row.runs, row.claim_ids),
        *_spread(row),
        *(estimate, interval if row.runs > 1 else "-"),
    )


def _variance_cells(row: VarianceRow) -> tuple[object, ...]:
    values = (row.p_value, row.permutation_p_value, row.holm_p_value)
    pair = f"{row.first}, {row.second}"
    return (pair, row.task, row.network, _short(row.statistic), *(f"{v:.3f}" for v in values))


def _member_cells(member: MemberResult) -> tuple[object, ...]:
    scores = list(member.scores.values())
    cells = [
        ", ".join(_short(score[network].summary.mean) for score in scores) for network in NETWORKS
    ]
    identity = member.identity
    return (identity.name, *cells, code(identity.claim_id), code(identity.bundle))


def _line_charts(
    identity: str, title: str, x_name: str, y_name: str, curves: Sequence[Curve], note: str
) -> Iterator[LineChart]:
    """Yield charts with some of the curves each; see :func:`capsule.report.charts.line_chart`."""
    for part, start in enumerate(range(0, len(curves), CURVES_OF_A_CHART)):
        some = curves[start : start + CURVES_OF_A_CHART]
        yield line_chart(f"{identity}-{part}", title, x_name, y_name, some, note)


def _curve_charts(report: StudyReport) -> Iterator[LineChart]:
    """Yield a chart per group and task: the mean, and one standard deviation around it."""
    note = "Mean over the runs, and one standard deviation around it. No area means no spread."
    beside = report.beside.tables.curves if report.beside else ()
    others = {(row.group, row.task): row for row in beside}
    for number, row in enumerate(row for row in report.tables.curves if row.points):
        curves = [_mean_curve(row.group, row)]
        if other := others.get((row.group, row.task)):  # figure 3 of Nagarajan et al. 2019
            curves = [_mean_curve("first machine", row), _mean_curve("second machine", other)]
        title = f"{row.group}: {row.task}"
        across = "evaluation" if report.results.lock.study.scores else "agent steps"
        yield line_chart(f"curve-{number}", title, across, "score", curves, note)


def _mean_curve(label: str, row: CurveRow) -> Curve:
    xs = tuple(float(point.step) for point in row.points)
    spread = [(point.mean, point.standard_deviation or 0.0) for point in row.points]
    low, high = (tuple(mean + side * sd for mean, sd in spread) for side in (-1, 1))
    points = tuple((x, mean) for x, (mean, _) in zip(xs, spread, strict=True))
    return Curve(label, points, (Band(xs, low, high),))


def _profiles(results: StudyResults) -> Iterator[LineChart]:
    """Yield charts of the share of runs whose final score exceeds a threshold."""
    seed = results.lock.digest()
    groups = grouped(results.members)
    for number, task in enumerate(dict.fromkeys(task for _, task in groups)):
        finals = {
            group: means(members, task) for (group, each), members in groups.items() if each == task
        }
        every = [score for group in finals.values() for score in group]
        low, high = min(every), max(every)
        # Equal scores have no range from which thresholds could be taken.
        if low == high:
            continue
        width = (high - low) / (THRESHOLDS - 1)
        thresholds = [low + width * place for place in range(THRESHOLDS)]
        curves = [
            _profile(name, scores, thresholds, f"{seed}/profile/{task.name}/{name}")
            for name, scores in finals.items()
        ]
        title, share = f"Performance profile: {task.name}", "share of runs above it"
        yield from _line_charts(
            f"profile-{number}", title, "final score", share, curves, PROFILE_NOTE
        )


def _profile(name: str, scores: list[float], thresholds: Sequence[float], seed: str) -> Curve:
    rows = profile_band([scores], thresholds, seed)
    points = tuple(zip(thresholds, (row.estimate for row in rows), strict=True))
    low, high = tuple(row.low for row in rows), tuple(row.high for row in rows)
    return Curve(name, points, (Band(tuple(thresholds), low, high),))


def _sensitivity(tables: StudyTables) -> Iterator[LineChart]:
    """Yield charts of the settings' final scores in descending order."""
    for number, task in enumerate(dict.fromkeys(row.task for row in tables.settings)):
        ranked: dict[str, list[float]] = {}
        for row in tables.settings:
            if row.task == task:
                ranked.setdefault(row.group, []).append(row.score)
        curves = [
            Curve(name, tuple(enumerate(sorted(scores, reverse=True), 1)))
            for name, scores in ranked.items()
        ]
        note = "Final scores of the settings, best first (Espeholt et al. 2018, figure E.2)."
        title = f"Settings by rank: {task}"
        yield from _line_charts(f"settings-{number}", title, "rank", "final score", curves, note)


def _start_charts(results: StudyResults, name: str | None) -> Iterator[LineChart]:
    """Yield a chart for each start state of a member: its return at each evaluation."""
    for member in results.members:
        if member.identity.name != name:
            continue
        for task, points in member.tasks:
            for start in range(len(points[0].returns)):
                line = tuple((float(point.step), point.returns[start]) for point in points)
                title = f"{task.name}, start {start + 1}"
                chart_name = f"start-{task.name}-{start}"
                yield line_chart(chart_name, title, "agent steps", "return", [Curve(title, line)])
