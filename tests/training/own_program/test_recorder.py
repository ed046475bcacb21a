"""The optional helper, without Capsule and with it."""

import json
import math
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from capsule.experiment.contract import Event
from capsule.training import run
from capsule.training.own_program import recorder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_without_capsule_everything_is_below_the_working_folder(folder):
    with run() as record:
        record.log(1, loss=torch.tensor(0.1), score=np.float64(2.5), count=3)
        record.log(2, loss=math.nan, score=-math.inf)
        record.evaluation(2, [1, 2.0])
        path = record.checkpoint(2, {"b": torch.ones(2, 2).t(), "a": np.arange(3)})
    assert not record.under_capsule
    assert lines(folder / "outputs/metrics.jsonl") == [
        {"step": 1, "loss": float(np.float32(0.1)), "score": 2.5, "count": 3},
        {"step": 2, "loss": "nan", "score": "-inf"},
    ]
    assert lines(folder / "outputs/evaluation.jsonl") == [{"step": 2, "returns": [1, 2.0]}]
    assert path.name == "step-000000000002.safetensors"
    tensors = load_file(path)
    assert tensors["a"].tolist() == [0, 1, 2]
    assert tensors["b"].shape == (2, 2)


def test_a_checkpoint_is_a_function_of_its_tensors(folder):
    with run() as record:
        first = record.checkpoint(1, {"a": np.ones(2), "b": np.zeros(3)}).read_bytes()
        second = record.checkpoint(1, {"b": np.zeros(3), "a": np.ones(2)}).read_bytes()
    assert first == second


def test_numbers_survive_to_the_last_bit(folder):
    values = [0.1 + 0.2, 5e-324, 1.7976931348623157e308, -0.0]
    with run() as record:
        for step, value in enumerate(values):
            record.log(step, value=value)
    found = [line["value"] for line in lines(folder / "outputs/metrics.jsonl")]
    assert [value.hex() for value in found] == [value.hex() for value in values]


@pytest.mark.parametrize("integer", [int, np.int64, torch.tensor])
def test_integers_of_any_kind_are_exact(folder, integer):
    with run() as record:
        record.log(1, seed=integer(2**53 + 1), flag=True)
    text = (folder / "outputs/metrics.jsonl").read_text()
    assert text == '{"step": 1, "seed": 9007199254740993, "flag": 1}\n'


def test_a_second_run_begins_anew(folder):
    for _ in range(2):
        with run() as record:
            record.log(1, loss=0)
    assert len(lines(folder / "outputs/metrics.jsonl")) == 1


@pytest.mark.parametrize("total", [10, 10.0, np.int64(10)])
def test_under_capsule_the_variables_say_where_and_progress_is_told(folder, monkeypatch, total):
    monkeypatch.setenv("CAPSULE_RUN", str(folder))
    monkeypatch.setenv("CAPSULE_OUTPUT", str(folder / "there"))
    monkeypatch.setenv("CAPSULE_STATE", str(folder / "kept"))
    monkeypatch.setenv("CAPSULE_SEED", "11")
    with run(total_steps=total) as record:
        assert (record.seed, record.resumed, record.under_capsule) == (11, False, True)
        record.log(5, loss=0.25)
        record.log(6, loss=0.5)
    assert len(lines(folder / "there/metrics.jsonl")) == 2
    assert (folder / "kept").is_dir()
    told = [
        Event.model_validate_json(line)
        for line in (folder / "events.jsonl").read_bytes().splitlines()
    ]
    assert [(event.step, event.total_steps, event.message) for event in told] == [
        (5, 10, "loss 0.25")
    ]


@pytest.mark.parametrize("interval", [0, math.inf])
def test_the_calendar_clock_is_read_once_however_often_progress_is_told(
    folder, monkeypatch, interval
):
    """A reading advances a virtual clock, so the program would see how fast the machine is."""
    monkeypatch.setenv("CAPSULE_RUN", str(folder))
    monkeypatch.setattr(recorder, "PROGRESS_SECONDS", interval)
    moments, readings = iter((100.0, 101.0, 103.5)), []
    monkeypatch.setattr(recorder.time, "monotonic", lambda: next(moments))
    monkeypatch.setattr(recorder.time, "time", lambda: readings.append(None) or 1_000.0)
    with run() as record:
        record.log(1, loss=0)
        record.log(2, loss=0)
    assert len(readings) == 1
    told = lines(folder / "events.jsonl")
    # The first progress is told at once; infinity has not passed since any earlier moment.
    assert [event["time"] for event in told] == [1_001.0, 1_003.5][: 2 if interval == 0 else 1]


def test_a_resumed_run_goes_on_after_the_step_of_its_state(folder, monkeypatch):
    with run() as record:
        for step in (1, 2, 3):
            record.log(step, loss=step)
    with (folder / "outputs/metrics.jsonl").open("a") as stream:
        stream.write('{"step": 4, "lo')  # killed here
    monkeypatch.setenv("CAPSULE_RESUMED", "1")
    with run() as record:
        assert record.resumed
        record.resume_from(2)
        record.log(3, loss=3)
    assert [line["step"] for line in lines(folder / "outputs/metrics.jsonl")] == [1, 2, 3]


def test_lines_survive_a_resumption_that_ends_while_it_drops_some(folder):
    with run() as record:
        for step in (1, 2, 3):
            record.log(step, loss=step)
        before = lines(folder / "outputs/metrics.jsonl")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))  # as a full disk
        try:
            with pytest.raises(OSError, match="File too large"):
                record.resume_from(2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert lines(folder / "outputs/metrics.jsonl") == before


def test_importing_the_package_imports_nothing_more():
    code = "import sys, capsule.training; print('pydantic' in sys.modules, 'json' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
