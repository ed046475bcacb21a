"""Whole runs in processes of their own: equal, killed, interrupted, cut short, failing."""

import errno
import json
import random
import shutil
import signal
import time

import pytest

from capsule.experiment import contract
from capsule.experiment.contract import (
    CheckpointIndex,
    DenseWindow,
    Evaluation,
    Event,
    Job,
    Result,
    StreamProfiles,
)
from capsule.experiment.errors import CapsuleError
from capsule.experiment.trace import first_difference, trace_heads
from capsule.training import lifecycle
from capsule.training.lifecycle import processors_of
from capsule.training.state.checkpoint import load_tensors
from tests.conftest import caught
from tests.training.conftest import (
    BREAKOUT,
    CARTPOLE,
    claimed,
    finish_run,
    kill_when_traced,
    make_spec,
    merge,
    new_run,
    read,
    start_run,
)
from tests.training.impala.conftest import TASK as IMPALA


@pytest.mark.parametrize(
    ("how", "device", "processors"),
    [
        ({}, "cpu", (16, 16)),
        ({}, "cuda", (16, 1)),  # actors play on all processors beside a learner on a GPU
        ({"dense": DenseWindow(first=4, last=8)}, "cpu", (1, 1)),
        ({"dense": DenseWindow(first=4, last=8)}, "cuda", (1, 1)),
    ],
)
def test_the_processors_of_a_run(how, device, processors):
    job = Job(spec=make_spec(CARTPOLE), **how)
    assert processors_of(job, device, 16) == processors


@pytest.mark.slow
def test_a_finished_run_keeps_the_contract(cartpole_run):
    result = Result.model_validate_json((cartpole_run / contract.RESULT).read_bytes())
    assert (result.complete, result.steps, result.trace_records) == (True, 1_600, 200)
    traced = trace_heads(cartpole_run / contract.TRACE)
    assert (traced.records, traced.last) == (200, result.trace_head)
    index = CheckpointIndex.model_validate_json(
        (cartpole_run / contract.CHECKPOINT_INDEX).read_bytes()
    )
    assert [checkpoint.step for checkpoint in index.checkpoints] == [400, 800, 1_200, 1_600]
    assert index.checkpoints[-1].trace_head == result.trace_head
    final = cartpole_run / contract.CHECKPOINTS / "step-000000001600.safetensors"
    assert load_tensors(final, index.checkpoints[-1].tensors)
    evaluation = Evaluation.model_validate_json((cartpole_run / contract.EVALUATION).read_bytes())
    assert [point.step for point in evaluation.points] == [0, 800, 1_600]
    assert len(evaluation.starts) == 3
    streams = StreamProfiles.model_validate_json((cartpole_run / contract.STREAMS).read_bytes())
    draws = {profile.name: profile.draws for profile in streams.streams}
    assert draws["exploration"] == 2 * 1_600
    lines = (cartpole_run / contract.EVENTS).read_bytes().splitlines()
    kinds = [Event.model_validate_json(line).kind for line in lines]
    assert (kinds[0], kinds[-1]) == ("start", "finish")


@pytest.mark.slow
def test_two_processes_give_the_same_bytes(cartpole_run, tmp_path):
    again = new_run(tmp_path / "again", make_spec(CARTPOLE))
    assert finish_run(again, warm=False)[0] == 0
    assert claimed(again) == claimed(cartpole_run)


@pytest.mark.slow
def test_another_seed_gives_another_run(cartpole_run, tmp_path):
    other = new_run(tmp_path / "other", make_spec(CARTPOLE, seeds={"root": 1}), stop_after=80)
    assert finish_run(other)[0] == 0
    found = first_difference(cartpole_run / contract.TRACE, other / contract.TRACE)
    assert (found.step, found.component, found.name) == (8, "streams", "environment")


# Shares of the trace after which the process is killed; beyond 1 it is evaluating or just done.
MOMENTS = [0.01, *(share / 100 for share in random.Random(2019).sample(range(1, 105), 2))]  # noqa: S311


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_resumes_to_the_same_bytes(cartpole_run, tmp_path, moment):
    directory = new_run(tmp_path / "killed", make_spec(CARTPOLE))
    kill_when_traced(directory, (cartpole_run / contract.TRACE).stat().st_size * moment)
    assert finish_run(directory)[0] == 0
    assert claimed(directory) == claimed(cartpole_run)


@pytest.mark.slow
def test_a_run_killed_again_and_again_resumes_to_the_same_bytes(cartpole_run, tmp_path):
    """And what a kill left half written is removed."""
    directory = new_run(tmp_path / "killed", make_spec(CARTPOLE))
    size = (cartpole_run / contract.TRACE).stat().st_size
    for moment in sorted(MOMENTS):
        kill_when_traced(directory, size * moment)
        if moment < 1:
            for folder in (directory, directory / contract.CHECKPOINTS, directory / contract.STATE):
                folder.mkdir(exist_ok=True)
                (folder / ".step-000000000400.json.qntkq3b_").write_text("half")
    assert finish_run(directory)[0] == 0
    assert claimed(directory) == claimed(cartpole_run)
    assert not list(directory.rglob(".step*"))


@pytest.mark.soak
@pytest.mark.slow
def test_a_killed_run_with_adam_resumes_to_the_same_bytes(tmp_path):
    trainer = {"optimizer": "adam", "updates": 2, "concurrent": False}
    spec = make_spec(CARTPOLE, trainer=trainer)
    whole, killed = new_run(tmp_path / "whole", spec), new_run(tmp_path / "killed", spec)
    assert finish_run(whole)[0] == 0
    kill_when_traced(killed, (whole / contract.TRACE).stat().st_size * 0.7)
    assert finish_run(killed)[0] == 0
    assert claimed(killed) == claimed(whole)


@pytest.mark.slow
def test_a_killed_atari_run_resumes_to_the_same_bytes(tmp_path):
    whole = new_run(tmp_path / "whole", make_spec(BREAKOUT))
    assert finish_run(whole)[0] == 0
    killed = new_run(tmp_path / "killed", make_spec(BREAKOUT))
    kill_when_traced(killed, (whole / contract.TRACE).stat().st_size * 0.7)
    assert finish_run(killed)[0] == 0
    assert claimed(killed) == claimed(whole)


@pytest.mark.slow
def test_a_signal_saves_the_run_and_a_restart_finishes_it(cartpole_run, tmp_path):
    directory = caught(stopped_twice, tmp_path)
    assert finish_run(directory)[0] == 0
    assert claimed(directory) == claimed(cartpole_run)


def stopped_twice(directory):
    """Stop a new run by a signal, resume it, and stop it again; return None if it has ended."""
    new_run(directory, make_spec(CARTPOLE))
    trace, size = directory / contract.TRACE, 0
    for number in (signal.SIGTERM, signal.SIGINT):
        process = start_run(directory)
        while not trace.exists() or trace.stat().st_size <= size:
            assert process.poll() in (None, 0)
            time.sleep(0.005)
        process.send_signal(number)
        process.communicate(timeout=600)
        if process.returncode == 0:
            return None
        assert process.returncode == 130
        assert not (directory / contract.RESULT).exists()
        size = trace.stat().st_size
    return directory


@pytest.mark.slow
def test_a_prefix_repeats_the_start_of_the_run(cartpole_run, tmp_path):
    prefix = new_run(tmp_path / "prefix", make_spec(CARTPOLE), stop_after=420)
    assert finish_run(prefix)[0] == 0
    result = read(prefix, contract.RESULT)
    assert (result["complete"], result["steps"]) == (False, 420)
    events = (prefix / contract.EVENTS).read_text().splitlines()
    assert {json.loads(line)["total_steps"] for line in events} == {420}
    assert not (prefix / contract.EVALUATION).exists()
    whole = read(cartpole_run, contract.CHECKPOINT_INDEX)["checkpoints"]
    assert read(prefix, contract.CHECKPOINT_INDEX)["checkpoints"] == whole[:1]
    traces = (prefix / contract.TRACE, cartpole_run / contract.TRACE)
    assert first_difference(*traces).component == "end"


@pytest.mark.slow
def test_steps_after_the_last_whole_record_are_traced_at_the_end(tmp_path):
    spec = make_spec(CARTPOLE, trainer={"total_steps": 404})
    directory = new_run(tmp_path / "odd", spec)
    assert finish_run(directory)[0] == 0
    assert read(directory, contract.RESULT)["trace_records"] == 404 // 8 + 1


@pytest.mark.slow
def test_a_finished_run_is_left_alone(cartpole_run):
    before = {path: path.stat().st_mtime_ns for path in cartpole_run.rglob("*")}
    assert finish_run(cartpole_run)[0] == 0
    assert {path: path.stat().st_mtime_ns for path in cartpole_run.rglob("*")} == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "stop_after", "status", "code"),
    [
        ({"trainer": {"learning_rate": 1e30}}, None, 6, "CAP-T151"),
        ({"environment": {"id": "NoSuchTask-v9"}}, None, 6, "CAP-T214"),
        # No random play of CartPole takes so long. It is found before training.
        ({"evaluation": {"min_actions": 300, "max_actions": 300}}, None, 6, "CAP-T231"),
        ({}, 81, 2, "CAP-T112"),
    ],
)
def test_a_failure_is_named(tmp_path, changes, stop_after, status, code):
    spec = make_spec(merge(CARTPOLE, changes))
    directory = new_run(tmp_path / "failing", spec, stop_after=stop_after)
    found, errors = finish_run(directory)
    failure = read(directory, contract.FAILURE)
    assert (found, failure["code"]) == (status, code)
    assert failure["message"] in errors
    assert "Traceback" not in errors
    if code == "CAP-T231":
        assert failure["step"] == 0
    if code == "CAP-T151":
        assert f"at step {failure['step']}" in failure["message"]
        assert 200 < failure["step"] <= 240
    assert not (directory / contract.RESULT).exists()


@pytest.mark.slow
def test_a_schedule_log_that_cannot_be_written_is_named(tmp_path):
    spec = make_spec(IMPALA, trainer={"schedule": {"mode": "recorded"}})
    directory = new_run(tmp_path / "run", spec, stop_after=20)
    (directory / contract.SCHEDULE).mkdir()
    status, errors = finish_run(directory)
    assert (status, read(directory, contract.FAILURE)["code"]) == (6, "CAP-T131")
    assert f"CAP-T131 {contract.SCHEDULE} (" in errors


def test_a_full_disk_is_named_at_whatever_moment_it_is_noticed(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lifecycle, "read_job", full)
    with pytest.raises(CapsuleError, match="a file of the run cannot be written: No space left"):
        lifecycle.run(tmp_path)
    assert read(tmp_path, contract.FAILURE)["code"] == "CAP-T131"


@pytest.mark.slow
def test_a_run_is_not_resumed_under_other_numerics(saved_run, tmp_path):
    directory = shutil.copytree(saved_run, tmp_path / "moved")
    runtime = directory / contract.RUNTIME
    runtime.write_bytes(runtime.read_bytes().replace(b'"torch.num_threads":"1"', b'"x":"1"'))
    status, _ = finish_run(directory)
    assert (status, read(directory, contract.FAILURE)["code"]) == (4, "CAP-T113")
