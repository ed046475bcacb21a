"""How far a study is, as a table and as JSON."""

import json
import math

import pytest

from capsule.study.directory import OUTCOME, WORK, Outcome
from capsule.study.progress import MemberChanges, progress_of, show
from tests.report.terminals import printed

DONE = Outcome(bundle="x.capsule.tar", claim_id="a" * 64)
FAILED = Outcome(code="CAP-E007", message="out of \x1b[31mmemory", fix="Buy more.")


def shown(progress):
    return printed(show, progress, width=100)


def write(folder, step, speed, total=1024):
    (folder / WORK).mkdir()
    facts = {"kind": "progress", "step": step, "steps_per_second": speed, "time": 1.0}
    text = json.dumps(facts | {"total_steps": total}) + "\n"
    (folder / WORK / "events.jsonl").write_text(text)


def test_a_study_that_has_not_begun_waits(directory):
    progress = progress_of(directory)
    assert progress.whole.counts == {
        "done": 0,
        "running": 0,
        "failed": 0,
        "stopped": 0,
        "waiting": 4,
    }
    assert (progress.whole.steps_per_second, progress.whole.seconds_left) == (0.0, None)
    assert progress.document() == {
        "schema": "capsule/study-progress/v1",
        "groups": {
            name: {"done": 0, "running": 0, "failed": 0, "stopped": 0, "waiting": 2}
            for name in ("deterministic", "exploration")
        },
        "speeds": {
            name: {"steps_per_second": 0.0, "seconds_left": None}
            for name in ("deterministic", "exploration")
        },
        "all": {**progress.whole.counts, "steps_per_second": 0.0, "seconds_left": None},
        "failures": {},
    }


def test_time_left_is_that_of_all_steps_at_the_present_speed(directory):
    with (
        directory.held("deterministic.1") as (first, _),
        directory.held("exploration.1") as (
            second,
            _,
        ),
    ):
        write(first, 256, 64.0)
        write(second, 1000, 32.0)
        progress = progress_of(directory)
    deterministic, exploration = progress.groups
    assert deterministic.steps_per_second == 64.0
    assert deterministic.seconds_left == (768 + 1024) / 64  # the other one has not begun
    assert exploration.seconds_left == (24 + 1024) / 32
    assert progress.whole.seconds_left == (768 + 1024 + 24 + 1024) / 96
    document = progress.document()
    assert document["speeds"]["deterministic"]["steps_per_second"] == 64.0
    assert document["speeds"]["exploration"]["seconds_left"] == exploration.seconds_left
    assert document["all"]["seconds_left"] == progress.whole.seconds_left
    lines = shown(progress).splitlines()
    (row,) = (line for line in lines if "deterministic" in line)
    assert row.replace("│", " ").split() == ["deterministic", *"01001", "64", "28s"]
    assert "all" in lines[-2]
    assert "29s" in lines[-2]


def test_time_left_is_unknown_where_a_program_does_not_count(directory):
    with directory.held("deterministic.1") as (folder, _):
        write(folder, 256, 64.0, total=None)
        assert progress_of(directory).groups[0].seconds_left is None


@pytest.mark.parametrize("speed", [1e-320, math.nan, math.inf, -1.0, 1e300])
def test_absurd_speeds_of_a_member_do_not_hide_the_others(directory, speed):
    with (
        directory.held("deterministic.1") as (absurd, _),
        directory.held("exploration.1") as (other, _),
    ):
        write(absurd, 256, speed)
        write(other, 1000, 32.0)
        progress = progress_of(directory)
    lines = shown(progress).splitlines()
    assert [progress.groups[0].seconds_left, progress.whole.steps_per_second] == [None, 32.0]
    assert any("exploration" in line and "32" in line for line in lines)


@pytest.mark.parametrize(
    ("step", "total", "left"),
    [(5000, 1000, 1000 / 64), (1, 10**400, None)],
    ids=["beyond the total", "no float"],
)
def test_absurd_steps_of_a_member_give_no_absurd_time(directory, step, total, left):
    with directory.held("deterministic.1") as (folder, _):
        write(folder, step, 64.0, total)
        progress = progress_of(directory)
    assert progress.groups[0].seconds_left == left  # the other member has not begun
    assert "exploration" in shown(progress)


def test_failures_are_shown_with_code_and_fix_and_no_control_characters(directory):
    for name, outcome in (("deterministic.2", FAILED), ("exploration.1", DONE)):
        with directory.held(name) as (folder, _):
            (folder / DONE.bundle).touch()
            (folder / OUTCOME).write_bytes(outcome.document())
    progress = progress_of(directory)
    counts = progress.whole.counts
    assert (counts["failed"], counts["done"], counts["waiting"]) == (1, 1, 2)
    assert list(progress.failures) == ["deterministic.2"]
    assert progress.document()["failures"]["deterministic.2"]["code"] == "CAP-E007"
    text = shown(progress)
    assert "deterministic.2 failed: CAP-E007: out of " in text
    assert "fix: Buy more." in text
    assert "\x1b" not in text


def test_a_change_of_a_member_is_said_once(directory):
    names = ["deterministic.1", "exploration.1"]
    changes = MemberChanges(directory, names)
    assert list(changes.lines()) == []
    with directory.held("deterministic.1") as (first, _), directory.held("exploration.1") as held:
        assert list(changes.lines()) == ["deterministic.1 is running", "exploration.1 is running"]
        write(first, 256, 64.0)
        assert list(changes.lines()) == []
        (first / DONE.bundle).touch()
        (first / OUTCOME).write_bytes(DONE.document())
        (held[0] / OUTCOME).write_bytes(FAILED.document())
    assert list(changes.lines()) == [
        "deterministic.1 is done (1 of 2 members)",
        "exploration.1 failed: CAP-E007: out of \x1b[31mmemory",
    ]
    with directory.held("exploration.1") as (second, _):
        (second / OUTCOME).unlink()
        assert list(changes.lines()) == ["exploration.1 is running"]
        write(second, 256, 64.0)
    assert list(changes.lines()) == ["exploration.1 was stopped"]
    assert list(changes.lines()) == []
