"""The report page: one self-contained HTML file.

It has no script, and its content security policy permits none: only the style sheet inside it, by
digest, is applied. Equal input gives equal bytes.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, quantiles

from capsule.bundle.claims import ProgramClaims, TrainingClaims
from capsule.bundle.tally import Receipts
from capsule.machine.compare import FactComparison, compare
from capsule.report.charts import Band, Curve, divergence_chart, legend, line_chart, thinned
from capsule.report.facts import starts
from capsule.report.markup import Markup, element, join, table
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
from capsule.report.story import Story, machine_of, tell
from capsule.report.subject import NetworkReturns, ReportedRun, drawable, evaluation_points
from capsule.report.terminal import place_of
from capsule.verification.equivalence.returns import ReturnStatistics
from capsule.verification.verdict import Cause, Divergence, DivergenceMap, Report

STYLE = (Path(__file__).parent / "page.css").read_text(encoding="ascii")
MAX_ROWS = 200  # of a table; what is left out is counted
MAX_TASKS = 12
MARKS = {"good": "✓", "bad": "✗", "open": "○"}
TREATMENT_TONES = {"assumed": "open", "unsupported": "bad"}
EFFECT_TONES = {"gate": "bad", "may differ": "open"}
EFFECTS = ("gate", "may differ", "recorded-only", "none")


def report_page(subject: ReportedRun) -> str:
    """Return the page about a run."""
    story = tell(subject)
    title = f"{subject.lock.spec.name}: {story.headline}"
    body = element(
        "body",
        _top(subject, story),
        element(
            "main",
            *_sections(subject),
        ),
        _foot(subject),
    )
    return f"<!DOCTYPE html>\n{element('html', _head(title), body, lang='en')}\n"


def _head(title: str) -> Markup:
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return element(
        "head",
        element("meta", charset="utf-8"),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        Markup(f"<style>{STYLE}</style>"),
    )


def _top(subject: ReportedRun, story: Story) -> Markup:
    """Write the headline and what was shown."""
    claims = subject.claims
    return element(
        "header",
        element("p", "Capsule report on ", element("b", subject.lock.spec.name), class_="kicker"),
        element(
            "h1",
            element("span", MARKS[story.tone], class_=f"mark {story.tone}", aria_hidden="true"),
            " ",
            story.headline,
        ),
        element("p", story.sentence, class_="lead"),
        _untrusted(subject),
        element("p", element("span", "claim id", class_="name"), " ", _code(claims.claim_id())),
        element(
            "div",
            _points("What was shown", story.shown),
            _points("What was not shown", story.not_shown),
            class_="pair",
        ),
    )


def _untrusted(subject: ReportedRun) -> Markup:
    if subject.signers:
        return Markup()
    return element(
        "p",
        element("b", "Untrusted."),
        " No key was given, so the signature was not checked.",
        class_="warning",
    )


def _points(title: str, sentences: Iterable[str]) -> Markup:
    items = (element("li", sentence) for sentence in sentences)
    return element("section", element("h2", title), element("ul", *items))


def _sections(subject: ReportedRun) -> Iterator[Markup]:
    yield _section("Learning curves", *_learning(subject))
    yield _section("Where the runs differ", *_divergences(subject))
    if subject.receipts.receipts or subject.receipts.refused:
        yield _section("Receipts", *_receipts(subject.receipts))
    yield _section("Machines", *_machines(subject))
    yield _section("Sources of nondeterminism", *_ledger(subject))
    if subject.ancestry is not None:
        yield _section("Population", _population(subject))
    yield _section("Software", *_software(subject))
    yield _section("Hashes", *_hashes(subject))
    yield _section("Files", _files(subject))
    yield _section("Check it yourself", *_recipe(subject))


def _section(title: str, *content: Markup) -> Markup:
    return element("section", element("h2", title), *content)


def _foot(subject: ReportedRun) -> Markup:
    version = subject.observations.capsule
    return element(
        "footer",
        element("p", f"Run and signed with Capsule {version}. This page loads nothing."),
    )


# --- learning curves ----------------------------------------------------------------------------


def _learning(subject: ReportedRun) -> Iterator[Markup]:
    runs = [("recorded run", subject.evaluation), *_replicas(subject)]
    charts = [*_evaluation_charts(subject, runs), *_training_charts(subject)]
    if charts:
        yield element("div", *charts, class_="charts")
    else:
        yield element("p", "The run has no numbers to plot.")
    if subject.unread:
        yield element("p", f"{subject.unread:,} lines of the run's own log could not be read.")
    if subject.evaluation:
        heads = (
            "step",
            "starts",
            "lowest",
            "1st quartile",
            "median",
            "mean",
            "3rd quartile",
            "highest",
        )
        several = len(tasks(subject.lock)) > 1
        for task, points in by_task(subject.lock, subject.evaluation):
            caption = "Returns of each evaluation of the recorded run" + f", {task.name}" * several
            yield _bounded(caption, heads, [_evaluation_row(point) for point in points])
        if found := starts(subject):
            yield element("p", f"Each network plays from {found}.")
        yield _scores(subject)


def _scores(subject: ReportedRun) -> Markup:
    """Show what ``capsule scores`` shows of a run."""
    try:
        runs = run_scores(subject)
    except ValueError as error:
        return element("p", f"There are no scores: {error}.")
    rows = [
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
    heads = ("network", "step", "episodes", *HEADS, "human-normalised")
    scores = _bounded("Scores of the run", heads, rows)
    return join([scores, element("p", NOTE, class_="note")])


def _replicas(subject: ReportedRun) -> list[tuple[str, tuple[NetworkReturns, ...]]]:
    return [
        (f"re-execution: {name}", evaluation_points(report.replica.evaluation))
        for name, report in subject.reports
        if report.replica is not None and report.replica.evaluation is not None
    ]


def _evaluation_charts(
    subject: ReportedRun, runs: Sequence[tuple[str, tuple[NetworkReturns, ...]]]
) -> Iterator[Markup]:
    names = tasks(subject.lock)
    for number, task in enumerate(names[:MAX_TASKS]):
        parted = [(label, [*by_task(subject.lock, points)][number][1]) for label, points in runs]
        recorded = parted[0][1]
        curves = [
            _evaluation_curve(label, points, shaded=place == 0 or points != recorded)
            for place, (label, points) in enumerate(parted)
        ]
        if any(curve.points for curve in curves):
            title = "Evaluation" + f": {task.name}" * (len(names) > 1)
            note = (
                "The line is the mean over the starts. The shaded area reaches from the lowest to "
                "the highest return, the darker area from the first to the third quartile."
            )
            yield _figure(f"evaluation-{number}", title, "mean return", curves, note)


def _evaluation_curve(label: str, points: Sequence[NetworkReturns], *, shaded: bool) -> Curve:
    drawn = [
        (point.step, _spread(point.returns))
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


def _spread(returns: Sequence[float]) -> tuple[float, float, float, float, float, float]:
    """Return the lowest, first quartile, median, mean, third quartile and highest return."""
    mean = fmean(returns)
    if len(returns) == 1:
        return (mean,) * 6
    first, median, third = quantiles(returns, n=4, method="inclusive")
    return min(returns), first, median, mean, third, max(returns)


def _evaluation_row(point: NetworkReturns) -> list[str]:
    if not point.returns:
        return [f"{point.step:,}", "0"]
    shown = [f"{value:.6g}" for value in _spread(point.returns)]
    return [f"{point.step:,}", str(len(point.returns)), *shown]


def _training_charts(subject: ReportedRun) -> Iterator[Markup]:
    known = {
        "episode_return": ("Training return", "mean of 100 episodes"),
        "loss": ("Training loss", "loss"),
    }
    for number, series in enumerate(subject.series):
        if series.points:
            title, name = known.get(series.name, (series.name, series.name))
            curve = Curve("recorded run", thinned(series.points))
            note = "The run reported these numbers while it ran. They are not compared."
            yield _figure(f"training-{number}", title, name, [curve], note)


def _figure(identity: str, title: str, name: str, curves: list[Curve], note: str) -> Markup:
    return element(
        "figure",
        element("figcaption", element("b", title)),
        line_chart(identity, title, "agent steps", name, curves),
        legend([curve.label for curve in curves]),
        element("p", note, class_="note"),
    )


# --- where runs differ --------------------------------------------------------------------------


def _divergences(subject: ReportedRun) -> Iterator[Markup]:
    found = False
    for number, (name, report) in enumerate(subject.reports):
        divergence = None if report.replica is None else report.replica.divergence
        if divergence is not None:
            found = True
            yield _divergence(f"divergence-{number}", name, divergence)
        if report.first_difference is not None or report.differences:
            found = True
            yield _differences(name, report)
        if report.divergence is not None:
            yield from _causes(name, report.divergence)
        if report.statistics is not None:
            yield _statistics(name, report.statistics)
    if not found:
        equal = [name for name, report in subject.reports if report.verdict == "reproduced-bitwise"]
        yield element(
            "p",
            f"Nowhere. Every claim was obtained again ({', '.join(equal)})."
            if equal
            else "The run was not executed again, so there is nothing to compare.",
        )


def _causes(name: str, found: Divergence) -> Iterator[Markup]:
    """List the causes, the most likely one first, and other possible explanations."""
    causes = [(_cause(each), each.certainty or "", " ".join(_said(each))) for each in found.causes]
    yield _bounded(f"Likely causes: {name}", ("cause", "certainty", "evidence"), causes)
    pins = [(each.what, each.a, each.b, each.why) for each in found.explanations]
    heads = ("difference", "recorded", "here", "why it could matter")
    yield _folded(
        f"{_count(len(pins), 'difference')} of lock and machine that could explain it",
        _bounded(f"Differences of lock and machine: {name}", heads, pins),
    )


def _cause(cause: Cause) -> str:
    return cause.name.replace("-", " ")


def _said(cause: Cause) -> tuple[str, ...]:
    return (*cause.evidence, *(() if cause.fix is None else (cause.fix,)))


def _statistics(name: str, found: ReturnStatistics) -> Markup:
    """Show the comparison of returns. Rows without a label continue the row above."""
    heads, rows = ("quantity", "value"), list(returns_rows(found))
    return _bounded(f"Returns of both runs: {name}", heads, rows)


def _divergence(identity: str, name: str, divergence: DivergenceMap) -> Markup:
    if not any(divergence.components.values()):
        return element(
            "p",
            f"Nowhere. In {divergence.steps:,} agent steps, all {len(divergence.components)} "
            f"components of the trace are the same ({name}).",
            class_="calm",
        )
    title = f"Steps at which records differ: {name}"
    return element(
        "figure",
        element("figcaption", element("b", title)),
        divergence_chart(identity, title, divergence),
        element(
            "p",
            "Hatched records differ, and plain ones are equal. Data flow through a step from top "
            "to bottom, so look for the cause in the first component that differs.",
            class_="note",
        ),
        class_="wide",
    )


def _differences(name: str, report: Report) -> Markup:
    rows = [(each.component, _code(each.claimed), _code(each.found)) for each in report.differences]
    first = report.first_difference
    if first is not None:
        rows.insert(0, (f"first: {place_of(first)}", _code(first.claimed), _code(first.found)))
    return _bounded(f"Differences: {name}", ("item", "claimed", "found"), rows)


# --- receipts ------------------------------------------------------------------------------------


def _receipts(found: Receipts) -> Iterator[Markup]:
    """List the receipts. Their machines and times are what their signers state."""
    yield element("p", f"Receipts by trusted keys: {found.summary}.")
    rows = [
        (
            each.file,
            _toned("yes", "good") if each.counts else _toned("no", "open"),
            each.verdict,
            each.mode,
            ", ".join(filter(None, (each.machine.processor_name, each.machine.gpu))),
            each.time,
            _code(each.signer),
        )
        for each in sorted(found.receipts, key=lambda each: (not each.counts, each.file))
    ]
    heads = ("receipt", "counts", "verdict", "mode", "machine", "time", "signer")
    yield _bounded("Receipts of re-executions", heads, rows)
    if found.refused:
        refused = [(each.file, each.code, each.message) for each in found.refused]
        yield _bounded("Rejected files", ("file", "code", "reason"), refused)


# --- machines -----------------------------------------------------------------------------------


def _machines(subject: ReportedRun) -> Iterator[Markup]:
    observed = subject.observations
    yield element("p", f"Recorded on {machine_of(observed)}, started {observed.started}.")
    tables = [(name, report) for name, report in subject.reports if report.environment]
    for name, report in tables:
        if report.expected:
            yield element("p", f"Expected agreement between the two machines: {report.expected}.")
        rows = sorted(report.environment, key=lambda row: EFFECTS.index(row.effect))
        differing = [_machine_row(row) for row in rows if row.effect != "none"]
        equal = [(row.field, row.recorded) for row in rows if row.effect == "none"]
        heads = ("fact", "recorded", "here", "effect", "reason")
        if differing:
            yield _bounded(f"Facts that differ: {name}", heads, differing)
        yield _folded(
            f"{len(equal)} facts that are equal",
            _bounded(f"Facts that are equal: {name}", ("fact", "both"), equal),
        )
    if not tables:
        fingerprint = observed.fingerprint
        rows = list(compare(fingerprint, fingerprint, subject.lock.spec))
        yield _folded(
            f"{len(rows)} facts of this machine",
            _bounded("The recorded machine", ("fact", "recorded"), _facts(rows)),
        )


def _facts(rows: Iterable[FactComparison]) -> list[tuple[str, str]]:
    return [(row.field, row.recorded) for row in rows]


def _machine_row(row: FactComparison) -> tuple[object, ...]:
    effect = _toned(row.effect, EFFECT_TONES.get(row.effect))
    return row.field, row.recorded, row.here, effect, row.reason


# --- the rest -----------------------------------------------------------------------------------


def _ledger(subject: ReportedRun) -> Iterator[Markup]:
    relaxations = subject.claims.relaxations
    yield element(
        "p",
        f"Guarantees that were given up (relaxations): {', '.join(relaxations)}."
        if relaxations
        else "No guarantee was given up.",
    )
    rows = [
        (
            row.source,
            _toned(row.treatment, TREATMENT_TONES.get(row.treatment, "good")),
            row.evidence,
            row.weakened_by,
        )
        for row in subject.ledger.rows
    ]
    heads = ("source", "treatment", "evidence", "weakened by")
    yield _bounded("Treatment of every known source", heads, rows)


def _population(subject: ReportedRun) -> Markup:
    """Show the last generation of each member of a population."""
    generations = [] if subject.ancestry is None else subject.ancestry.generations
    last = {each.member: each for each in generations}
    rows = [
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
    heads = ("member", "generation", "first step", "parent", "copied", "hyper-parameters")
    return _bounded(
        f"Last generation of each member, of {len(generations):,} generations", heads, rows
    )


def _number(hexadecimal: str) -> str:
    try:
        return f"{float.fromhex(hexadecimal):.4g}"
    except (ValueError, OverflowError):  # shown as it stands there
        return hexadecimal


def _software(subject: ReportedRun) -> Iterator[Markup]:
    inventory = subject.inventory
    kinds = ", ".join(_count(count, kind) for kind, count in sorted(inventory.kinds.items()))
    yield element(
        "p", f"The image contains {kinds}. All are listed in ", _code("image/sbom.cdx.json"), "."
    )
    packages = [(each.name, each.version, each.licence) for each in inventory.packages]
    heads = ("package", "version", "licence")
    yield _bounded("Main packages", heads, packages)
    licences = sorted(inventory.licences.items(), key=lambda item: (-item[1], item[0]))
    counted = [(name, str(count)) for name, count in licences]
    yield _folded(
        _count(len(counted), "licence"), _bounded("Licences", ("licence", "components"), counted)
    )
    loaded = sorted(subject.claims.libraries.items())
    yield _folded(
        f"{len(loaded)} libraries that the run loaded",
        _bounded("Loaded libraries", ("library", "version"), loaded),
    )


def _hashes(subject: ReportedRun) -> Iterator[Markup]:
    claims = subject.claims
    rows = [("claim id", claims.claim_id()), ("lock", claims.lock)]
    if claims.image is not None:
        rows.append(("image", claims.image.config))
    if isinstance(claims, TrainingClaims):
        rows.append((f"trace, head of {claims.trace.records:,} records", claims.trace.head))
        rows.append(("final parameters", claims.parameters))
        rows += [("schedule", claims.schedule)] if claims.schedule else []
    if claims.entropy_profile:
        rows.append(("recorded randomness", claims.entropy_profile))
    if isinstance(claims, ProgramClaims) and claims.arrivals:
        rows.append(("recorded order of arrival", claims.arrivals))
    yield _bounded("SHA-256", ("item", "digest"), [(name, _code(value)) for name, value in rows])
    if isinstance(claims, TrainingClaims):
        checkpoints = [(f"step {each.step:,}", _code(each.digest)) for each in claims.checkpoints]
        yield _folded(
            _count(len(checkpoints), "checkpoint"),
            _bounded("Checkpoints, by their tensors", ("checkpoint", "SHA-256"), checkpoints),
        )
    if isinstance(claims, ProgramClaims):
        outputs = [
            (path, f"{each.size:,}", _code(each.sha256)) for path, each in claims.outputs.items()
        ]
        heads = ("output", "bytes", "SHA-256")
        yield _bounded("Outputs of the program, which are its claims", heads, outputs)


def _files(subject: ReportedRun) -> Markup:
    rows = [(each.path, each.role, f"{each.size:,}", _code(each.sha256)) for each in subject.files]
    return _folded(
        f"{len(rows)} files, {sum(each.size for each in subject.files):,} bytes",
        _bounded("Files in the signed manifest", ("file", "role", "bytes", "SHA-256"), rows),
    )


def _recipe(subject: ReportedRun) -> Iterator[Markup]:
    bundle = shlex.quote(subject.bundle)
    yield element(
        "p",
        "With Capsule, check the bundle, rebuild its image from the lock, execute the run again "
        "and compare the results:",
    )
    yield _commands("pip install capsule-rl", f"capsule verify {bundle} --key SIGNER.pub")
    yield element(
        "p",
        "Without Capsule, unpack the bundle, a plain tar file, and follow its instructions:",
    )
    yield _commands(
        f"mkdir bundle && tar -xf {bundle} -C bundle && cd bundle",
        "sha256sum --strict -c SHA256SUMS",
        "less REPRODUCING.md",
    )


# --- pieces -------------------------------------------------------------------------------------


def _bounded(caption: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> Markup:
    """Return a table of the first :data:`MAX_ROWS` rows, and say how many are left out."""
    if not rows:
        return element("p", f"{caption}: none.")
    left = len(rows) - MAX_ROWS
    shown = table(caption, heads, rows[:MAX_ROWS])
    return join([shown, element("p", f"{left:,} more rows are not shown.")]) if left > 0 else shown


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _folded(summary: str, content: Markup) -> Markup:
    return element("details", element("summary", summary), content)


def _toned(word: str, tone: str | None) -> Markup:
    """Mark a word with a sign besides its colour, which not everyone can see."""
    if tone is None:
        return element("span", word)
    mark = element("span", MARKS[tone], class_=f"mark {tone}", aria_hidden="true")
    return element("span", mark, " ", word, class_="toned")


def _code(value: str) -> Markup:
    return element("code", value)


def _commands(*lines: str) -> Markup:
    rows = join(element("code", line) for line in lines)
    return element("pre", rows, tabindex=0)
