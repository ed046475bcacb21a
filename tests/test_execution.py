"""What the host reads of a run directory that its task may have filled with anything."""

import json
import os
from types import SimpleNamespace

import pytest

from capsule import execution
from capsule.engine.gpu import no_gpu
from capsule.engine.interface import Exit
from capsule.execution import (
    MAX_READ_BYTES,
    MAX_SHOWN_EVENTS,
    VariedSurroundings,
    _EventTail,
    _outcome,
    check_run_directory,
    look,
)
from capsule.experiment import contract
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.spec import SourcesSpec
from tests.verification.runs import CARTPOLE, IMPALA, make_lock, merged

EVENT = {"time": 0.0, "kind": "progress", "step": 1, "total_steps": 2}


class Recorder:
    """Keeps events."""

    def __init__(self):
        self.events = []

    def note(self, message):
        raise NotImplementedError

    def event(self, event):
        self.events.append(event)


@pytest.fixture
def run_directory(tmp_path):
    folder = tmp_path / "run"
    for path in ("entropy/start-1/journal", "checkpoints/one.safetensors", "workspace/sub/file",
                 "state/replay/data", "replay/frames", *contract.READ_FILES):  # fmt: skip
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()
    return folder


def refused(code, call, *arguments):
    with pytest.raises(CapsuleError) as caught:
        call(*arguments)
    assert (caught.value.code, caught.value.exit_code) == (code, ExitCode.TRAINING_FAILED)
    return caught.value.message


class Refusing:
    """An engine that can make everything ready, and run nothing."""

    name = "process"

    def __init__(self):
        self.prepared = []

    def check(self, _lock):
        raise no_gpu("there is none")

    def prepare(self, lock, image, _cache, *, progress):  # noqa: ARG002 - the interface
        self.prepared.append(lock)


def test_an_image_is_built_where_it_cannot_run(monkeypatch):
    monkeypatch.setattr(execution, "_obtain", lambda *_: None)
    engine, lock = Refusing(), make_lock(CARTPOLE)
    facts = {"sources": SourcesSpec(), "reporter": Recorder()}
    with pytest.raises(CapsuleError, match="CAP-E003"):
        execution.prepare(lock, engine, None, **facts)
    assert engine.prepared == []
    execution.prepare(lock, engine, None, to_run=False, **facts)
    assert engine.prepared == [lock]


class Reporting:
    """An engine whose tasks print a line, which it keeps."""

    def __init__(self, line):
        self._line = line

    def run(self, task, **_):
        self.task = task
        (task.run_directory / contract.LOG).write_text(f"a warning\n{self._line}\n")
        return Exit(1, "exited")


SEEN = {"locale": "C", "timezone": "UTC", "hostname": "there", "processors": "0", "told": 4}


def test_what_a_program_reports_of_its_surroundings_is_read_back(tmp_path):
    engine, lock = Reporting(json.dumps(SEEN)), make_lock(CARTPOLE)
    surroundings = VariedSurroundings(hostname="there", processors="0", variables={"TZ": "A-1"})
    seen = look(lock, engine, tmp_path / "look", lock.spec.limits, surroundings)
    assert seen.model_dump() == SEEN
    assert (engine.task.hostname, engine.task.processors) == ("there", "0")
    assert (engine.task.environment["TZ"], engine.task.environment["LANG"]) == ("A-1", "C.UTF-8")


@pytest.mark.parametrize("line", ["Traceback", "{}", json.dumps(SEEN | {"told": 0})])
def test_a_program_that_reports_nothing_of_its_surroundings_decides_nothing(tmp_path, line):
    engine, lock = Reporting(line), make_lock(CARTPOLE)
    with pytest.raises(CapsuleError, match="CAP-E043") as caught:
        look(lock, engine, tmp_path / "look", lock.spec.limits, VariedSurroundings())
    assert caught.value.exit_code == ExitCode.INCONCLUSIVE


def test_an_ordinary_run_directory_is_accepted(run_directory):
    check_run_directory(run_directory)


def test_a_program_may_put_anything_into_its_own_folders(run_directory):
    for folder in ("workspace", "state", "workspace/sub"):
        os.mkfifo(run_directory / folder / "pipe")
        (run_directory / folder / "link").symlink_to("/etc")
        (run_directory / folder / "result.json").mkdir()
    check_run_directory(run_directory)


@pytest.mark.parametrize("name", sorted(contract.READ_FILES))
def test_a_document_must_be_a_regular_file(run_directory, name):
    path = run_directory / name
    path.unlink()
    for make in (os.mkfifo, os.mkdir, lambda path: path.symlink_to("/etc/passwd")):
        make(path)
        assert name in refused("CAP-E041", check_run_directory, run_directory)
        path.rmdir() if path.is_dir() else path.unlink()
    check_run_directory(run_directory)


@pytest.mark.parametrize(
    "path", ["entropy", "entropy/start-1", "entropy/start-1/journal", "checkpoints", "workspace"]
)
def test_a_folder_that_is_read_must_not_lead_elsewhere(run_directory, path):
    moved = run_directory.parent / "moved"
    (run_directory / path).rename(moved)
    (run_directory / path).symlink_to(moved)
    assert path.split("/")[-1] in refused("CAP-E041", check_run_directory, run_directory)


@pytest.mark.parametrize("path", ["entropy/start-1/pipe", "checkpoints/pipe"])
def test_a_pipe_among_what_is_read_is_refused(run_directory, path):
    os.mkfifo(run_directory / path)
    assert "pipe" in refused("CAP-E041", check_run_directory, run_directory)


def test_a_flood_of_events_is_thinned(tmp_path):
    path, recorder = tmp_path / "events.jsonl", Recorder()
    tail = _EventTail(path, recorder)
    tail.poll()
    path.write_text("".join(json.dumps(EVENT | {"step": step}) + "\n" for step in range(500)))
    tail.poll()
    assert [event.step for event in recorder.events] == list(range(500))[-MAX_SHOWN_EVENTS:]


def test_events_of_an_earlier_start_are_not_shown_again(tmp_path):
    path, recorder = tmp_path / "events.jsonl", Recorder()
    line = json.dumps(EVENT) + "\n"
    path.write_text(line * (2 * MAX_READ_BYTES // len(line)) + "unfinished")
    tail = _EventTail(path, recorder)
    kept = path.read_text().removesuffix("unfinished")
    path.write_text(kept + json.dumps(EVENT | {"step": 7}) + "\n")
    tail.poll()
    assert [event.step for event in recorder.events] == [7]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/etc/passwd")])
def test_events_that_are_no_file_are_an_error_and_not_waited_for(tmp_path, make):
    path = tmp_path / "events.jsonl"
    tail = _EventTail(path, Recorder())
    make(path)
    refused("CAP-E011", tail.poll)


def test_an_event_without_end_is_an_error(tmp_path):
    path = tmp_path / "events.jsonl"
    tail = _EventTail(path, Recorder())
    path.write_bytes(b"x" * (MAX_READ_BYTES - 1))
    tail.poll()
    path.write_bytes(b"x" * MAX_READ_BYTES)
    assert "longer" in refused("CAP-E011", tail.poll)


def test_a_failure_of_the_training_side_has_the_status_of_its_code(tmp_path):
    def outcome(code):
        failure = contract.Failure(code=code, message="it failed", fix="Repair it.", step=7)
        (tmp_path / contract.FAILURE).write_bytes(failure.document())
        with pytest.raises(CapsuleError) as caught:
            _outcome(SimpleNamespace(trainer=None), tmp_path, Exit(6, "exited"))
        return caught.value

    for code, status in (
        ("CAP-T301", ExitCode.TRAINING_FAILED),
        ("CAP-T384", ExitCode.USAGE),
        ("CAP-T381", ExitCode.DIFFERS),
        ("CAP-T109", ExitCode.INCONCLUSIVE),
    ):
        error = outcome(code)
        assert (error.code, error.exit_code) == (code, status)
        assert (error.message, error.fix) == ("it failed (step 7)", "Repair it.")
    for code in ("CAP-T999", "CAP-V010", "anything"):  # the image raises none of these
        error = outcome(code)
        assert (error.code, error.exit_code) == ("CAP-E011", ExitCode.TRAINING_FAILED)
        assert f"failure.json is malformed: the unknown code {code!r}: it failed" in error.message
    (tmp_path / contract.LOG).write_text("".join(f"line {number}\n" for number in range(20)))
    error = outcome("CAP-T302")
    assert error.message.splitlines() == ["it failed (step 7)"] + [
        f"  line {number}" for number in range(12, 20)
    ]
    assert str(tmp_path / contract.LOG) in error.fix


SERVED = {"schedule": {"mode": "recorded"}, "inference": {"mode": "server"}}


@pytest.mark.parametrize(
    ("trainer", "options", "needed"),
    [
        ({}, {"learners": 2}, "--learners 2 requires trainer.algorithm 'impala'"),
        ({}, {"replicas": 2}, "--replicas 2 requires trainer.inference.mode 'server'"),
        (SERVED, {"learners": 2, "replicas": 2}, None),
        ({}, {"learners": 1, "replicas": 1}, None),
    ],
)
def test_learners_and_replicas_are_for_trainers_that_can_use_them(trainer, options, needed):
    spec = make_lock(merged(IMPALA, {"trainer": trainer}) if trainer else CARTPOLE).spec
    check = execution.ExecutionOptions(**options).check
    if needed is None:
        check(spec)
        return
    with pytest.raises(CapsuleError, match=f"CAP-S009 {needed}"):
        check(spec)


def test_replicas_are_for_a_server_only():
    spec = make_lock(IMPALA).spec
    execution.ExecutionOptions(learners=2).check(spec)
    with pytest.raises(CapsuleError, match="CAP-S009 --replicas 2"):
        execution.ExecutionOptions(replicas=2).check(spec)
