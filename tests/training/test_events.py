"""The event log of a run."""

import json
from types import SimpleNamespace

import pytest

from capsule.training import events
from capsule.training.events import EventLog


@pytest.fixture
def clock(monkeypatch):
    """The time, to be set."""
    now = SimpleNamespace(seconds=50.0)
    monkeypatch.setattr(events.time, "monotonic", lambda: now.seconds)
    return now


@pytest.fixture
def learner():
    return SimpleNamespace(step=0, episodes=2, mean_return=1.5, loss=None, exploration=lambda: 0.5)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_progress_is_written_once_a_second_with_the_speed_since_the_last(tmp_path, clock, learner):
    path = tmp_path / "events.jsonl"
    log = EventLog(path, learner, 1_000)
    for learner.step in range(10, 101, 10):
        clock.seconds += 0.25
        log.progress()
    found = lines(path)
    assert [(each["kind"], each["step"]) for each in found] == [("progress", 40), ("progress", 80)]
    assert [each.get("steps_per_second") for each in found] == [None, 40.0]
    assert found[0]["total_steps"] == 1_000


def test_a_line_that_was_left_unfinished_is_dropped(tmp_path, learner):
    path = tmp_path / "events.jsonl"
    EventLog(path, learner, 1_000).write("start")
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])
    EventLog(path, learner, 1_000).write("resume")
    assert [each["kind"] for each in lines(path)] == ["start", "resume"]


def test_the_calendar_clock_is_read_once_however_often_progress_is_written(
    tmp_path, clock, learner, monkeypatch
):
    """A reading advances a virtual clock, which the environment of a trainer may read, too."""
    readings = []
    monkeypatch.setattr(events.time, "time", lambda: readings.append(None) or 1_000.0)
    log = EventLog(tmp_path / "events.jsonl", learner, 10)
    for _ in range(3):
        clock.seconds += 2
        log.progress()
    assert [each["time"] for each in lines(tmp_path / "events.jsonl")] == [1_002, 1_004, 1_006]
    assert len(readings) == 1
