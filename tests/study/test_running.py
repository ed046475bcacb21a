"""Members as processes: how their ends are told apart, and how they are stopped."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from capsule.host.errors import CapsuleError
from capsule.machine.devices import Device
from capsule.study import gpu_pool
from capsule.study.directory import CONSOLE, OUTCOME, Outcome
from capsule.study.running import MemberBatch, RunOptions, Runs, outcome_of, run_locally
from tests.conftest import wait_until

OPTIONS = RunOptions(Path("alice"), engine="process")
ROOT = Path(__file__).parents[2]
CLAIM = "a" * 64  # of fake_run.py
# A process of its own that runs members, until it is stopped.
STUDY_PROCESS = """
import sys
from pathlib import Path
from capsule.study.directory import StudyDirectory
from capsule.study.running import MemberBatch, RunOptions, run_locally
sys.executable = sys.argv[2]
study = StudyDirectory.open(Path(sys.argv[1]))
run_locally(MemberBatch(study, study.missing(), RunOptions(Path("alice"))), 2, lambda: None)
"""


def run(directory, *, on_poll=lambda: None, processes=2):
    run_locally(MemberBatch(directory, directory.missing(), OPTIONS), processes, on_poll)


def states(directory):
    return {member.name: directory.state(member.name).state for member in directory.lock.members}


@pytest.fixture
def study_process(directory, planned):
    """Start a process that runs a study, whose members wait for a file 'go'."""
    python = str(Path("/proc/self/exe").readlink())
    planned(deterministic_1="wait", deterministic_2="wait")
    command = [python, "-c", STUDY_PROCESS, str(directory.path), sys.executable]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    waiting = [directory.folder(f"deterministic.{run}") for run in (1, 2)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE) as process:
        wait_until(lambda: all((folder / "began").exists() for folder in waiting), seconds=600)
        yield process, waiting
        process.kill()


def test_options_are_those_of_a_run_with_absolute_paths():
    words = RunOptions(Path("k"), Path("p"), "docker").arguments()
    cwd = Path.cwd()
    assert words == [
        *("--key", str(cwd / "k"), "--engine", "docker", "--passphrase-file", str(cwd / "p"))
    ]


def test_members_are_run_to_their_bundles(directory, planned):
    polls = []
    run(directory, on_poll=lambda: polls.append(1))
    assert set(states(directory).values()) == {"done"}
    assert directory.missing() == []
    assert directory.outcome("exploration.1").claim_id == CLAIM
    given = json.loads((directory.folder("exploration.1") / "arguments").read_text())
    assert given == [*OPTIONS.arguments(), "--json", "--quiet"]
    assert polls


def test_members_that_run_at_a_time_have_different_gpus(directory, planned):
    planned(deterministic_1="wait", deterministic_2="wait")
    waiting = [directory.folder(f"deterministic.{run}") for run in (1, 2)]

    def let_both_go():
        if all((folder / "began").exists() for folder in waiting):
            for folder in waiting:
                (folder / "go").touch()

    gpus = ("GPU-a", "GPU-b")
    run_locally(MemberBatch(directory, directory.missing(), OPTIONS), 2, let_both_go, gpus)
    given = {
        member.name: json.loads((directory.folder(member.name) / "arguments").read_text())
        for member in directory.lock.members
    }
    chosen = {name: words[words.index("--gpu") + 1] for name, words in given.items()}
    assert {chosen["deterministic.1"], chosen["deterministic.2"]} == set(gpus) == {*chosen.values()}


@pytest.mark.parametrize(("gpus", "ends"), [(["GPU-good", "GPU-dead"], 4), (["GPU-dead"], 1)])
def test_a_gpu_that_fails_a_member_gets_no_other(directory, monkeypatch, gpus, ends):
    begun, notes, dead = [], [], threading.Event()

    def run_member(_runs, _study, name, options):
        begun.append((options.gpu, name))
        if options.gpu == "GPU-good":
            dead.wait(60)
            return Outcome(bundle="x", claim_id=CLAIM)
        dead.set()
        return Outcome(code="CAP-M009", message="it is lost", fix="-")

    monkeypatch.setattr(Runs, "run", run_member)
    names = directory.missing()
    run_locally(MemberBatch(directory, names, OPTIONS), len(gpus), lambda: None, gpus, notes.append)
    assert len(begun) == ends
    ((_, name),) = (each for each in begun if each[0] == "GPU-dead")
    assert notes[0] == f"GPU-dead is not used again, because {name} failed on it with CAP-M009"
    assert notes[1:] == ["no GPU is left, so no further member is started"] * (len(gpus) == 1)


@pytest.mark.parametrize(
    ("code", "present", "lost"),
    [("CAP-E007", True, False), ("CAP-T116", True, False), ("CAP-E010", False, True)],
)
def test_a_gpu_is_used_again_unless_the_driver_has_lost_it(
    directory, monkeypatch, code, present, lost
):
    devices = (Device(0, "0", "GPU-a", "NVIDIA H200", "9.0", 1),) if present else ()
    monkeypatch.setattr(gpu_pool, "read_devices", lambda _: devices)
    monkeypatch.setattr(Runs, "run", lambda *_: Outcome(code=code, message="it failed", fix="-"))
    notes = []
    names = directory.missing()
    run_locally(MemberBatch(directory, names, OPTIONS), 1, lambda: None, ["GPU-a"], notes.append)
    assert bool(notes) == lost


def test_a_failed_member_says_why_and_stops_no_other(directory, planned):
    planned(deterministic_1="refused", deterministic_2="silent", exploration_1="list")
    run(directory, processes=1)
    assert list(states(directory).values()) == ["failed", "failed", "failed", "done"]
    found = directory.outcome("deterministic.1")
    assert (found.code, found.message, found.fix) == ("CAP-E007", "out of memory", "Buy more.")
    found = directory.outcome("deterministic.2")
    assert (found.code, found.message) == (
        "CAP-Y011",
        "'capsule run' ended with status 1 and printed no reason",
    )
    console = directory.folder("deterministic.2") / CONSOLE
    assert found.fix == f"See {console}."
    assert console.read_text() == "Killed\n"
    assert directory.outcome("exploration.1").code == "CAP-Y011"
    planned()
    run(directory)
    assert set(states(directory).values()) == {"done"}


def test_a_member_that_was_killed_has_not_failed_and_is_missing(directory, planned):
    planned(deterministic_1="killed")
    run(directory)
    assert directory.outcome("deterministic.1") is None
    assert directory.missing() == ["deterministic.1"]


def test_a_member_that_another_process_runs_stops_no_other(directory, planned):
    with directory.held("deterministic.1"), pytest.raises(CapsuleError) as caught:
        run(directory, processes=1)
    assert caught.value.code == "CAP-Y009"
    assert directory.missing() == ["deterministic.1"]


def test_a_member_that_another_process_finishes_meanwhile_is_not_run_again(directory, planned):
    name = "deterministic.1"
    run(directory, processes=1)
    (directory.folder(name) / "arguments").unlink()  # written by every run
    found = []
    with Runs() as runs:
        waiting = threading.Thread(
            target=lambda: found.append(runs.run(directory, name, OPTIONS, patience=600.0))
        )
        with directory.held(name):
            waiting.start()
            time.sleep(1.0)
            assert waiting.is_alive()
        waiting.join()
    assert found[0].claim_id == CLAIM
    assert not (directory.folder(name) / "arguments").exists()


def test_an_interruption_interrupts_the_runs_and_starts_no_other(directory, planned):
    planned(deterministic_1="wait", deterministic_2="wait")
    waiting = [directory.folder(f"deterministic.{number}") for number in (1, 2)]

    def interrupt():
        wait_until(lambda: all((folder / "began").exists() for folder in waiting), seconds=600)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(directory, on_poll=interrupt)
    assert list(states(directory).values()) == ["stopped", "stopped", "waiting", "waiting"]
    assert all((folder / "interrupted").exists() for folder in waiting)
    assert not any((folder / OUTCOME).exists() for folder in waiting)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_interrupt_the_runs_of_a_study(directory, study_process, number):
    process, waiting = study_process
    process.send_signal(number)
    assert b"KeyboardInterrupt" in process.communicate()[1]
    assert all((folder / "interrupted").exists() for folder in waiting)
    assert states(directory)["deterministic.1"] == "stopped"


@pytest.mark.slow
def test_the_runs_of_a_study_that_is_killed_keep_their_members_until_they_end(
    directory, study_process, planned
):
    process, waiting = study_process
    process.kill()
    process.wait()
    assert directory.state("deterministic.1").state == "running"
    with pytest.raises(CapsuleError) as caught:
        run(directory)
    assert caught.value.code == "CAP-Y009"
    assert list(states(directory).values()) == ["running", "running", "done", "done"]
    for folder in waiting:
        (folder / "go").touch()
    wait_until(lambda: directory.state("deterministic.1").state != "running", seconds=600)
    wait_until(lambda: directory.state("deterministic.2").state != "running", seconds=600)
    assert directory.missing() == ["deterministic.1", "deterministic.2"]
    planned()
    run(directory)
    assert directory.missing() == []


def test_handlers_of_signals_are_put_back(directory):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)
    with Runs():
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)) == before


def test_a_hangup_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Runs():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("status", [130, -signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL])
def test_an_interrupted_run_has_no_outcome(status):
    assert outcome_of(status, b"", Path(CONSOLE)) is None


@pytest.mark.parametrize(
    ("status", "printed"),
    [
        (0, b""),
        (0, b"{}"),
        (0, b"null"),
        (0, b"\xff"),
        (6, b'{"code": "CAP-E007"}'),
        (6, b"3"),
        (1, b""),
    ],
)
def test_a_run_that_prints_no_result_is_said_to_print_none(status, printed):
    found = outcome_of(status, printed, Path(CONSOLE))
    assert (found.code, found.bundle) == ("CAP-Y011", None)
    assert f"status {status}" in found.message
