"""The report page: one self-contained HTML file.

It has no script, and its content security policy permits none: only the style sheet inside it, by
digest, is applied. Equal input gives equal bytes. ``page.html.jinja`` has its text; here is what
the text takes from the run.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from statistics import quantiles
from typing import NamedTuple

from capsule.bundle.claims import ProgramClaims, TrainingClaims
from capsule.host.wording import counted
from capsule.machine.compare import compare
from capsule.report.charts import (
    Band,
    Curve,
    DivergenceChart,
    LineChart,
    divergence_chart,
    line_chart,
    thinned,
)
from capsule.report.facts import licensed, starts, verify_options
from capsule.report.returns import returns_rows
from capsule.report.scores import (
    HEADS,
    NOTE,
    by_task,
    cells,
    normalize,
    percentage,
    run_scores,
    tasks,
)
from capsule.report.story import machine_of, tell
from capsule.report.subject import NetworkReturns, ReportedRun, drawable, evaluation_points
from capsule.report.templates import TEMPLATES, code, toned
from capsule.report.terminal import EFFECTS, place_of
from capsule.verification.vary import VaryReport
from capsule.verification.verdict import DivergenceMap, Report

MAX_TASKS = 12
TREATMENT_TONES = {"assumed": "open", "unsupported": "bad"}
EFFECT_TONES = {"gate": "bad", "may differ": "open"}
VARIATION_TONES = {"equal": "good", "shielded": "good", "differs": "bad", "undecided": "open"}
RETURNS_NOTE = (
    "The line is the mean over the starts. The shaded area reaches from the lowest to the highest "
    "return, the darker area from the first to the third quartile."
)
LOG_NOTE = "The run reported these numbers while it ran. They are not compared."

Rows = Sequence[tuple[object, ...]]


def report_page(subject: ReportedRun) -> str:
    """Return the page about a run."""
    differences = [_difference(n, *each) for n, each in enumerate(subject.reports)]
    fingerprint = subject.observations.fingerprint
    return TEMPLATES.get_template("page.html.jinja").render(
        run=subject,
        story=tell(subject),
        # The page has commands to copy, in which a file name must stay one word.
        bundle=shlex.quote(subject.bundle),
        verify_options=verify_options(subject),
        charts=[*_evaluation_charts(subject), *_training_charts(subject)],
        evaluations=list(_evaluations(subject)),
        starts=starts(subject),
        scores=_scores(subject),
        score_heads=[*HEADS],
        score_note=NOTE,
        differences=differences,
        # A report of a verification that executed nothing has none of these.
        compared=any(each.chart or each.equal or each.rows for each in differences),
        varied=[(name, report.conclusion, _variations(report)) for name, report in subject.varied],
        receipts=_receipts(subject),
        rejected=[(each.file, each.code, each.message) for each in subject.receipts.refused],
        machine=machine_of(subject.observations),
        machines=[_machine(*each) for each in subject.reports if each[1].environment],
        facts=[
            (row.field, row.recorded)
            # The machine is compared with itself, which gives a row for each fact in the form of
            # the other tables.
            for row in compare(fingerprint, fingerprint, subject.lock.spec)
        ],
        ledger=[
            (
                row.source,
                toned(row.treatment, TREATMENT_TONES.get(row.treatment, "good")),
                row.evidence,
                row.weakened_by,
            )
            for row in subject.ledger.rows
        ],
        population=_population(subject),
        **_software(subject),
        **_hashes(subject),
    )


# --- learning curves ----------------------------------------------------------------------------


def _evaluation_charts(subject: ReportedRun) -> Iterator[LineChart]:
    """Yield a chart for each task."""
    runs = [("recorded run", subject.evaluation)]
    for name, report in subject.reports:
        if report.replica is not None and report.replica.evaluation is not None:
            runs.append((f"re-execution: {name}", evaluation_points(report.replica.evaluation)))
    names = tasks(subject.lock)
    for number, task in enumerate(names[:MAX_TASKS]):
        parted = [(label, [*by_task(subject.lock, points)][number][1]) for label, points in runs]
        recorded = parted[0][1]
        curves = [
            # A re-execution with the recorded returns would only darken the recorded bands.
            _evaluation_curve(label, points, shaded=place == 0 or points != recorded)
            for place, (label, points) in enumerate(parted)
        ]
        if any(curve.points for curve in curves):
            title = "Evaluation" + f": {task.name}" * (len(names) > 1)
            identity = f"evaluation-{number}"
            yield line_chart(identity, title, "agent steps", "mean return", curves, RETURNS_NOTE)


def _evaluation_curve(label: str, points: Sequence[NetworkReturns], *, shaded: bool) -> Curve:
    drawn = [
        (point.step, _spread(point))
        for point in points
        if point.returns and all(map(drawable, point.returns))
    ]
    xs = tuple(float(step) for step, _ in drawn)
    columns = list(zip(*(spread for _, spread in drawn), strict=True))
    if not columns:
        return Curve(label, ())
    lowest, first, _, mean, third, highest = columns
    return Curve(
        label,
        tuple(zip(xs, mean, strict=True)),
        (Band(xs, lowest, highest), Band(xs, first, third)) if shaded else (),
    )


def _spread(point: NetworkReturns) -> tuple[float, float, float, float, float, float]:
    """Return the lowest, first quartile, median, mean, third quartile and highest return."""
    returns, mean = point.returns, point.mean
    # quantiles() needs two values.
    if len(returns) == 1:
        return (mean,) * 6
    # The exclusive method extrapolates: of few returns, quartiles would lie beyond the extremes.
    first, median, third = quantiles(returns, n=4, method="inclusive")
    return min(returns), first, median, mean, third, max(returns)


def _training_charts(subject: ReportedRun) -> Iterator[LineChart]:
    known = {
        "episode_return": ("Training return", "mean of 100 episodes"),
        "loss": ("Training loss", "loss"),
    }
    for number, series in enumerate(subject.series):
        if series.points:
            title, name = known.get(series.name, (series.name, series.name))
            curves = [Curve("recorded run", thinned(series.points))]
            identity = f"training-{number}"
            yield line_chart(identity, title, "agent steps", name, curves, LOG_NOTE)


def _evaluations(subject: ReportedRun) -> Iterator[tuple[str, Rows]]:
    """Yield caption and rows of the returns of each task."""
    if not subject.evaluation:
        return
    several = len(tasks(subject.lock)) > 1
    for task, points in by_task(subject.lock, subject.evaluation):
        caption = "Returns of each evaluation of the recorded run" + f", {task.name}" * several
        spreads = (_spread(point) if point.returns else () for point in points)
        yield (
            caption,
            [
                (f"{point.step:,}", str(len(point.returns)), *(f"{value:.6g}" for value in spread))
                for point, spread in zip(points, spreads, strict=True)
            ],
        )


def _scores(subject: ReportedRun) -> Rows | str:
    """Return what ``capsule scores`` shows of a run, or why there is nothing."""
    try:
        runs = run_scores(subject)
    except ValueError as error:
        return str(error)
    return [
        (
            network + f", {run.task.name}" * (len(runs) > 1),
            f"{score.step:,}",
            str(score.episodes),
            *cells(score.summary),
            percentage(normalize(run.task, score.summary.mean)),
        )
        for run in runs
        for network, score in run.scores.items()
    ]


# --- where runs differ --------------------------------------------------------------------------


class _Difference(NamedTuple):
    """The differences in a report; ``equal`` is the map of a run without any."""

    name: str
    report: Report
    chart: DivergenceChart | None
    equal: DivergenceMap | None
    rows: Rows
    causes: Rows
    explanations: Rows
    statistics: list[tuple[str, str]]


def _difference(number: int, name: str, report: Report) -> _Difference:
    chart, equal = None, None if report.replica is None else report.replica.divergence
    if equal is not None and any(equal.components.values()):
        title = f"Steps at which records differ: {name}"
        chart, equal = divergence_chart(f"divergence-{number}", title, equal), None
    rows = [(each.component, code(each.claimed), code(each.found)) for each in report.differences]
    first, found = report.first_difference, report.divergence
    if first is not None:
        # The templates escape the name, and code() escapes both values.
        rows.insert(0, (f"first: {place_of(first)}", code(first.claimed), code(first.found)))
    return _Difference(
        name,
        report,
        chart,
        equal,
        rows,
        causes=[
            (
                each.name.replace("-", " "),
                each.certainty or "",
                " ".join(each.evidence),
                each.fix or "",
            )
            for each in (found.causes if found else ())
        ],
        explanations=[
            (each.what, each.a, each.b, each.why) for each in (found.explanations if found else ())
        ],
        statistics=[] if report.statistics is None else list(returns_rows(report.statistics)),
    )


def _variations(report: VaryReport) -> Rows:
    return [
        (
            each.name,
            each.was or "",
            each.became or "",
            toned(each.outcome, VARIATION_TONES.get(each.outcome)),
            each.reason or "",
        )
        for each in report.variations
    ]


def _receipts(subject: ReportedRun) -> Rows:
    return [
        (
            each.file,
            toned("yes", "good") if each.counts else toned("no", "open"),
            each.verdict,
            each.mode,
            ", ".join(filter(None, (each.machine.processor_name, each.machine.gpu))),
            each.time,
            code(each.signer),
        )
        for each in sorted(subject.receipts.receipts, key=lambda each: (not each.counts, each.file))
    ]


def _machine(name: str, report: Report) -> tuple[str, Report, Rows, Rows]:
    """Return name and report with the facts of the machines that differ, and those that do not."""
    rows = sorted(report.environment, key=lambda row: EFFECTS.index(row.effect))
    differing = [
        (
            row.field,
            row.recorded,
            row.here,
            toned(row.effect, EFFECT_TONES.get(row.effect)),
            row.reason,
        )
        for row in rows
        if row.effect != "none"
    ]
    return name, report, differing, [(r.field, r.recorded) for r in rows if r.effect == "none"]


# --- the rest -----------------------------------------------------------------------------------


def _population(subject: ReportedRun) -> Rows:
    """Return the last generation of each member of a population."""
    generations = [] if subject.ancestry is None else subject.ancestry.generations
    last = {each.member: each for each in generations}
    return [
        (
            str(member),
            str(each.number),
            f"{each.step:,}",
            "new" if each.parent is None else str(each.parent),
            "yes" if each.copied else "no",
            ", ".join(f"{name} {_number(value)}" for name, value in each.hyperparameters.items()),
        )
        for member, each in sorted(last.items())
    ]


def _number(hexadecimal: str) -> str:
    try:
        return f"{float.fromhex(hexadecimal):.4g}"
    except (ValueError, OverflowError):  # shown as it is
        return hexadecimal


def _software(subject: ReportedRun) -> dict[str, object]:
    inventory = subject.inventory
    licences = sorted(inventory.licences.items(), key=lambda item: (-item[1], item[0]))
    return {
        "kinds": ", ".join(counted(count, kind) for kind, count in sorted(inventory.kinds.items())),
        "packages": inventory.packages,
        "licences": licences,
        "licensed": licensed(subject),
    }


def _hashes(subject: ReportedRun) -> dict[str, Rows | None]:
    claims, checkpoints, outputs = subject.claims, None, None
    rows = [("claim id", claims.claim_id()), ("lock", claims.lock)]
    if claims.image is not None:
        rows.append(("image", claims.image.config))
    if isinstance(claims, TrainingClaims):
        rows.append(
            (f"trace, head of {counted(claims.trace.records, 'record')}", claims.trace.head)
        )
        rows.append(("final parameters", claims.parameters))
        rows += [("schedule", claims.schedule)] if claims.schedule else []
        checkpoints = [(f"step {each.step:,}", code(each.digest)) for each in claims.checkpoints]
    if claims.entropy_profile:
        rows.append(("recorded randomness", claims.entropy_profile))
    if isinstance(claims, ProgramClaims):
        rows += [("recorded order of arrival", claims.arrivals)] if claims.arrivals else []
        outputs = [
            (path, f"{each.size:,}", code(each.sha256)) for path, each in claims.outputs.items()
        ]
    return {
        "hashes": [(name, code(value)) for name, value in rows],
        "checkpoints": checkpoints,
        "outputs": outputs,
        "files": [
            (each.path, each.role, f"{each.size:,}", code(each.sha256)) for each in subject.files
        ],
    }
