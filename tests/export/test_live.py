"""Metrics that are written while a run lasts."""

import csv
import errno
import json
import math
import os
from pathlib import Path

import pytest

from capsule.execution import _EventTail
from capsule.experiment.contract import OUTPUT_VARIABLE, STATE_VARIABLE, WORKSPACE, Event
from capsule.export.live import RECORDED, FollowingReporter, follow, parse_target
from capsule.host.errors import CapsuleError
from capsule.report.progress import SilentReporter
from capsule.training.own_program import recorder
from capsule.training.own_program.program import _HELPER_FOLDER
from tests.export.conftest import TRAINING, content, logged
from tests.export.test_tensorboard import scalars

EVENTS = [
    Event.model_validate_json(line) for line in content(TRAINING, "run/events.jsonl").splitlines()
]


class Told(SilentReporter):
    def __init__(self):
        self.notes, self.events = [], []

    def note(self, message):
        self.notes.append(message)

    def event(self, event):
        self.events.append(event)


def rows(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_a_row_is_there_as_soon_as_its_event_is(tmp_path):
    told, path = Told(), tmp_path / "logs" / "metrics.csv"
    with follow(f"csv:{path}", "mine", tmp_path / "work", told) as reporter:
        for number, event in enumerate(EVENTS):
            reporter.event(event)
            assert told.events == EVENTS[: number + 1]
            if event.loss is not None:
                losses = [row for row in rows(path) if row["metric"] == "training/loss"]
                assert float(losses[-1]["value"]) == event.loss
    losses = [row for row in rows(path) if row["metric"] == "training/loss"]
    assert {int(row["step"]): float(row["value"]) for row in losses} == logged("loss")
    # The corpus has three events of step 400 with the same values.
    assert [(row["run"], row["step"]) for row in losses] == [("mine", "400")]


def test_a_resumed_run_appends_to_its_table(tmp_path):
    for event in EVENTS[1], EVENTS[-1]:
        with follow(
            f"csv:{tmp_path / 'metrics.csv'}", "mine", tmp_path / "work", Told()
        ) as reporter:
            reporter.event(event)
    text = (tmp_path / "metrics.csv").read_text()
    assert text.count("run,metric") == 1
    assert {row["step"] for row in rows(tmp_path / "metrics.csv")} == {"200", "400"}


def test_tensorboard_shows_a_run_that_still_lasts(tmp_path):
    with follow(f"tensorboard:{tmp_path}", "mine", tmp_path / "work", Told()) as reporter:
        for event in EVENTS:
            reporter.event(event)
        shown = scalars(tmp_path / "mine")["training/loss"]
        assert {each.step: each.value for each in shown} == pytest.approx(
            logged("loss"), rel=2**-23
        )
        assert shown[0].wall_time in [event.time for event in EVENTS]


def test_events_of_the_run_directory_reach_the_table(tmp_path):
    """The tail that an execution polls passes them on."""
    with follow(f"csv:{tmp_path / 'metrics.csv'}", "mine", tmp_path / "work", Told()) as reporter:
        tail = _EventTail(tmp_path / "events.jsonl", reporter)
        with (tmp_path / "events.jsonl").open("w") as stream:
            stream.write(json.dumps({"time": 1.5, "kind": "progress", "step": 7, "loss": 0.25}))
            stream.write("\n")
        tail.poll()
    (row,) = rows(tmp_path / "metrics.csv")
    assert (row["metric"], row["step"], row["value"]) == ("training/loss", "7", "0.25")
    assert row["time"] == "1.5"


def test_a_program_is_followed_by_what_its_recorder_writes(tmp_path, monkeypatch):
    """The recorder and the run directory are the real ones; the container is left out."""
    work = tmp_path / "work"
    assert Path(RECORDED) == Path(WORKSPACE) / _HELPER_FOLDER / recorder.METRICS
    monkeypatch.setenv(OUTPUT_VARIABLE, str(work / WORKSPACE / _HELPER_FOLDER))
    monkeypatch.setenv(STATE_VARIABLE, str(work / "state"))
    shown = []
    with (
        follow(f"csv:{tmp_path / 'metrics.csv'}", "own", work, Told()) as reporter,
        recorder.run() as program,
    ):
        for step in range(1, 4):
            program.log(step, loss=1 / step, score=float("inf"))
            reporter.event(Event(time=step + 0.5, kind="progress", step=step, message="loss"))
            shown.append([float(row["value"]) for row in rows(tmp_path / "metrics.csv")])
    assert shown[0] == [1.0, math.inf]
    assert shown[2] == [1.0, math.inf, 1 / 2, math.inf, 1 / 3, math.inf]
    assert {row["metric"] for row in rows(tmp_path / "metrics.csv")} == {
        "training/loss",
        "training/score",
    }
    assert [row["time"] for row in rows(tmp_path / "metrics.csv")][::2] == ["1.5", "2.5", "3.5"]


def test_a_resumed_program_is_followed_from_where_it_resumes(tmp_path):
    work = tmp_path / "work"
    path = work / RECORDED
    path.parent.mkdir(parents=True)
    path.write_text('{"step": 1, "loss": 1}\n{"step": 2, "loss": 2}\n')
    event = Event(time=1.0, kind="progress", step=0)
    with follow(f"csv:{tmp_path / 'metrics.csv'}", "own", work, Told()) as reporter:
        reporter.event(event)
        path.write_text('{"step": 1, "loss": 1}\n')  # it resumes from step 1
        reporter.event(event)
        path.write_text('{"step": 1, "loss": 1}\n{"step": 2, "loss": 3}\n{"step":')
        reporter.event(event)
    assert [(row["step"], row["value"]) for row in rows(tmp_path / "metrics.csv")] == [("2", "3.0")]


def test_no_link_of_a_program_is_followed(tmp_path):
    told, work = Told(), tmp_path / "work"
    (tmp_path / "secret").write_text('{"step": 1, "loss": 42}\n')
    with follow(f"csv:{tmp_path / 'metrics.csv'}", "own", work, told) as reporter:
        (work / RECORDED).parent.mkdir(parents=True)
        (work / RECORDED).symlink_to(tmp_path / "secret")
        reporter.event(Event(time=1.0, kind="progress", step=1))
        reporter.event(Event(time=2.0, kind="progress", step=2))
    assert rows(tmp_path / "metrics.csv") == []
    assert len(told.notes) == 1
    assert "no further metrics" in told.notes[0]
    assert len(told.events) == 2


def test_a_full_disk_ends_the_metrics_and_not_the_run():
    class Full:
        def write(self, *_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    told = Told()
    reporter = FollowingReporter(told, Full(), Path("work"))
    for event in EVENTS:
        reporter.event(event)
    assert told.notes == ["--metrics: no further metrics are written: No space left on device"]
    assert told.events == EVENTS


@pytest.mark.parametrize("target", ["metrics.csv", "csv:", "mlflow:folder", ""])
def test_another_target_is_refused(target):
    with pytest.raises(CapsuleError) as raised:
        parse_target(target)
    assert raised.value.code == "CAP-P206"


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CapsuleError) as raised,
        follow(f"csv:{tmp_path / 'file' / 'metrics.csv'}", "mine", tmp_path / "work", Told()),
    ):
        raise AssertionError("it was opened")
    assert raised.value.code == "CAP-P206"
