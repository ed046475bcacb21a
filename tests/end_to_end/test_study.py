"""A study of two runs with the plain-process engine: failed, interrupted, killed, and resumed."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from capsule.experiment.contract import TRACE
from capsule.study.directory import MEMBERS, WORK, StudyDirectory
from tests.conftest import caught, wait_until
from tests.end_to_end.conftest import capsule

pytestmark = [pytest.mark.slow, pytest.mark.network]

BASE = """\
schema: capsule/spec/v1
name: cart
environment: {suite: gymnasium, id: CartPole-v1}
trainer:
  algorithm: dqn
  network: mlp
  hidden_units: 16
  total_steps: 1_024
  replay_capacity: 1_024
  replay_start: 128
  exploration_steps: 512
evaluation:
  {interval: 512, starts: 2, candidates: 2, shortlist: 2, min_actions: 0, max_actions: 0}
recording: {trace_interval: 16, tensor_interval: 512, checkpoint_interval: 128}
"""
STUDY = """\
schema: capsule/study/v1
name: pair
base: cart.yaml
runs: 1
groups:
  first: {}
  second: {vary: [exploration]}
  cramped: {set: {limits.memory_mb: 64}}
"""
PROGRAM = """\
import json, pathlib, sys
pathlib.Path("out").mkdir()
pathlib.Path("out/metrics.json").write_text(json.dumps({"test": [{"accuracy": int(sys.argv[1])}]}))
"""
PROGRAM_BASE = """\
schema: capsule/spec/v1
name: mine
code: {path: source}
trainer: {command: [python, train.py, "{seed}"]}
seeds: {root: 7}
"""
PROGRAM_STUDY = """\
schema: capsule/study/v1
name: mine
base: mine.yaml
runs: 2
groups:
  fixed: {}
  given: {runs: 1, grid: {seeds.root: [1, 2]}}
scores:
  accuracy: out/metrics.json#/test/0/accuracy
"""
RECORDS = 12  # of a trace of 64
RUNS = ("first.1", "second.1")
BOTH = ("--only", "first", "--only", "second")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("studies")
    (folder / "cart.yaml").write_text(BASE)
    (folder / "pair.yaml").write_text(STUDY)
    assert capsule("keygen", "alice", cwd=folder).status == 0
    return folder


def command(output, *words):
    options = ("--key", "alice", "--engine", "process", "--on", "local:2", "--output", output)
    return ("study", "run", "pair.yaml", *options, *words)


def claims(directory):
    outcomes = {name: directory.outcome(name) for name in RUNS}
    return {name: outcome and outcome.claim_id for name, outcome in outcomes.items()}


@pytest.fixture(scope="module")
def whole(folder):
    """A run of the study that was not interrupted, and what it printed."""
    done = capsule(*command("whole", "--json"), cwd=folder)
    return StudyDirectory.open(folder / "whole"), done


@contextmanager
def begun(folder, output):
    """Start the study, and wait until both runs have begun and one of them trains."""
    words = [sys.executable, "-m", "capsule", *command(output, *BOTH)]
    with subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE) as process:
        wait_until(lambda: training(output) or process.poll() is not None)
        yield process
        process.kill()


def training(output):
    """Whether both runs have begun and one trains, which may be done before the other trains."""
    traces = [output / MEMBERS / name / WORK / TRACE for name in RUNS]
    if not any(records(trace) >= RECORDS for trace in traces):
        return False
    states = [StudyDirectory.open(output).state(name) for name in RUNS]
    return all(state.state == "running" and state.step is not None for state in states)


def records(trace):
    return trace.read_bytes().count(b"\n") if trace.exists() else 0


def children(pid):
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def resumed(folder, directory):
    done = capsule(*command(directory.path, "--resume", "--quiet", *BOTH), cwd=folder)
    assert done.status == 0, done.errors
    return claims(directory)


def test_a_member_that_fails_is_named_and_the_others_are_done(whole):
    directory, done = whole
    assert done.status == 6
    assert (
        "CAP-Y012: 1 of 3 members failed, was stopped or did not begin; the first is cramped.1"
        in done.errors
    )
    failed = done.document["failures"]["cramped.1"]
    assert failed["code"].startswith("CAP-E"), failed
    assert "memory" in failed["message"]
    assert directory.state("cramped.1").state == "failed"
    assert [directory.state(name).state for name in RUNS] == ["done", "done"]
    first, second = claims(directory).values()
    assert first != second
    lock = json.loads((directory.folder("first.1") / "lock.json").read_bytes())
    assert lock["spec"]["name"] == "cart"


def test_a_study_that_is_interrupted_is_resumed_to_the_same_claims(folder, whole, tmp_path):
    def interrupted(output):
        """Interrupt the study before any of its runs has ended."""
        with begun(folder, output) as process:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate()
        directory = StudyDirectory.open(output)
        if any(claims(directory).values()):
            return None
        assert process.returncode == 130, errors
        return directory

    directory = caught(interrupted, tmp_path)
    assert [directory.state(name).state for name in RUNS] == ["stopped", "stopped"]
    assert resumed(folder, directory) == claims(whole[0])


@pytest.mark.soak
def test_a_study_that_is_killed_is_resumed_to_the_same_claims(folder, whole, tmp_path):
    with begun(folder, tmp_path / "killed") as process:
        killed, _ = children(process.pid)
        process.kill()
    directory = StudyDirectory.open(tmp_path / "killed")
    os.killpg(killed, signal.SIGKILL)  # the other run goes on without the study
    wait_until(lambda: all(directory.state(name).state != "running" for name in RUNS), seconds=600)
    finished = [name for name in RUNS if [*directory.folder(name).glob("*.capsule.tar")]]
    assert len(finished) == 1
    assert directory.missing() == list(directory.chosen([]))
    assert resumed(folder, directory) == claims(whole[0])


def test_a_member_that_is_lost_is_run_again_to_the_same_claim(folder, whole):
    directory, _ = whole
    before = claims(directory)
    directory.bundle("first.1").unlink()
    assert directory.missing(["first"]) == ["first.1"]
    assert resumed(folder, directory) == before
    done = capsule("study", "member", "whole", "first.1", "--key", "alice", cwd=folder)
    assert done.status == 0, done.errors
    assert done.output.startswith(f"claim id  {before['first.1']}\n")


def test_a_study_of_a_program_is_scored_and_signed(tmp_path):
    """Its runs differ by their seeds, and their scores are in a file that it writes."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "train.py").write_text(PROGRAM)
    (tmp_path / "mine.yaml").write_text(PROGRAM_BASE)
    (tmp_path / "mine-study.yaml").write_text(PROGRAM_STUDY)
    assert capsule("keygen", "alice", cwd=tmp_path).status == 0
    options = ("--key", "alice", "--engine", "process", "--on", "local:1", "--quiet")
    done = capsule("study", "run", "mine-study.yaml", *options, cwd=tmp_path)
    assert done.status == 0, done.errors
    done = capsule("study", "bundle", "studies/mine", "--key", "alice", "--json", cwd=tmp_path)
    assert done.status == 0, done.errors
    done = capsule("study", "report", done.document["bundle"], "--format", "csv", cwd=tmp_path)
    rows = [line.split(",")[:7] for line in done.output.splitlines()[1:]]
    assert [row[:4] + row[6:] for row in rows] == [
        ["fixed", "1", "1", "accuracy", "7.0"],
        ["fixed", "1", "2", "accuracy", "7.0"],
        ["given", "1", "1", "accuracy", "1.0"],
        ["given", "2", "1", "accuracy", "2.0"],
    ]
