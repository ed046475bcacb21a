"""Metrics that are written while a run lasts."""

import csv
import errno
import json
import os

import pytest

from capsule.execution import _EventTail
from capsule.experiment.contract import Event
from capsule.export.live import FollowingReporter, check_target, follow
from capsule.host.errors import CapsuleError
from capsule.report.progress import SilentReporter
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
    with follow(f"csv:{path}", "mine", told) as reporter:
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
        with follow(f"csv:{tmp_path / 'metrics.csv'}", "mine", Told()) as reporter:
            reporter.event(event)
    text = (tmp_path / "metrics.csv").read_text()
    assert text.count("run,metric") == 1
    assert {row["step"] for row in rows(tmp_path / "metrics.csv")} == {"200", "400"}


def test_tensorboard_shows_a_run_that_still_lasts(tmp_path):
    with follow(f"tensorboard:{tmp_path}", "mine", Told()) as reporter:
        for event in EVENTS:
            reporter.event(event)
        shown = scalars(tmp_path / "mine")["training/loss"]
        assert {each.step: each.value for each in shown} == pytest.approx(
            logged("loss"), rel=2**-23
        )
        assert shown[0].wall_time in [event.time for event in EVENTS]


def test_events_of_the_run_directory_reach_the_table(tmp_path):
    """The tail that an execution polls passes them on."""
    with follow(f"csv:{tmp_path / 'metrics.csv'}", "mine", Told()) as reporter:
        tail = _EventTail(tmp_path / "events.jsonl", reporter)
        with (tmp_path / "events.jsonl").open("w") as stream:
            stream.write(json.dumps({"time": 1.5, "kind": "progress", "step": 7, "loss": 0.25}))
            stream.write("\n")
        tail.poll()
    (row,) = rows(tmp_path / "metrics.csv")
    assert (row["metric"], row["step"], row["value"]) == ("training/loss", "7", "0.25")
    assert row["time"] == "1.5"


def test_nothing_is_followed_unless_asked_for():
    told = Told()
    with follow(None, "mine", told) as reporter:
        assert reporter is told


def test_a_full_disk_ends_the_metrics_and_not_the_run():
    class Full:
        def write(self, *_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    told = Told()
    reporter = FollowingReporter(told, Full())
    for event in EVENTS:
        reporter.event(event)
    assert told.notes == ["--metrics: no further metrics are written: No space left on device"]
    assert told.events == EVENTS


@pytest.mark.parametrize("target", ["metrics.csv", "csv:", "mlflow:folder", ""])
def test_another_target_is_refused(target):
    with pytest.raises(CapsuleError) as raised:
        check_target(target)
    assert raised.value.code == "CAP-P206"


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CapsuleError) as raised,
        follow(f"csv:{tmp_path / 'file' / 'metrics.csv'}", "mine", Told()),
    ):
        raise AssertionError("it was opened")
    assert raised.value.code == "CAP-P206"
