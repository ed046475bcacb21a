"""The folder of a study: what is taken up again, what is refused, and where members stand."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from pydantic import ValidationError

from capsule.experiment.lock import Lock
from capsule.host.run_directory import LOCK, STUDY_LOCK
from capsule.image.lockfile import read_lock
from capsule.study.directory import (
    HOLD,
    OUTCOME,
    WORK,
    Outcome,
    StudyDirectory,
)
from tests.refusals import refusal
from tests.study.small_studies import STUDY, locked, write

DONE = Outcome(bundle="x.capsule.tar", claim_id="a" * 64)
FAILED = Outcome(code="CAP-E007", message="out of memory", fix="Buy more.")
ROOT = Path(__file__).parents[2]


def hold(directory, name, **options):
    with directory.held(name, **options):
        pass


def ended(directory, name, outcome=DONE):
    with directory.held(name) as (folder, _):
        if outcome.bundle is not None:
            (folder / outcome.bundle).touch()
        (folder / OUTCOME).write_bytes(outcome.document())
    return folder


def write_events(folder, *lines):
    (folder / WORK).mkdir(exist_ok=True)
    (folder / WORK / "events.jsonl").write_text("".join(lines))


def event(step, speed=64.0):
    facts = {"kind": "progress", "step": step, "steps_per_second": speed, "time": 1.0}
    return json.dumps(facts | {"total_steps": 1024}) + "\n"


def test_a_folder_is_made_with_the_lock_and_opened_again(directory):
    assert StudyDirectory.open(directory.path).lock == directory.lock
    assert [path.name for path in directory.path.iterdir()] == [STUDY_LOCK]


def test_an_existing_folder_needs_resume(directory):
    error = refusal("CAP-Y006", StudyDirectory.create, directory.path, directory.lock, resume=False)
    assert "--resume" in error.fix
    again = StudyDirectory.create(directory.path, directory.lock, resume=True)
    assert again.missing() == directory.missing()


def test_a_folder_may_exist_that_has_no_study(tmp_path, directory):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "x.txt").touch()
    StudyDirectory.create(tmp_path / "notes", directory.lock, resume=False)
    (tmp_path / "file").touch()
    refusal("CAP-Y005", StudyDirectory.create, tmp_path / "file", directory.lock, resume=True)


def test_what_is_not_the_folder_of_a_study_is_refused(tmp_path, directory):
    for path in (tmp_path, tmp_path / "absent", directory.path / STUDY_LOCK):
        refusal("CAP-Y005", StudyDirectory.open, path)
    (directory.path / STUDY_LOCK).write_bytes(directory.lock.document()[:-1])
    refusal("CAP-Y003", StudyDirectory.open, directory.path)


def test_a_study_with_another_group_goes_on_in_its_folder(tmp_path, directory):
    ended(directory, "exploration.1")
    path = write(tmp_path, STUDY + "  other: {runs: 1, set: {seeds.root: 7}}\n")
    more = locked(path, directory.lock)
    again = StudyDirectory.create(directory.path, more, resume=True)
    assert again.missing() == ["deterministic.1", "deterministic.2", "exploration.2", "other.1"]
    assert StudyDirectory.open(directory.path).lock == more


def test_a_member_that_was_run_with_another_lock_is_refused_and_nothing_is_changed(
    tmp_path, directory
):
    hold(directory, "exploration.1")
    changed = locked(write(tmp_path, STUDY + "set: {trainer.discount: 0.5}\n"))
    error = refusal("CAP-Y007", StudyDirectory.create, directory.path, changed, resume=True)
    assert "member exploration.1" in error.message
    assert StudyDirectory.open(directory.path).lock == directory.lock


def test_a_process_that_knows_an_older_lock_does_not_run_a_member_of_the_new_one(
    tmp_path, directory
):
    changed = locked(write(tmp_path, STUDY + "set: {trainer.discount: 0.5}\n"))
    newer = StudyDirectory.create(directory.path, changed, resume=True)
    hold(newer, "exploration.1")
    refusal("CAP-Y007", hold, directory, "exploration.1")
    hold(newer, "exploration.1")


def test_members_and_groups_are_those_of_the_study(directory):
    error = refusal("CAP-Y008", directory.folder, "exploration.3")
    assert error.fix.endswith("exploration.2.")
    refusal("CAP-Y008", directory.state, "../exploration.1")
    error = refusal("CAP-Y013", directory.missing, ["exploration", "explore"])
    assert "'explore'" in error.message
    assert error.fix == "Its groups are deterministic, exploration."
    assert directory.missing(["exploration"]) == ["exploration.1", "exploration.2"]
    assert directory.chosen([]) == directory.missing()


def test_a_held_folder_has_the_lock_of_the_member(directory):
    with directory.held("exploration.2") as (folder, _):
        lock = read_lock(folder / LOCK)
        assert folder.stat().st_mode & 0o777 == 0o700
    assert isinstance(lock, Lock)
    assert lock.digest() == directory.member("exploration.2").lock


def test_a_member_is_held_once(directory):
    with directory.held("exploration.1"):
        assert directory.state("exploration.1").state == "running"
        error = refusal("CAP-Y009", hold, directory, "exploration.1")
        assert "member exploration.1" in error.message
        hold(directory, "exploration.2")
    hold(directory, "exploration.1")


def test_looking_at_a_member_does_not_keep_it_from_being_run(directory):
    enough = threading.Event()

    def look():
        while not enough.is_set():
            directory.state("exploration.1")

    hold(directory, "exploration.1")
    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for _ in range(100):
            hold(directory, "exploration.1", patience=600.0)
    finally:
        enough.set()
        watcher.join()


@pytest.mark.slow
def test_a_process_that_is_killed_holds_no_member(directory):
    program = (
        "import sys, time; from pathlib import Path\n"
        "from capsule.study.directory import StudyDirectory\n"
        "with StudyDirectory.open(Path(sys.argv[1])).held('exploration.1'):\n"
        "    print('held', flush=True); time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program, str(directory.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as holder:
        assert holder.stdout.readline() == b"held\n"
        assert directory.state("exploration.1").state == "running"
        refusal("CAP-Y009", hold, directory, "exploration.1")
        os.kill(holder.pid, signal.SIGKILL)
    assert directory.state("exploration.1").state == "waiting"
    hold(directory, "exploration.1")


def test_states(directory):
    name = "exploration.1"
    assert directory.state(name).state == "waiting"
    with directory.held(name) as (folder, _):
        (folder / WORK).mkdir()
    assert directory.state(name)[1:] == ("stopped", None, None, None, None)  # as 'capsule list'
    with directory.held(name) as (folder, _):
        checkpoint = '{"kind":"checkpoint","step":256,"time":1.0,"total_steps":1024}\n'
        write_events(folder, event(128), event(255), checkpoint, '{"kind":"prog')
        running = directory.state(name)
    assert (running.state, running.step, running.total_steps) == ("running", 256, 1024)
    assert running.steps_per_second == 64.0
    stopped = directory.state(name)
    assert (stopped.state, stopped.step, stopped.outcome) == ("stopped", 256, None)
    ended(directory, name, FAILED)
    assert (directory.state(name).state, directory.state(name).outcome) == ("failed", FAILED)
    assert name in directory.missing()
    ended(directory, name)
    assert (directory.state(name).state, directory.bundle(name)) == ("done", folder / DONE.bundle)
    assert name not in directory.missing()


def test_only_the_end_of_long_events_is_read(directory):
    folder = ended(directory, "exploration.1", FAILED)
    write_events(folder, *(event(step) for step in range(3000)))
    assert directory.state("exploration.1").step == 2999
    write_events(folder, "x" * 70_000 + "\n")
    assert directory.state("exploration.1").step is None


@pytest.mark.parametrize(
    "make",
    [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(os.devnull)],
    ids=["folder", "pipe", "link"],
)
def test_events_that_are_not_a_file_are_ignored(directory, make):
    folder = ended(directory, "exploration.1", FAILED)
    (folder / WORK).mkdir()
    make(folder / WORK / "events.jsonl")
    assert directory.state("exploration.1")[1:] == ("failed", FAILED, None, None, None)


def test_a_member_whose_bundle_is_lost_is_missing_again(directory):
    folder = ended(directory, "exploration.1")
    write_events(folder, event(1024))
    (folder / DONE.bundle).unlink()
    assert directory.state("exploration.1").state == "stopped"
    assert directory.outcome("exploration.1") is None
    assert "exploration.1" in directory.missing()


def test_a_member_that_is_run_again_has_no_outcome_meanwhile(directory):
    ended(directory, "exploration.1", FAILED)
    with directory.held("exploration.1"):
        assert directory.state("exploration.1").outcome is None


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[]", b"\xff", FAILED.document()[:-1], b"9" * (1 << 21)],
    ids=["empty", "object", "list", "bytes", "cut", "long"],
)
def test_a_damaged_outcome_is_refused_and_can_be_deleted(directory, data):
    folder = ended(directory, "exploration.1")
    (folder / OUTCOME).write_bytes(data)
    error = refusal("CAP-Y010", directory.state, "exploration.1")
    assert str(folder / OUTCOME) in error.message
    refusal("CAP-Y010", directory.missing)
    (folder / OUTCOME).unlink()
    assert "exploration.1" in directory.missing()


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"bundle": "x"},
        {"claim_id": "a" * 64},
        {"code": "CAP-E007"},
        {**DONE.model_dump(by_alias=True), "code": "CAP-E007", "message": "x", "fix": "x"},
        {**DONE.model_dump(by_alias=True), "bundle": "../x.capsule.tar"},
    ],
)
def test_an_outcome_is_a_bundle_or_an_error(facts):
    with pytest.raises(ValidationError):
        Outcome.model_validate(facts)


def test_the_hold_of_a_member_is_an_empty_file(directory):
    hold(directory, "exploration.1")
    assert (directory.folder("exploration.1") / HOLD).read_bytes() == b""


def test_a_lost_member_is_written_down_as_failed(directory):
    name, *_ = directory.missing()
    directory.fail(name, FAILED)
    assert directory.state(name) == (name, "failed", FAILED, None, None, None)


def test_neither_a_result_nor_a_member_that_runs_is_written_down_as_failed(directory):
    done, failed, running, *_ = directory.missing()
    other = Outcome(code="CAP-E011", message="it ended", fix="Look.")
    ended(directory, done)
    ended(directory, failed, other)
    with directory.held(running):
        for name in (done, failed, running):
            directory.fail(name, FAILED)
    assert [directory.outcome(name) for name in (done, failed, running)] == [DONE, other, None]


def test_an_earlier_failure_is_forgotten_unless_the_member_runs_by_now(directory):
    failed, running, unknown, *_ = directory.missing()
    for name in (failed, running):
        directory.fail(name, FAILED)
    with directory.held(running) as (folder, _):
        (folder / OUTCOME).write_bytes(DONE.document())
        for name in (failed, running, unknown):
            directory.forget(name)
        assert (folder / OUTCOME).read_bytes() == DONE.document()
    assert directory.state(failed).state == "waiting"
    assert not directory.folder(unknown).exists()


def test_a_result_is_not_forgotten(directory):
    folder = ended(directory, "exploration.1")
    directory.forget("exploration.1")
    assert directory.outcome("exploration.1") == DONE
    (folder / DONE.bundle).unlink()
    directory.forget("exploration.1")
    assert not (folder / OUTCOME).exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_refused(directory, monkeypatch, number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    name, *_ = directory.missing()
    hold(directory, name)
    monkeypatch.setattr(fcntl, "flock", flock)
    assert os.strerror(number) in refusal("CAP-Y020", hold, directory, name).message
    refusal("CAP-Y020", directory.state, name)
