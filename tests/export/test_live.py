"""Metrics that are written while a run lasts."""

import csv
import errno
import json
import math
import os
import resource
import shutil
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from capsule.experiment.contract import OUTPUT_VARIABLE, STATE_VARIABLE, WORKSPACE, Event
from capsule.export import mlflow as mlflow_store
from capsule.export import wandb
from capsule.export.live import (
    RECORDED,
    FollowingReporter,
    follow,
    parse_target,
    require_target,
)
from capsule.host.errors import CapsuleError
from capsule.outcome import EventTail
from capsule.report.progress import SilentReporter
from capsule.training.own_program import recorder
from capsule.training.own_program.program import _HELPER_FOLDER
from tests.export.conftest import PROGRAM, TRAINING, content, logged
from tests.export.test_tensorboard import scalars
from tests.export.test_wandb import is_history, records, values_of

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


@pytest.fixture
def directory(tmp_path):
    """Make the directory of a run that has not begun."""
    folder = tmp_path / "runs" / "mine"
    (folder / "work").mkdir(parents=True)
    (folder / "lock.json").write_bytes(content(TRAINING, "spec/lock.json"))
    return folder


def rows(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_a_row_is_there_as_soon_as_its_event_is(tmp_path, directory):
    told, path = Told(), tmp_path / "logs" / "metrics.csv"
    with follow(f"csv:{path}", directory, told) as reporter:
        for number, event in enumerate(EVENTS):
            reporter.event(event)
            assert told.events == EVENTS[: number + 1]
            if event.loss is not None:
                losses = [row for row in rows(path) if row["metric"] == "training/loss"]
                assert float(losses[-1]["value"]) == event.loss
    losses = [row for row in rows(path) if row["metric"] == "training/loss"]
    assert {int(row["step"]): float(row["value"]) for row in losses} == logged("loss")
    # Several events of the last step have the same values, which are one row.
    steps = list(dict.fromkeys(event.step for event in EVENTS if event.loss is not None))
    assert [(row["run"], int(row["step"])) for row in losses] == [("mine", step) for step in steps]


def test_a_resumed_run_appends_to_its_table(tmp_path, directory):
    for event in EVENTS[1], EVENTS[-1]:
        with follow(f"csv:{tmp_path / 'metrics.csv'}", directory, Told()) as reporter:
            reporter.event(event)
    text = (tmp_path / "metrics.csv").read_text()
    assert text.count("run,metric") == 1
    assert {row["step"] for row in rows(tmp_path / "metrics.csv")} == {"200", "400"}


def test_tensorboard_shows_a_run_that_still_lasts(tmp_path, directory):
    with follow(f"tensorboard:{tmp_path}", directory, Told()) as reporter:
        for event in EVENTS:
            reporter.event(event)
        shown = scalars(tmp_path / "mine")["training/loss"]
        assert {each.step: each.value for each in shown} == pytest.approx(
            logged("loss"), rel=2**-23
        )
        assert shown[0].wall_time in [event.time for event in EVENTS]


def test_events_of_the_run_directory_reach_the_table(tmp_path, directory):
    """The tail that an execution polls passes them on."""
    with follow(f"csv:{tmp_path / 'metrics.csv'}", directory, Told()) as reporter:
        tail = EventTail(tmp_path / "events.jsonl", reporter)
        with (tmp_path / "events.jsonl").open("w") as stream:
            stream.write(json.dumps({"time": 1.5, "kind": "progress", "step": 7, "loss": 0.25}))
            stream.write("\n")
        tail.poll()
    (row,) = rows(tmp_path / "metrics.csv")
    assert (row["metric"], row["step"], row["value"]) == ("training/loss", "7", "0.25")
    assert row["time"] == "1.5"


def test_a_program_is_followed_by_what_its_recorder_writes(tmp_path, directory, monkeypatch):
    """The recorder and the run directory are the real ones; the container is left out."""
    work = directory / "work"
    assert Path(RECORDED) == Path(WORKSPACE) / _HELPER_FOLDER / recorder.METRICS
    monkeypatch.setenv(OUTPUT_VARIABLE, str(work / WORKSPACE / _HELPER_FOLDER))
    monkeypatch.setenv(STATE_VARIABLE, str(work / "state"))
    shown = []
    with (
        follow(f"csv:{tmp_path / 'metrics.csv'}", directory, Told()) as reporter,
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


def test_a_resumed_program_is_followed_from_where_it_resumes(tmp_path, directory):
    work = directory / "work"
    path = work / RECORDED
    path.parent.mkdir(parents=True)
    path.write_text('{"step": 1, "loss": 1}\n{"step": 2, "loss": 2}\n')
    event = Event(time=1.0, kind="progress", step=0)
    with follow(f"csv:{tmp_path / 'metrics.csv'}", directory, Told()) as reporter:
        reporter.event(event)
        path.write_text('{"step": 1, "loss": 1}\n')  # it resumes from step 1
        reporter.event(event)
        path.write_text('{"step": 1, "loss": 1}\n{"step": 2, "loss": 3}\n{"step":')
        reporter.event(event)
    assert [(row["step"], row["value"]) for row in rows(tmp_path / "metrics.csv")] == [("2", "3.0")]


@pytest.mark.parametrize("error", [None, KeyboardInterrupt(), OSError("of the run")])
def test_what_a_program_logged_after_the_last_event_is_written(tmp_path, directory, error):
    path, target = directory / "work" / RECORDED, f"csv:{tmp_path / 'metrics.csv'}"
    path.parent.mkdir(parents=True)
    event = Event(time=1.0, kind="progress", step=0)
    with (
        pytest.raises(type(error)) if error else nullcontext(),
        follow(target, directory, Told()) as reporter,
    ):
        path.write_text('{"step": 1, "loss": 1}\n')
        reporter.event(event)
        path.write_text('{"step": 1, "loss": 1}\n{"step": 2, "loss": 2}\n')
        if error:
            raise error
    with follow(target, directory, Told()) as reporter:  # it resumes from step 2
        with path.open("a") as stream:
            stream.write('{"step": 3, "loss": 3}\n')
        reporter.event(event)
    assert [row["step"] for row in rows(tmp_path / "metrics.csv")] == ["1", "2", "3"]


def test_no_link_of_a_program_is_followed(tmp_path, directory):
    told, work = Told(), directory / "work"
    (tmp_path / "secret").write_text('{"step": 1, "loss": 42}\n')
    with follow(f"csv:{tmp_path / 'metrics.csv'}", directory, told) as reporter:
        (work / RECORDED).parent.mkdir(parents=True)
        (work / RECORDED).symlink_to(tmp_path / "secret")
        reporter.event(Event(time=1.0, kind="progress", step=1))
        reporter.event(Event(time=2.0, kind="progress", step=2))
    assert rows(tmp_path / "metrics.csv") == []
    assert len(told.notes) == 1
    assert "no further metrics" in told.notes[0]
    assert len(told.events) == 2


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device"),
        (OSError("the library's own text"), "the library's own text"),
        (OverflowError("too large"), "too large"),
        (CapsuleError("CAP-P204", "a name", fix=""), "a name"),
        (RuntimeError(), "RuntimeError"),
    ],
    ids=["full disk", "library", "value", "name", "unforeseen"],
)
def test_an_error_ends_the_metrics_and_not_the_run(error, reason):
    told = Told()
    reporter = FollowingReporter(told, Mock(side_effect=error), Path("work"))
    for event in EVENTS:
        reporter.event(event)
    assert told.notes == [f"--metrics: no further metrics are written: {reason}"]
    assert told.events == EVENTS


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("secret")])
def test_what_an_earlier_attempt_put_in_the_place_of_its_metrics_ends_them(
    tmp_path, directory, make
):
    told, path = Told(), directory / "work" / RECORDED
    path.parent.mkdir(parents=True)
    make(path)
    with follow(f"csv:{tmp_path / 'metrics.csv'}", directory, told) as reporter:
        reporter.event(EVENTS[1])
    assert told.events == [EVENTS[1]]
    (note,) = told.notes
    assert note.startswith("--metrics: no further metrics are written: ")


@pytest.mark.parametrize("error", [None, KeyboardInterrupt(), OSError("of the run")])
def test_an_error_of_closing_the_place_changes_no_outcome(tmp_path, directory, monkeypatch, error):
    told = Told()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        pytest.raises(type(error)) if error else nullcontext() as raised,
        follow(f"mlflow:{tmp_path / 'mlruns'}", directory, told),
    ):
        monkeypatch.setattr(os, "fsync", full)
        if error:
            raise error
    assert raised is None or raised.value is error
    assert told.notes == ["--metrics: the end of the run is not written: No space left on device"]
    # The file has what it had before.
    (facts,) = (tmp_path / "mlruns").glob("*/*/meta.yaml")
    assert "status: 1\n" in facts.read_text()


@pytest.mark.parametrize("target", ["metrics.csv", "csv:", "comet:folder", ""])
def test_another_target_is_refused(target):
    with pytest.raises(CapsuleError) as raised:
        parse_target(target)
    assert raised.value.code == "CAP-P206"


def test_a_place_that_cannot_be_written_is_refused(tmp_path, directory):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CapsuleError) as raised,
        follow(f"csv:{tmp_path / 'file' / 'metrics.csv'}", directory, Told()),
    ):
        raise AssertionError("it was opened")
    assert raised.value.code == "CAP-P206"


@pytest.mark.parametrize("form", ["csv", "tensorboard", "mlflow"])
def test_a_place_that_cannot_be_written_is_found_before_a_run(form, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CapsuleError) as raised:
        require_target(f"{form}:{tmp_path / 'file' / 'metrics'}")
    assert raised.value.code == "CAP-P206"
    require_target(f"{form}:{tmp_path / 'folder' / 'metrics'}")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_missing_package_is_found_before_a_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(CapsuleError) as raised:
        require_target(f"wandb:{tmp_path}")
    assert raised.value.code == "CAP-P205"


def test_rows_are_appended_to_a_table_of_metrics_only(tmp_path, directory):
    path = tmp_path / "thesis.csv"
    path.write_text("chapter,words\n")
    for rejects in (
        lambda: require_target(f"csv:{path}"),
        lambda: follow(f"csv:{path}", directory, Told()).__enter__(),
    ):
        with pytest.raises(CapsuleError, match="does not begin with the line run,metric") as raised:
            rejects()
        assert raised.value.code == "CAP-P206"
    assert path.read_text() == "chapter,words\n"


@pytest.mark.parametrize("form", ["csv", "tensorboard", "mlflow"])
def test_values_that_no_tool_has_a_place_for_are_dropped(form, tmp_path, directory):
    path = directory / "work" / RECORDED
    path.parent.mkdir(parents=True)
    told = Told()
    with follow(f"{form}:{tmp_path / 'metrics'}", directory, told) as reporter:
        path.write_text('{"step": 1, "\\ud800": 2, "score": 3}\n')
        for step, time in ((-1, 1.0), (1, math.nan), (2, math.inf), (3, 1e300), (4, -1e300)):
            reporter.event(Event(time=time, kind="progress", step=step, loss=0.5))
        reporter.event(Event(time=1.0, kind="progress", step=5, episodes=10**400))
    assert told.notes == []
    if form == "csv":
        found = rows(tmp_path / "metrics")
        losses = {("training/loss", str(step)) for step in range(1, 5)}
        assert {(row["metric"], row["step"]) for row in found} == losses | {("training/score", "1")}
        assert {row["time"] for row in found} <= {"", "1.0"}


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    """Return a function that returns the only run of a file store, as MLflow reads it."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient  # takes longer than many modules of tests

    def read():
        client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
        (experiment,) = client.search_experiments()
        (run,) = client.search_runs([experiment.experiment_id])
        history = client.get_metric_history(run.info.run_id, "training/loss")
        return run.info, {point.step: point.value for point in history}

    return read


def test_mlflow_shows_a_run_that_still_lasts(tmp_path, directory, mlflow):
    with follow(f"mlflow:{tmp_path / 'mlruns'}", directory, Told()) as reporter:
        run, losses = mlflow()
        assert (run.status, losses) == ("RUNNING", {})
        for event in EVENTS:
            reporter.event(event)
        run, losses = mlflow()
        assert (run.run_name, run.status, run.end_time) == ("mine", "RUNNING", None)
        assert losses == logged("loss")
    run, losses = mlflow()
    assert (run.status, losses) == ("FINISHED", logged("loss"))
    assert run.end_time >= run.start_time


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CapsuleError("CAP-E012", "the run was interrupted", fix=""), "KILLED"),
        (KeyboardInterrupt(), "KILLED"),
        (CapsuleError("CAP-E010", "training ended", fix=""), "FAILED"),
        (RuntimeError(), "FAILED"),
    ],
)
def test_mlflow_shows_how_a_run_ended_and_that_it_was_resumed(
    tmp_path, directory, mlflow, error, status
):
    target = f"mlflow:{tmp_path / 'mlruns'}"
    with pytest.raises(type(error)), follow(target, directory, Told()) as reporter:
        reporter.event(EVENTS[1])
        raise error
    assert mlflow()[0].status == status
    with follow(target, directory, Told()) as reporter:
        assert mlflow()[0].status == "RUNNING"
        for event in EVENTS[2:]:
            reporter.event(event)
    run, losses = mlflow()
    assert (run.status, losses) == ("FINISHED", logged("loss"))


def test_a_run_that_another_process_executes_stays_in_progress(tmp_path, directory, mlflow):
    target = f"mlflow:{tmp_path / 'mlruns'}"
    with follow(target, directory, Told()):
        with pytest.raises(CapsuleError), follow(target, directory, Told()):
            raise CapsuleError("CAP-E008", "another process is running", fix="")
        assert mlflow()[0].status == "RUNNING"
    assert mlflow()[0].status == "FINISHED"


def test_runs_of_one_experiment_may_begin_at_one_time(tmp_path, directory, monkeypatch):
    """Another process makes the experiment after this one has looked for it."""
    write = mlflow_store._write_facts
    other = directory.with_name("other")
    shutil.copytree(directory, other)

    def write_later(place, facts):
        monkeypatch.setattr(mlflow_store, "_write_facts", write)
        with follow(f"mlflow:{tmp_path / 'mlruns'}", other, Told()):
            pass
        write(place, facts)

    monkeypatch.setattr(mlflow_store, "_write_facts", write_later)
    with follow(f"mlflow:{tmp_path / 'mlruns'}", directory, Told()):
        pass
    (experiment,) = (tmp_path / "mlruns").iterdir()
    assert len(list(experiment.glob("*/meta.yaml"))) == 2


def ends_with_a_record(data):
    """Tell whether an event file has whole records only: a length, its sum, the data, their sum."""
    place = 0
    while place < len(data):
        place += 16 + int.from_bytes(data[place : place + 8], "little")
    return place == len(data)


@pytest.mark.parametrize("form", ["csv", "tensorboard", "mlflow"])
def test_a_disk_that_becomes_full_leaves_no_part_of_a_value(form, tmp_path, directory):
    told, place = Told(), tmp_path / "logs"

    def files():
        found = (place, *place.glob("mine/*"), *place.glob("*/*/metrics/**/*"))
        return {path: path.read_bytes() for path in found if path.is_file()}

    with follow(f"{form}:{place}", directory, told) as reporter:
        reporter.event(EVENTS[1])
        before = files()
        longest = max(map(len, before.values()))
        _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (longest + 5, hard))
        try:
            reporter.event(EVENTS[-1])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        reporter.event(EVENTS[-1])
        assert len(told.notes) == 1
        after = files()
        for path, data in after.items():
            assert data.startswith(before.get(path, b""))
            assert data
        if form == "csv":
            assert rows(place)[-1]["time"] == str(EVENTS[1].time)
        if form == "tensorboard":
            (data,) = after.values()
            assert ends_with_a_record(data)
        if form == "mlflow":
            assert all(data.endswith(b"\n") for data in after.values())
    assert told.events == [EVENTS[1], EVENTS[-1], EVENTS[-1]]


def test_a_name_that_mlflow_does_not_allow_ends_the_metrics_and_not_the_run(tmp_path, directory):
    told, target = Told(), f"mlflow:{tmp_path / 'mlruns'}"
    with follow(target, directory, told) as reporter:
        path = directory / "work" / RECORDED
        path.parent.mkdir(parents=True)
        path.write_text('{"step": 1, "../../x": 2}\n')
        reporter.event(Event(time=1.0, kind="progress", step=1))
    (note,) = told.notes
    assert note.startswith("--metrics: no further metrics are written: MLflow does not allow")
    assert not (tmp_path / "x").exists()


def fake_wandb(monkeypatch, **methods):
    """Replace W&B's package by one whose runs have these methods."""
    run = SimpleNamespace(**methods)
    package = SimpleNamespace(
        Error=LookupError, Settings=lambda **_: None, init=lambda **_: run, teardown=lambda: None
    )
    monkeypatch.setattr(wandb, "require_wandb", lambda: package)


def fail(*_, **__):
    raise LookupError("the service has ended")


def test_an_error_of_wandb_ends_the_metrics_and_not_the_run(tmp_path, directory, monkeypatch):
    fake_wandb(monkeypatch, log=fail, finish=lambda **_: None)
    told = Told()
    with follow(f"wandb:{tmp_path / 'logs'}", directory, told) as reporter:
        for event in EVENTS:
            reporter.event(event)
    assert told.notes == ["--metrics: no further metrics are written: the service has ended"]
    assert told.events == EVENTS


def test_an_error_of_ending_wandbs_run_does_not_end_the_run(tmp_path, directory, monkeypatch):
    fake_wandb(monkeypatch, finish=fail)
    told = Told()
    with follow(f"wandb:{tmp_path / 'logs'}", directory, told):
        pass
    assert told.notes == ["--metrics: the end of the run is not written: the service has ended"]


def test_a_resumed_run_with_such_a_name_writes_nothing(tmp_path, directory):
    path = directory / "work" / RECORDED
    path.parent.mkdir(parents=True)
    path.write_text('{"step": 1, "../../../x": 2}\n')
    (directory / "lock.json").write_bytes(content(PROGRAM, "spec/lock.json"))
    with (
        pytest.raises(CapsuleError, match="CAP-P204"),
        follow(f"mlflow:{tmp_path / 'mlruns'}", directory, Told()),
    ):
        raise AssertionError("it was opened")
    assert not list(tmp_path.rglob("x"))
    assert not list((tmp_path / "mlruns").rglob("params"))


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_wandb_has_what_a_run_logged_and_how_it_ended(tmp_path, directory, fails):
    with suppress(RuntimeError), follow(f"wandb:{tmp_path}", directory, Told()) as reporter:
        for event in EVENTS:
            reporter.event(event)
        if fails:
            raise RuntimeError
    (path,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    found = records(path)
    (run,) = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    assert (run.display_name, run.project) == ("mine", "dqn")
    rows = map(values_of, filter(is_history, found))
    assert {row["_step"]: row["training/loss"] for row in rows if "training/loss" in row} == logged(
        "loss"
    )
    (ended,) = [record.exit for record in found if record.WhichOneof("record_type") == "exit"]
    assert ended.exit_code == int(fails)
