"""The files that every job reads and writes in its run directory, and orders to stop."""

import errno
import json
import os
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment import contract
from capsule.experiment.contract import Event, Failure, Job
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.training.state.run_directory import (
    append_event,
    drop_partial_line,
    not_written,
    read_job,
    record_failure,
    record_runtime,
    stop_signals,
    write_document,
    write_file,
)
from tests.training.conftest import CARTPOLE, make_spec, new_run, read

# --- the job --------------------------------------------------------------------------------------


def test_a_job_is_read_as_it_was_written(tmp_path):
    directory = new_run(tmp_path / "run", make_spec(CARTPOLE), stop_after=40)
    assert read_job(directory) == Job(spec=make_spec(CARTPOLE), stop_after=40)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        (b"", "not JSON"),
        (b"{}", "spec"),
        (b'{"schema":"capsule/job/v1","stop_after":"soon"}', "stop_after"),
    ],
)
def test_a_job_that_is_missing_or_malformed_is_refused_with_the_reason(tmp_path, content, reason):
    if content is not None:
        (tmp_path / contract.JOB).write_bytes(content)
    with pytest.raises(CapsuleError, match=rf"CAP-T111 job\.json cannot be used: (.|\n)*{reason}"):
        read_job(tmp_path)


# --- the runtime ----------------------------------------------------------------------------------

FLAGS, LIBRARIES = {"torch.num_threads": "1"}, {"torch": "2.9.1"}


def runtime_of(flags=FLAGS, libraries=LIBRARIES, **device):
    return contract.Runtime(flags=flags, libraries=libraries, device=device)


@pytest.mark.parametrize("portable", [True, False])
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"flags": {"torch.num_threads": "2"}},
            "with torch.num_threads '1' and would resume with '2'",
        ),
        ({"flags": {}}, "with torch.num_threads '1' and would resume with None"),
        ({"flags": {**FLAGS, "mkl": "off"}}, "with mkl None and would resume with 'off'"),
        ({"libraries": {"torch": "2.9.2"}}, "with torch '2.9.1' and would resume with '2.9.2'"),
    ],
)
def test_a_run_is_resumed_under_the_same_flags_and_libraries_alone(
    tmp_path, portable, changed, said
):
    record_runtime(tmp_path, runtime_of(), portable=portable)
    before = (tmp_path / contract.RUNTIME).read_bytes()
    record_runtime(tmp_path, runtime_of(), portable=portable)
    with pytest.raises(CapsuleError) as refused:
        record_runtime(tmp_path, runtime_of(**changed), portable=portable)
    assert (refused.value.code, refused.value.exit_code) == ("CAP-T113", ExitCode.INCONCLUSIVE)
    assert said in refused.value.message
    assert "image" in refused.value.fix
    assert (tmp_path / contract.RUNTIME).read_bytes() == before
    # A program that starts over keeps nothing of the earlier attempt.
    record_runtime(tmp_path, runtime_of(**changed), portable=portable, resumed=False)
    found = contract.Runtime.parse((tmp_path / contract.RUNTIME).read_bytes())
    assert found == runtime_of(**changed)


@pytest.mark.parametrize(
    ("change", "resumes"),
    [
        ({"driver": "590.44.01", "memory_bytes": 79_000_000_000}, True),  # a cluster was updated
        ({"uuid_sha256": "b" * 64}, True),
        ({"name": "NVIDIA H200"}, False),
        ({"multiprocessors": 114}, False),
        ({"compute_capability": "10.0"}, False),
    ],
)
def test_a_run_on_a_gpu_is_resumed_where_only_the_driver_or_the_card_is_another(
    tmp_path, change, resumes
):
    device = {
        "kind": "cuda",
        "name": "NVIDIA H100 80GB HBM3",
        "compute_capability": "9.0",
        "multiprocessors": 132,
        "uuid_sha256": "a" * 64,
        "memory_bytes": 85_000_000_000,
        "driver": "580.95.05",
    }
    runtime = contract.Runtime(flags={}, libraries={}, device=device)
    record_runtime(tmp_path, runtime, portable=False)
    resumed = runtime.model_copy(update={"device": device | change})
    if resumes:
        record_runtime(tmp_path, resumed, portable=False)
        assert read(tmp_path, contract.RUNTIME)["device"] == device | change
    else:
        with pytest.raises(CapsuleError, match="CAP-T113"):
            record_runtime(tmp_path, resumed, portable=False)


@pytest.mark.parametrize("portable", [True, False])
def test_a_run_is_resumed_on_another_machine_only_where_that_cannot_change_bits(tmp_path, portable):
    def runtime(name, cores=2):
        return contract.Runtime(flags={}, libraries={}, device={"name": name, "cores": cores})

    record_runtime(tmp_path, runtime("A"), portable=portable)
    record_runtime(tmp_path, runtime("A", cores=1), portable=portable)
    assert read(tmp_path, contract.RUNTIME)["earlier_devices"] == []
    if not portable:
        with pytest.raises(CapsuleError, match="began with device name 'A'") as refused:
            record_runtime(tmp_path, runtime("B"), portable=False)
        assert refused.value.code == "CAP-T113"
        return
    record_runtime(tmp_path, runtime("B"), portable=True)
    record_runtime(tmp_path, runtime("A"), portable=True)
    earlier = read(tmp_path, contract.RUNTIME)["earlier_devices"]
    assert [device["name"] for device in earlier] == ["A", "B"]


# --- documents ------------------------------------------------------------------------------------


def test_a_document_is_written_as_canonical_json_in_place_of_the_one_before(tmp_path):
    path = tmp_path / "failure.json"
    for message in ("a long message that is replaced", "short"):
        write_document(path, Failure(code="CAP-T151", message=message, fix="é", step=3))
    document = {
        "schema": "capsule/failure/v1",
        "code": "CAP-T151",
        "message": "short",
        "fix": "é",
        "step": 3,
    }
    wanted = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert path.read_bytes() == wanted.encode()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", [None, 240])
def test_a_failure_keeps_what_the_error_says(tmp_path, step):
    record_failure(tmp_path, CapsuleError("CAP-T151", "the loss is nan", fix="Lower it."), step)
    found = read(tmp_path, contract.FAILURE)
    assert (found["code"], found["message"], found["fix"]) == (
        "CAP-T151",
        "the loss is nan",
        "Lower it.",
    )
    assert found.get("step") == step


def test_a_file_that_cannot_be_written_is_named_with_its_size_and_leaves_nothing_behind(
    tmp_path, monkeypatch
):
    (tmp_path / "schedule.log").write_bytes(b"before")

    def full(_file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CapsuleError) as refused:
        write_file(tmp_path / "schedule.log", bytes(1_234))
    error = refused.value
    assert (error.code, error.exit_code) == ("CAP-T131", ExitCode.TRAINING_FAILED)
    assert error.message == "schedule.log (1234 bytes) cannot be written: No space left on device"
    assert "limits.disk_mb" in error.fix
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"before"]


def test_a_file_cannot_replace_a_folder(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(CapsuleError, match=r"CAP-T131 taken \(1 bytes\) cannot be written: Is a"):
        write_file(tmp_path / "taken", b"1")


def test_the_error_of_a_file_says_what_was_not_written_and_why():
    error = not_written("the trace", OSError(errno.EDQUOT, "Disk quota exceeded"))
    assert (error.code, error.message) == (
        "CAP-T131",
        "the trace cannot be written: Disk quota exceeded",
    )


# --- events ---------------------------------------------------------------------------------------

KINDS = st.sampled_from(["start", "resume", "progress", "checkpoint", "evaluation", "finish"])
EVENTS = st.builds(
    Event,
    time=st.floats(0, 2**40),
    kind=KINDS,
    step=st.integers(0, 10**12),
    loss=st.none() | st.floats(-1e30, 1e30),
    message=st.none() | st.text('aé\n"{', max_size=9),
)


@settings(max_examples=30)
@given(st.lists(EVENTS, max_size=4))
def test_each_event_is_a_line_of_its_own_with_the_facts_that_are_known(tmp_path_factory, events):
    path = tmp_path_factory.mktemp("events") / contract.EVENTS
    for event in events:
        append_event(path, event)
    lines = path.read_bytes().split(b"\n")[:-1] if events else []
    assert [Event.model_validate_json(line) for line in lines] == events
    assert not any(None in json.loads(line).values() for line in lines)


@settings(max_examples=50)
@given(st.binary(max_size=30) | st.lists(st.sampled_from([b"\n", b"a", b"{}"])).map(b"".join))
def test_only_whole_lines_are_left(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("lines") / "events.jsonl"
    path.write_bytes(data)
    wanted = b"".join(line + b"\n" for line in data.split(b"\n")[:-1])
    for _ in range(2):
        drop_partial_line(path)
        assert path.read_bytes() == wanted


def test_lines_that_do_not_exist_yet_stay_so(tmp_path):
    drop_partial_line(tmp_path / "events.jsonl")
    assert not list(tmp_path.iterdir())


# --- orders to stop -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_order_to_stop_is_a_flag_and_interrupts_nothing(number):
    with stop_signals() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        assert stop.wait(60)
        os.kill(os.getpid(), number)  # a second one changes nothing
        assert stop.is_set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_after_the_run_orders_to_stop_are_what_they_were(number):
    received = []
    before = signal.signal(number, lambda *_: received.append(number))
    try:
        with pytest.raises(ZeroDivisionError), stop_signals():
            raise ZeroDivisionError
        os.kill(os.getpid(), number)
        with stop_signals() as stop:
            assert not stop.is_set()
    finally:
        signal.signal(number, before)
    assert received == [number]
