"""The story of a run on a terminal."""

import io

import pytest
from rich.console import Console

from capsule.report.story import tell
from capsule.report.summary import show_subject
from tests.report import runs
from tests.report.conftest import different, make_report, read, write
from tests.report.runs import hostile_bundle

MAX_LINES = 30


def printed(subject):
    stream = io.StringIO()
    show_subject(subject, Console(file=stream, width=120))
    return stream.getvalue()


@pytest.mark.parametrize("kind", ["dqn", "r2d2", "impala", "own"])
def test_the_terminal_tells_the_story_of_the_page(bundles, saved, kind):
    subject = read(bundles[kind], *saved(different(read(bundles[kind]))), trusted=False)
    text = printed(subject)
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
    text = printed(read(bundle, *reports))
    assert len(text.splitlines()) <= MAX_LINES
    assert "more on the page" in text
    assert "step 1:" in text
    assert "step 59:" in text


def test_text_from_a_stranger_cannot_steer_the_terminal(tmp_path):
    text = printed(read(hostile_bundle(tmp_path)))
    assert "\x1b" not in text
    assert "\u202e" not in text
