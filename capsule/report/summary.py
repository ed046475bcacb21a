"""The story of a run on a terminal, in at most thirty lines: what the page shows, in short."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from capsule.host.wording import counted
from capsule.report.divergence import show_lines
from capsule.report.facts import returns_text, verify_options
from capsule.report.scores import cells, run_scores
from capsule.report.story import Tone, tell
from capsule.report.subject import NetworkReturns, ReportedRun
from capsule.report.text import MAX_SENTENCE, print_line, printable

if TYPE_CHECKING:
    from rich.console import Console

_STYLES: dict[Tone, str] = {"good": "bold green", "bad": "bold red", "open": "bold yellow"}
MAX_SENTENCES = 5
MAX_POINTS = 3


def show_subject(subject: ReportedRun, console: Console) -> None:
    """Print what :func:`capsule.report.page.report_page` shows, in at most thirty lines."""
    story, claims = tell(subject), subject.claims
    console.print(story.headline, style=_STYLES[story.tone], end="", markup=False, highlight=False)
    print_line(console, f"  {printable(story.sentence)}")
    console.print()
    for label, sentences in (("shown", story.shown), ("not shown", story.not_shown)):
        for number, sentence in enumerate(sentences[:MAX_SENTENCES]):
            print_line(
                console, f"{'' if number else label:<16} {printable(sentence, MAX_SENTENCE)}"
            )
        if len(sentences) > MAX_SENTENCES:
            left = len(sentences) - MAX_SENTENCES
            print_line(console, f"… and {left} more on the page (-o report.html)")
    console.print()
    for number, point in enumerate(_few(subject.evaluation)):
        text = f"step {point.step:,}: {returns_text(subject.lock, point)}"
        print_line(console, f"{'' if number else 'evaluation':<16} {text}")
    for number, score in enumerate(_scores(subject)):
        print_line(console, f"{'' if number else 'scores':<16} {score}")
    rows = [
        ("claim id", claims.claim_id()),
        ("lock", claims.lock),
        ("image", None if claims.image is None else claims.image.config),
        ("parameters", getattr(claims, "parameters", None)),
        (
            "files",
            f"{len(subject.files)}, {counted(sum(each.size for each in subject.files), 'byte')}",
        ),
        ("verify with", f"capsule verify BUNDLE {verify_options(subject)}"),
    ]
    show_lines(((label, value) for label, value in rows if value is not None), console)


def _few(points: tuple[NetworkReturns, ...]) -> tuple[NetworkReturns, ...]:
    """Choose the first evaluation and the last ones."""
    told = tuple(point for point in points if point.returns)
    return told if len(told) <= MAX_POINTS else (told[0], *told[1 - MAX_POINTS :])


def _scores(subject: ReportedRun) -> Iterator[str]:
    """Yield the scores of the final and the best network; only the page has several games."""
    if not subject.evaluation:
        return
    try:
        runs = run_scores(subject)
    except ValueError as error:
        yield f"none: {error}"
        return
    # Two lines for each game would not fit.
    if len(runs) > 1:
        return
    for network, score in runs[0].scores.items():
        mean, deviation, relative = cells(score.summary)
        yield (
            f"{network} network, step {score.step:,}: {mean}, standard deviation {deviation} "
            f"({relative})"
        )
