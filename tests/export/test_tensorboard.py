"""Event files, read by TensorBoard."""

import io
import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from capsule.bundle.trust import TrustPolicy
from capsule.export.runs import Point, read_runs
from capsule.export.tensorboard import EventWriter, export_tensorboard
from capsule.host.errors import CapsuleError
from tests.export.conftest import STUDY, TRAINING, logged


def scalars(folder):
    """Return the scalars of a folder by tag, each a list of events."""
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: accumulator.Scalars(tag) for tag in accumulator.Tags()["scalars"]}


def test_tensorboard_shows_what_was_logged(tmp_path):
    (run,) = read_runs(TRAINING, TrustPolicy.of([]))
    export_tensorboard([run], tmp_path)
    shown = scalars(tmp_path / run.name)
    assert set(shown) == {metric.name for metric in run.metrics}
    returns = {event.step: event.value for event in shown["training/episode_return"]}
    assert returns == pytest.approx(logged("episode_return"), rel=2**-23)
    times = {event.step: event.wall_time for event in shown["training/loss"]}
    assert times == {point.step: point.time for point in named(run, "training/loss")}


def named(run, name):
    return next(metric.points for metric in run.metrics if metric.name == name)


def test_each_member_of_a_study_is_a_run(tmp_path):
    runs = read_runs(STUDY, TrustPolicy.of([]))
    export_tensorboard(runs, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(run.name for run in runs)
    assert all("evaluation/mean_return" in scalars(tmp_path / run.name) for run in runs)


def test_an_existing_run_is_not_replaced(tmp_path):
    runs = read_runs(TRAINING, TrustPolicy.of([]))
    export_tensorboard(runs, tmp_path)
    with pytest.raises(CapsuleError) as raised:
        export_tensorboard(runs, tmp_path)
    assert raised.value.code == "CAP-P203"


def test_an_error_leaves_no_run_at_all(tmp_path):
    runs = read_runs(STUDY, TrustPolicy.of([]))
    (tmp_path / runs[-1].name).mkdir()
    (tmp_path / runs[-1].name / "file").write_text("")
    with pytest.raises(CapsuleError, match="CAP-P203"):
        export_tensorboard(runs, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [runs[-1].name]


def test_extreme_values_and_names_are_read_back(tmp_path):
    points = [
        Point(0, math.nan, None),
        Point(2**53 - 1, 1e300, 2.5),
        Point(3, -1e300, None),
        Point(4, -0.0, None),
    ]
    with (tmp_path / "events.out.tfevents.0").open("wb") as stream:
        writer = EventWriter(stream.write, 7.0)
        for point in points:
            writer.write("ü/é" + "x" * 300, point)
    (events,) = scalars(tmp_path).values()
    assert [event.step for event in events] == [0, 2**53 - 1, 3, 4]
    assert math.isnan(events[0].value)
    assert [event.value for event in events[1:]] == [math.inf, -math.inf, 0.0]
    assert [event.wall_time for event in events] == [7.0, 2.5, 7.0, 7.0]


def test_a_new_file_begins_with_its_version():
    stream = io.BytesIO()
    EventWriter(stream.write, 0.0)
    assert b"brain.Event:2" in stream.getvalue()
