"""The terminal: the same story as the page, in thirty lines."""

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from capsule.cli.main import app
from capsule.machine.compare import FactComparison
from capsule.report.story import tell
from capsule.report.summary import show_subject
from capsule.report.terminal import show_report
from capsule.verification.verdict import (
    Cause,
    ComponentDifference,
    Divergence,
    Explanation,
    Report,
    TraceDifference,
)
from tests.report import runs
from tests.report.conftest import different, make_report, read, write
from tests.report.test_page import hostile_bundle

MAX_LINES = 30
FORMS = {
    "html": "<!DOCTYPE html>",
    "ro-crate": '{\n  "@context"',
    "neurips": "# NeurIPS",
    "acm": "# Artifact appendix",
    "model-card": "---\nlicense: TODO",
}


def printed(show, subject):
    stream = io.StringIO()
    show(subject, Console(file=stream, width=120))
    return stream.getvalue()


@pytest.mark.parametrize("kind", ["dqn", "r2d2", "impala", "own"])
def test_the_terminal_tells_the_story_of_the_page(bundles, saved, kind):
    subject = read(bundles[kind], *saved(different(read(bundles[kind]))), trusted=False)
    text = printed(show_subject, subject)
    story = tell(subject)
    assert story.headline in text
    assert all(sentence in text for sentence in (*story.shown, *story.not_shown)[:4])
    assert subject.claims.claim_id() in text
    assert len(text.splitlines()) <= MAX_LINES


def test_many_reports_and_evaluations_stay_within_thirty_lines(tmp_path):
    returns = dict.fromkeys(range(1, 60), (1.0,) * 4)
    bundle = runs.pack(tmp_path, evaluation=runs.evaluation(returns))
    report = make_report(read(bundle))
    reports = [write(tmp_path / f"{number}.json", report) for number in range(40)]
    text = printed(show_subject, read(bundle, *reports))
    assert len(text.splitlines()) <= MAX_LINES
    assert "more on the page" in text
    assert "step 1:" in text
    assert "step 59:" in text


def test_a_verdict_stays_within_thirty_lines_whatever_differs():
    rows = tuple(
        FactComparison(field=f"gpu.{n}", recorded="x" * 900, here="y", effect=effect, reason="r")
        for n in range(40)
        for effect in ("none", "recorded-only", "gate", "may differ")
    )
    differences = tuple(
        ComponentDifference(component=f"c{n}", claimed="a", found="b") for n in range(40)
    )
    report = Report(
        bundle="b.tar", mode="full", verdict="not-reproduced", summary="s", claim_id="c",
        integrity=True, authentic=True, signer="k", expected="e", environment=rows,
        image_rebuilt=True, differences=differences, relaxations=("r",), reexecuted_steps=1,
        error={"code": "CAP-X001", "message": "m", "fix": "f"},
    )  # fmt: skip
    text = printed(show_report, report)
    assert len(text.splitlines()) <= MAX_LINES
    assert "gate" in text
    assert "recorded-only" not in text  # the least grave of so many
    assert "40 facts of the machine are equal" in text
    assert "and 38 more differences" in text


def test_an_analysis_stays_within_thirty_lines_and_keeps_where_and_why(bundles):
    report = different(read(bundles["dqn"])).model_copy(
        update={
            "divergence": Divergence(
                a="a",
                b="b",
                equal=False,
                first=TraceDifference(step=8, component="loss", claimed="1", found="2"),
                causes=(Cause(name="arithmetic", certainty="likely", evidence=("e",) * 14),),
                explanations=tuple(
                    Explanation(what=f"w{n}", a="a", b="b", why="y") for n in range(40)
                ),
                differences=tuple(
                    ComponentDifference(component=f"c{n}", claimed="a", found="b")
                    for n in range(40)
                ),
            )
        }
    )
    text = printed(show_report, report)
    assert len(text.splitlines()) <= MAX_LINES
    assert "step 8, loss" in text
    assert "arithmetic (likely)" in text
    assert "more lines in the report" in text


def test_text_from_a_stranger_cannot_steer_the_terminal(tmp_path):
    text = printed(show_subject, read(hostile_bundle(tmp_path)))
    assert "\x1b" not in text
    assert "\u202e" not in text


# --- the command --------------------------------------------------------------------------------


def capsule(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_command_writes_a_page_and_nothing_else(bundles, tmp_path):
    key = bundles["dqn"].parent / "alice.pub"
    done = capsule(bundles["dqn"], "-o", tmp_path / "report.html", "--key", key)
    assert (done.exit_code, done.output) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.slow
def test_the_command_prints_the_story_or_a_form(bundles):
    assert capsule(bundles["dqn"]).output.startswith("Signed, not reproduced yet")
    for form, start in FORMS.items():
        assert capsule(bundles["dqn"], "--format", form).output.startswith(start)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["-o", "/proc/report.html"], "CAP-P104"), (["missing.json"], "CAP-P101")],
)
def test_a_mistake_is_a_coded_error(bundles, arguments, code):
    done = capsule(bundles["dqn"], *arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith(code)
