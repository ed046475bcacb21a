"""Ray: a real cluster of processes of this machine."""

import importlib.util
import json
import signal
import subprocess
import sys
import time
from unittest.mock import MagicMock, Mock

import pytest

from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.study.directory import StudyDirectory
from capsule.study.ray import Ray
from capsule.study.running import MemberBatch, RunOptions, run_locally
from capsule.training.impala.actors.ray import connection
from tests.cluster.ray_cluster import cluster_of, ray_token
from tests.study.studies import make_lock

pytestmark = pytest.mark.xdist_group("ray")

NODE = {"memory": 8 << 30}
NAME = "deterministic.1"
FIRST, SECOND, THIRD = (f"exploration.{run}" for run in (1, 2, 3))


@pytest.fixture(scope="module")
def cluster():
    with ray_token(), cluster_of(NODE, NODE) as started:
        yield started


@pytest.fixture
def study(tmp_path):
    lock = make_lock(resources={"memory_mb": 512})
    return StudyDirectory.create(tmp_path / "study", lock, resume=False)


def start(workplace, cluster, *arguments):
    command = [sys.executable, "-m", "capsule", "study", "run", "study.yaml"]
    command += ["--on", cluster.client_address, "--key", "alice", "--engine", "process"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command += ["--output", "shared", *arguments]
    return subprocess.Popen(command, cwd=workplace, text=True, **pipes)


def begun(folder, name):
    return (folder / "members" / name / "work" / "events.jsonl").exists()


def states_of(study):
    return {member.name: study.state(member.name) for member in study.lock.members}


@pytest.mark.network
@pytest.mark.slow
def test_the_claims_are_those_of_a_local_run_whatever_happens_meanwhile(
    cluster, workplace, options
):
    folder = workplace / "shared"

    # The command is interrupted, and with it the members, which save their state.
    command = start(workplace, cluster)
    while not (begun(folder, FIRST) and StudyDirectory.open(folder).state(FIRST).step):
        assert command.poll() is None, command.communicate()
        time.sleep(0.05)
    command.send_signal(signal.SIGINT)
    _, said = command.communicate()
    assert command.returncode == ExitCode.INTERRUPTED, said
    study = StudyDirectory.open(folder)
    found = states_of(study)
    # The second member may not have begun yet on a busy machine.
    assert [found[FIRST].state, found[THIRD].state] == ["stopped", "waiting"]
    assert found[SECOND].state in ("stopped", "waiting")
    assert 0 < found[FIRST].step < 4_096
    assert "interrupted" in (folder / "members" / FIRST / "console.log").read_text()

    # They go on, and a node is lost while they do.
    lost = []

    def interfere():
        if not lost and any(state.state == "running" for state in states_of(study).values()):
            lost.append(next(iter(cluster.worker_nodes)))
            cluster.remove_node(lost[0], allow_graceful=False)
            cluster.add_node(wait=False, num_cpus=1, **NODE)

    Ray(cluster.client_address, print).run(MemberBatch(study, study.missing(), options), interfere)
    assert lost

    # A run may outlive the Ray processes of its node, as all are on one machine here; Ray cannot
    # start its member again meanwhile. After that, the rest is done.
    while any(state.state == "running" for state in states_of(study).values()):
        time.sleep(0.1)
    command = start(workplace, cluster, "--resume", "--json")
    printed, said = command.communicate()
    assert command.returncode == 0, said
    assert json.loads(printed)["groups"]["exploration"]["done"] == 3

    local = StudyDirectory.create(workplace / "local", study.lock, resume=False)
    first = local.missing()[0]
    run_locally(MemberBatch(local, [first], options), 1, lambda: None)
    claims = {name: state.outcome.claim_id for name, state in states_of(study).items()}
    assert claims[first] == local.outcome(first).claim_id
    assert len(set(claims.values())) == 3


@pytest.mark.slow
def test_a_member_that_does_not_begin_fails_with_what_its_node_said(cluster, study, tmp_path):
    options = RunOptions(tmp_path / "nobody", engine="process")
    Ray(cluster.client_address, print, settle_seconds=0.0).run(
        MemberBatch(study, [NAME], options), lambda: None
    )
    outcome = study.outcome(NAME)
    assert outcome.code == "CAP-Y025"
    assert outcome.message.startswith("the Ray task of the member ended with status 2: CAP-B")
    assert str(tmp_path / "nobody") in outcome.message
    assert study.missing()[0] == NAME


def test_a_member_that_is_being_submitted_is_interrupted_with_the_others(
    study, options, monkeypatch
):
    def submit(_cluster, _batch, name, _resources):
        if name == SECOND:
            signal.raise_signal(signal.SIGINT)
        return f"task of {name}"

    interrupted = Mock()
    monkeypatch.setattr("capsule.study.ray._connected", MagicMock())
    monkeypatch.setattr("capsule.study.ray._submit", submit)
    monkeypatch.setattr("capsule.study.ray._interrupt", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Ray("ray://x:1", print).run(
            MemberBatch(study, [FIRST, SECOND, THIRD], options), lambda: None
        )
    assert interrupted.call_args.args[1] == [f"task of {FIRST}", f"task of {SECOND}"]


@pytest.mark.parametrize(
    ("error", "members"),
    [
        (OSError("stale file handle"), [FIRST, SECOND]),
        (CapsuleError("CAP-Y010", "it is damaged", fix="Delete it."), [FIRST, SECOND]),
        (CapsuleError("CAP-T353", "the head is gone", fix="Start it."), None),
    ],
    ids=["of a folder", "of a member", "without the head"],
)
def test_members_are_interrupted_after_an_error(study, options, monkeypatch, error, members):
    def on_poll():
        raise error

    interrupted = Mock()
    monkeypatch.setattr("capsule.study.ray._connected", MagicMock())
    monkeypatch.setattr("capsule.study.ray._submit", lambda *facts: f"task of {facts[2]}")
    monkeypatch.setattr("capsule.study.ray._interrupt", interrupted)
    with pytest.raises((OSError, CapsuleError), match=str(error.args[0])):
        Ray("ray://x:1", print).run(MemberBatch(study, [FIRST, SECOND], options), on_poll)
    found = interrupted.call_args and interrupted.call_args.args[1]
    assert found == (members and [f"task of {name}" for name in members])


@pytest.mark.slow
def test_members_that_no_node_can_take_wait_and_say_so(cluster, tmp_path, options):
    lock = make_lock(resources={"cores": 3, "memory_mb": 512})
    study = StudyDirectory.create(tmp_path / "study", lock, resume=False)
    noted = []

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Ray(cluster.client_address, noted.append).run(
            MemberBatch(study, [NAME], options), interrupt
        )
    assert noted == [f"members wait: no node of the Ray cluster has CPU 3, memory {512 << 20}"]
    assert study.state(NAME).state == "waiting"


@pytest.mark.slow
def test_a_cluster_that_is_lost_is_told_from_one_that_was_never_there(
    cluster, study, options, monkeypatch
):
    def lose(*_):
        raise CapsuleError("CAP-T353", "the head is gone", fix="Start it.")

    with pytest.raises(CapsuleError, match="no connection") as caught:
        Ray("ray://127.0.0.1:1", print).run(MemberBatch(study, [NAME], options), print)
    assert caught.value.code == "CAP-Y022"
    monkeypatch.setattr(connection.Cluster, "wait", lose)
    with pytest.raises(CapsuleError, match="the head is gone") as caught:
        Ray(cluster.client_address, print).run(MemberBatch(study, [NAME], options), print)
    assert caught.value.code == "CAP-Y023"
    assert "--resume" in caught.value.fix


def test_ray_has_to_be_installed(study, options, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(CapsuleError, match="not installed") as caught:
        Ray("ray://head:10001", print).run(MemberBatch(study, [NAME], options), print)
    assert caught.value.code == "CAP-Y021"
    assert "capsule-rl[cluster]" in caught.value.fix
