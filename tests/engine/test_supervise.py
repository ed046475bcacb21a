"""What is shared by all engines: measuring a folder, keeping output, holding a run directory."""

import errno
import os
import signal
import tempfile
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from capsule.engine import supervise
from capsule.engine.interface import Exit
from capsule.experiment.errors import CapsuleError
from tests.refusals import refusal


def test_disk_usage_counts_what_is_allocated_and_follows_nothing(tmp_path):
    folder = tmp_path / "run"
    (folder / "deep" / "deeper").mkdir(parents=True)
    empty = supervise.disk_usage(folder)
    (tmp_path / "outside").write_bytes(b"x" * (1 << 20))
    (folder / "link").symlink_to(tmp_path)
    with (folder / "sparse").open("wb") as stream:
        stream.truncate(1 << 30)
    assert supervise.disk_usage(folder) - empty < 1 << 16
    (folder / "deep" / "deeper" / "file").write_bytes(b"x" * (1 << 20))
    assert 1 << 20 <= supervise.disk_usage(folder) - empty < (1 << 20) + (1 << 16)


def test_disk_usage_of_a_folder_that_vanishes(tmp_path):
    assert supervise.disk_usage(tmp_path / "gone") == 0


def test_the_log_is_cut_and_the_writer_is_not_blocked(tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "LOG_BYTES", 10)
    chunks = iter([b"12345", b"678", b"90abc", b"def"])
    supervise.write_log(chunks, tmp_path / "output.log")
    assert (tmp_path / "output.log").read_bytes() == b"1234567890"
    assert list(chunks) == []
    assert [path.name for path in tmp_path.iterdir()] == ["output.log"]


def test_a_log_needs_no_folder_for_temporary_files(tmp_path, monkeypatch):
    """If it were full, the task would end with a broken pipe."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    supervise.write_log([b"output"], tmp_path / "output.log")
    assert (tmp_path / "output.log").read_bytes() == b"output"


def test_a_log_survives_a_task_that_clears_its_folder_meanwhile(tmp_path):
    def chunks():
        yield b"before "
        for path in tmp_path.iterdir():
            path.unlink()
        yield b"and after"

    supervise.write_log(chunks(), tmp_path / "output.log")
    assert (tmp_path / "output.log").read_bytes() == b"before and after"


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EIO", "EROFS"])
def test_a_disk_that_keeps_no_log_is_not_the_fault_of_the_task(tmp_path, monkeypatch, name):
    number = getattr(errno, name)
    failing = Mock(side_effect=OSError(number, os.strerror(number)))
    monkeypatch.setattr(supervise, "write_atomic", failing)
    with pytest.raises(CapsuleError, match="CAP-X003") as refused:
        supervise.write_log([b"output"], tmp_path / "output.log")
    assert os.strerror(number) in refused.value.message


def test_a_folder_in_the_place_of_the_log_is_the_fault_of_the_task(tmp_path):
    (tmp_path / "output.log" / "folder").mkdir(parents=True)
    with pytest.raises(CapsuleError, match=r"CAP-E041 the task replaced output\.log"):
        supervise.write_log([b"output"], tmp_path / "output.log")


def test_output_that_was_not_kept_replaces_every_end_but_that_of_a_full_disk():
    full = CapsuleError("CAP-X003", "No space left on device", fix="Free disk space.")
    ended, filled = Exit(0, "exited"), Exit(137, "disk-full")
    assert supervise.with_output(ended, None) is ended
    assert supervise.with_output(filled, full) is filled
    for end, error in ((ended, full), (filled, supervise.spoilt(Path("output.log"), "is a link"))):
        with pytest.raises(CapsuleError, match=error.code):
            supervise.with_output(end, error)


def test_a_run_directory_is_held_by_one(tmp_path):
    refused = pytest.raises(CapsuleError, match="CAP-E008")
    with supervise.exclusive(tmp_path), refused, supervise.exclusive(tmp_path):
        pass
    with supervise.exclusive(tmp_path):
        pass


def test_signals_are_counted_and_handlers_restored():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    with supervise.interrupts() as interruptions:
        for number in numbers:
            os.kill(os.getpid(), number)
        assert interruptions.count == 3
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_hangup_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with supervise.interrupts() as interruptions:
            os.kill(os.getpid(), signal.SIGHUP)
        assert interruptions.count == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_was_closed_does_not_keep_a_task_from_saving(make_task):
    interruptions, running = supervise.Interrupts(), Mock()
    running.wait.side_effect = [None, 0]
    interruptions.count = 1
    hung_up = Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    ended = supervise.supervise(running, make_task(""), interruptions, hung_up)
    assert ended == Exit(0, "interrupted")
    running.terminate.assert_called_once()
    running.kill.assert_not_called()


@pytest.mark.parametrize(("status", "reason"), [(143, "interrupted"), (0, "exited")])
def test_a_task_that_the_signal_reached_first_was_interrupted(make_task, status, reason):
    """Schedulers and shutdowns send SIGTERM to every process, and bwrap ends by it at once."""
    interruptions, running = supervise.Interrupts(), Mock()

    def wait(_seconds):
        interruptions.received(signal.SIGTERM, None)
        return status

    running.wait.side_effect = wait
    running.was_out_of_memory.return_value = None
    ended = supervise.supervise(running, make_task(""), interruptions, Mock())
    assert ended == Exit(status, reason)
    running.terminate.assert_not_called()


@pytest.mark.parametrize("ends", [True, False])
def test_a_run_directory_that_was_removed_is_named(make_task, run_directory, monkeypatch, ends):
    monkeypatch.setattr(supervise, "_LIMIT_SECONDS", 0)
    running = Mock()
    running.wait.return_value = 87 if ends else None
    running.exceeds_memory.return_value = False
    running.was_out_of_memory.return_value = None
    run_directory.rmdir()
    error = refusal(
        "CAP-E007", supervise.supervise, running, make_task(""), supervise.Interrupts(), Mock()
    )
    assert error.message == f"the run directory '{run_directory}' was removed during the run"


def test_other_threads_can_run_tasks_too():
    counts = []

    def work():
        with supervise.interrupts() as interruptions:
            counts.append(interruptions.count)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert counts == [0]
