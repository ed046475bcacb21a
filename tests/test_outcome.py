"""What the host reads of a run directory that its task may have filled with anything."""

import json
import os
from functools import partial
from types import SimpleNamespace

import pytest

from capsule.engine.interface import Exit
from capsule.experiment import beneath, contract
from capsule.experiment.beneath import MAX_DEPTH
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.files import write_atomic
from capsule.experiment.trainers import CommandTrainer
from capsule.machine.devices import Device
from capsule.outcome import (
    MAX_READ_BYTES,
    MAX_SHOWN_EVENTS,
    EventTail,
    GpuCheck,
    check_run_directory,
    outcome,
)
from tests import refusals

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


refused = partial(refusals.refused, status=ExitCode.TRAINING_FAILED)


def test_an_ordinary_run_directory_is_accepted(run_directory):
    check_run_directory(run_directory)


def test_a_program_may_put_anything_into_its_own_folders(run_directory):
    for folder in ("workspace", "state", "workspace/sub"):
        os.mkfifo(run_directory / folder / "pipe")
        (run_directory / folder / "link").symlink_to("/etc")
        (run_directory / folder / "result.json").mkdir()
    check_run_directory(run_directory)


def test_a_dense_record_is_among_the_documents():
    assert contract.DENSE in contract.READ_FILES


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


@pytest.mark.parametrize("name", ["state", "workspace"])
def test_a_run_directory_that_is_too_deep_is_refused(run_directory, name):
    deep = run_directory.joinpath(name, *["x"] * (MAX_DEPTH - 2))
    deep.mkdir(parents=True)
    check_run_directory(run_directory)
    (deep / "x").mkdir()
    message = refused("CAP-E041", check_run_directory, run_directory)
    assert "too large to read: folders more than 64 deep" in message


def test_a_run_directory_with_too_many_entries_is_refused(run_directory, monkeypatch):
    monkeypatch.setattr(beneath, "MAX_ENTRIES", 5)
    message = refused("CAP-E041", check_run_directory, run_directory)
    assert "too large to read: more than 5 entries" in message


def test_a_flood_of_events_is_thinned(tmp_path):
    path, recorder = tmp_path / "events.jsonl", Recorder()
    tail = EventTail(path, recorder)
    tail.poll()
    path.write_text("".join(json.dumps(EVENT | {"step": step}) + "\n" for step in range(500)))
    tail.poll()
    assert [event.step for event in recorder.events] == list(range(500))[-MAX_SHOWN_EVENTS:]


def test_events_of_an_earlier_start_are_not_shown_again(tmp_path):
    path, recorder = tmp_path / "events.jsonl", Recorder()
    line = json.dumps(EVENT) + "\n"
    path.write_text(line * (2 * MAX_READ_BYTES // len(line)) + "unfinished")
    tail = EventTail(path, recorder)
    kept = path.read_text().removesuffix("unfinished")
    path.write_text(kept + json.dumps(EVENT | {"step": 7}) + "\n")
    tail.poll()
    assert [event.step for event in recorder.events] == [7]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/etc/passwd")])
def test_events_that_are_no_file_are_an_error_and_not_waited_for(tmp_path, make):
    path = tmp_path / "events.jsonl"
    tail = EventTail(path, Recorder())
    make(path)
    refused("CAP-E011", tail.poll)


def test_an_event_without_end_is_an_error(tmp_path):
    path = tmp_path / "events.jsonl"
    tail = EventTail(path, Recorder())
    path.write_bytes(b"x" * (MAX_READ_BYTES - 1))
    tail.poll()
    path.write_bytes(b"x" * MAX_READ_BYTES)
    assert "longer" in refused("CAP-E011", tail.poll)


def test_a_failure_of_the_training_side_has_the_status_of_its_code(tmp_path):
    def failed(code):
        failure = contract.Failure(code=code, message="it failed", fix="Repair it.", step=7)
        (tmp_path / contract.FAILURE).write_bytes(failure.document())
        with pytest.raises(CapsuleError) as caught:
            outcome(SimpleNamespace(trainer=None), tmp_path, Exit(6, "exited"))
        return caught.value

    for code, status in (
        ("CAP-T301", ExitCode.TRAINING_FAILED),
        ("CAP-T384", ExitCode.USAGE),
        ("CAP-T381", ExitCode.DIFFERS),
        ("CAP-T109", ExitCode.INCONCLUSIVE),
    ):
        error = failed(code)
        assert (error.code, error.exit_code) == (code, status)
        assert (error.message, error.fix) == ("it failed (step 7)", "Repair it.")
    for code in ("CAP-T999", "CAP-V010", "anything"):  # the image raises none of these
        error = failed(code)
        assert (error.code, error.exit_code) == ("CAP-E011", ExitCode.TRAINING_FAILED)
        assert f"failure.json is malformed: the unknown code {code!r}: it failed" in error.message
    (tmp_path / contract.LOG).write_text("".join(f"line {number}\n" for number in range(20)))
    error = failed("CAP-T302")
    assert error.message.splitlines() == ["it failed (step 7)"] + [
        f"  line {number}" for number in range(12, 20)
    ]
    assert str(tmp_path / contract.LOG) in error.fix
    # The training side ends the log with its report, which the message begins with.
    with (tmp_path / contract.LOG).open("a") as log:
        log.write("CAP-T302 it failed\nRepair it.\n")
    assert failed("CAP-T302").message == error.message


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("RuntimeError: can't start new thread", "Raise limits.processes."),
        ("what(): Resource temporarily unavailable ray.so(+0x18)", "raise limits.processes."),
        ("OSError: [Errno 28] No space left on device: '/tmp/x'", "raise limits.temporary_mb."),
        ("This might be caused by insufficient shared memory (shm)", "Raise limits.temporary_mb."),
    ],
)
def test_a_program_that_reached_a_limit_is_given_the_name_of_the_limit(tmp_path, line, remedy):
    (tmp_path / contract.LOG).write_text(f"{line}\n" + "a frame of its stack\n" * 200)
    failure = contract.Failure(code="CAP-T302", message="it failed", fix="Repair it.", step=None)
    (tmp_path / contract.FAILURE).write_bytes(failure.document())
    with pytest.raises(CapsuleError) as caught:
        outcome(SimpleNamespace(trainer=None), tmp_path, Exit(6, "exited"))
    assert caught.value.fix.startswith("Its output contains ")
    assert f"{remedy} Otherwise, correct the program. " in caught.value.fix


@pytest.mark.parametrize(
    ("exception", "remedy"),
    [
        (
            "ModuleNotFoundError: No module named 'six.moves'",
            "to image.packages, or select its file in code.files.",
        ),
        (
            "ModuleNotFoundError: No module named 'pkg_resources'",
            "later versions of setuptools do not contain this module.",
        ),
        (
            "FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/x/patch.sh'",
            "If it is one of your files, select it in code.files, or list it under data.",
        ),
        (
            "ImportError: libGL.so.1: cannot open shared object file: No such file or directory",
            "Add the Debian package that contains this library to image.debian.",
        ),
        (
            "urllib.error.URLError: <urlopen error [Errno -3] Temporary failure in name resolution",
            "A run has no network: list what the program downloads under data.",
        ),
        (
            "OSError: [Errno 30] Read-only file system: '/usr/local/x'",
            "Write to the working folder or to /tmp.",
        ),
    ],
)
def test_a_program_that_lacked_something_is_given_the_field_of_the_spec(
    tmp_path, exception, remedy
):
    def fix(*exceptions):
        log = "".join(f"Traceback (most recent call last):\n  x\n{each}\n" for each in exceptions)
        (tmp_path / contract.LOG).write_text(log)
        failure = contract.Failure(code="CAP-T302", message="it failed", fix="", step=None)
        (tmp_path / contract.FAILURE).write_bytes(failure.document())
        with pytest.raises(CapsuleError) as caught:
            outcome(SimpleNamespace(trainer=None), tmp_path, Exit(1, "exited"))
        return caught.value.fix

    assert f"{remedy} Otherwise, correct the program. " in fix("KeyError: 1", exception)
    # A program may catch an exception, print it, and end because of another one.
    assert fix(exception, "KeyError: 1").startswith("Correct the program. ")


def test_the_exception_that_ended_a_program_is_shown_although_more_output_follows(tmp_path):
    def shown(*lines):
        (tmp_path / contract.LOG).write_text("".join(f"{line}\n" for line in lines))
        failure = contract.Failure(code="CAP-T302", message="it failed", fix="Repair it.", step=7)
        (tmp_path / contract.FAILURE).write_bytes(failure.document())
        with pytest.raises(CapsuleError) as caught:
            outcome(SimpleNamespace(trainer=None), tmp_path, Exit(6, "exited"))
        return [line.strip() for line in caught.value.message.splitlines()[1:]]

    start, cause, noise = "Traceback (most recent call last):", "KeyError: 'reward'", ["later"] * 60
    error = [start, "  File 'a.py', line 3, in step", "    infos['reward']", cause]
    ignored = ["Exception ignored in: <function close>", start, "  File 'b.py'", "ImportError"]
    assert shown(*error) == [line.strip() for line in error]
    assert shown(*error, *noise) == [cause, "…", *noise[:8]]
    assert shown(*error, *ignored, *noise) == [cause, "…", *noise[:8]]
    assert shown(start, "  File 'a.py'", "ValueError", *error, *noise) == [cause, "…", *noise[:8]]
    assert shown(*ignored, *noise) == noise[:8]


FIRST = "GPU-11111111-0000-4000-8000-000000000001"
SECOND = "GPU-11111111-0000-4000-8000-000000000011"
BIG = "MIG-44444444-0000-4000-8000-000000000041"
SMALL = "MIG-44444444-0000-4000-8000-000000000042"


def told_of(tmp_path, uuid):
    device = {"kind": "cuda"} if uuid is None else {"kind": "cuda", "uuid_sha256": uuid}
    runtime = contract.Runtime(flags={}, libraries={}, device=device)
    write_atomic(tmp_path / contract.RUNTIME, runtime.document())


@pytest.mark.parametrize(
    ("given", "told", "accepted"),
    [
        (FIRST, contract.gpu_identity(FIRST), True),
        (FIRST, contract.gpu_identity(SECOND), False),
        (FIRST, None, True),  # bundles of before say nothing of it
        (BIG, contract.gpu_identity(BIG), True),
        (
            BIG,
            contract.gpu_identity(BIG.replace("MIG-", "GPU-")),
            True,
        ),  # as torch's UUIDs have no prefix
        (BIG, contract.gpu_identity(SMALL), False),
        (BIG, contract.gpu_identity(FIRST), False),
        ("0", contract.gpu_identity(FIRST), True),  # of an engine elsewhere
        (None, None, True),
    ],
)
def test_a_run_must_use_the_gpu_that_it_was_given(tmp_path, given, told, accepted):
    gpus = (Device(0, "0", given, "NVIDIA H200", "9.0", 1),) if given else ()
    check = GpuCheck(gpus, tmp_path)
    check.poll()  # nothing is written yet
    told_of(tmp_path, told)
    for look in (check.poll, check.check):
        if accepted:
            look()
        else:
            with pytest.raises(CapsuleError, match=f"CAP-E048 .*{given}"):
                look()


def test_what_an_earlier_attempt_wrote_of_its_gpu_does_not_stop_a_resumed_one(tmp_path):
    told_of(tmp_path, contract.gpu_identity(SECOND))
    check = GpuCheck((Device(0, "0", FIRST, "NVIDIA H200", "9.0", 1),), tmp_path)
    check.poll()
    told_of(tmp_path, contract.gpu_identity(FIRST))
    check.poll()
    told_of(tmp_path, contract.gpu_identity(SECOND))
    with pytest.raises(CapsuleError, match="CAP-E048"):
        check.poll()


ANY = SimpleNamespace(trainer=None)  # a spec


@pytest.mark.parametrize(
    ("ended", "message", "fix"),
    [
        (
            Exit(137, "out-of-memory", evidence="the engine reports OOMKilled"),
            "status 137, because memory ran out (the engine reports OOMKilled);",
            "Raise limits.memory_mb",
        ),
        (
            Exit(137, "exited"),
            "status 137 (killed by SIGKILL, and nothing was observed that tells why);",
            "If 'dmesg' shows it, raise limits.memory_mb",
        ),
        (
            Exit(137, "timed-out"),
            "status 137, because its time ran out;",
            "Raise limits.minutes",
        ),
        (Exit(1, "exited"), "status 1;", "See "),
    ],
)
def test_how_a_run_ended_says_only_what_was_observed(tmp_path, ended, message, fix):
    with pytest.raises(CapsuleError) as caught:
        outcome(ANY, tmp_path, ended)
    assert caught.value.code == "CAP-E010"
    assert message in caught.value.message
    assert fix in caught.value.fix
    assert ("limits.memory_mb" in caught.value.fix) == ("memory" in fix)


@pytest.mark.parametrize(
    ("trainer", "named"), [({"command": ["./train"]}, "program"), (None, "training")]
)
def test_a_user_program_is_not_called_a_training(tmp_path, trainer, named):
    spec = SimpleNamespace(
        trainer=trainer and CommandTrainer.model_validate_json(json.dumps(trainer))
    )
    error = refusals.refusal("CAP-E010", outcome, spec, tmp_path, Exit(130, "timed-out"))
    assert error.message.startswith(f"the {named} ended with status 130, because its time ran out;")


def test_a_failure_that_is_explained_by_the_memory_says_so(tmp_path):
    report = contract.Failure(
        code="CAP-T302", message="it was ended by signal 9", fix="", step=None
    )
    (tmp_path / contract.LOG).write_text("last line\n")
    (tmp_path / contract.FAILURE).write_bytes(report.document())
    with pytest.raises(CapsuleError) as caught:
        outcome(ANY, tmp_path, Exit(1, "out-of-memory", evidence="the engine reports OOMKilled"))
    assert caught.value.code == "CAP-T302"
    assert caught.value.message == (
        "it was ended by signal 9, because memory ran out (the engine reports OOMKilled)\n"
        "  last line"
    )
    assert caught.value.fix.startswith("Raise limits.memory_mb")
    with pytest.raises(CapsuleError) as caught:
        outcome(ANY, tmp_path, Exit(1, "exited"))
    assert "memory" not in caught.value.message + caught.value.fix


def test_an_interrupted_run_names_the_folder_with_which_it_is_resumed(tmp_path):
    ended = Exit(130, "interrupted")
    with pytest.raises(CapsuleError, match="CAP-E012") as caught:
        outcome(ANY, tmp_path / "a run" / "work", ended)
    assert caught.value.fix == f"Resume it with 'capsule run --resume '{tmp_path}/a run''."
