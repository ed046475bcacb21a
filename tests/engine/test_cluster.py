"""What a run on a cluster is given, and what is left of the cluster."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from capsule.engine import cluster as clusters
from capsule.engine.bytecode import FOLDER
from capsule.engine.cluster import TOKEN, OnCluster, in_cluster, parse_cluster
from capsule.engine.interface import Exit, RemoteCluster, Task, Workers
from capsule.experiment.contract import CLUSTER_HOSTS_VARIABLE, CLUSTER_VARIABLE
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.spec import LimitsSpec
from capsule.host.spec_file import load_spec
from tests.report import runs

SPECS = Path(__file__).parents[2] / "specs"
IMPALA = load_spec(SPECS / "impala-cluster-small.yaml")
DQN = load_spec(SPECS / "dqn-breakout-small.yaml")
POPULATION = runs.make_lock(runs.POPULATION).spec
OUT = {"Target": "/out", "Source": "/runs/work", "Type": "bind", "ReadOnly": False}
COMPILED = {"Target": FOLDER, "Source": "/cache/bytecode/x", "Type": "bind", "ReadOnly": True}


def parse(text, spec=IMPALA, **environment):
    return parse_cluster(text, spec, environment)


def test_the_option(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse("docker:1") == Workers(1)
    assert parse("docker:64") == Workers(64)
    assert parse("ray://head.lab:10001") == RemoteCluster("ray://head.lab:10001", None)
    assert parse("10.0.0.7:6379") == RemoteCluster("10.0.0.7:6379", None)
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.touch()
    assert parse("10.0.0.7:6379").token == token
    (tmp_path / "secret").touch()
    named = str(tmp_path / "secret")
    assert parse("head:1", RAY_AUTH_TOKEN_PATH=named).token == tmp_path / "secret"


def test_a_token_that_cannot_be_read_is_refused_before_anything_is_built(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff")
    for path in (tmp_path / "missing", tmp_path, tmp_path / "binary"):
        with pytest.raises(CapsuleError, match=str(path)) as refusal:
            parse("head:6379", RAY_AUTH_TOKEN_PATH=str(path))
        assert (refusal.value.code, refusal.value.exit_code) == ("CAP-E017", ExitCode.USAGE)


@pytest.mark.parametrize(
    "text", ["", "docker", "docker:0", "docker:65", "docker:two", "head", "ray://head", "a b:1"]
)
def test_a_malformed_option_is_refused(text):
    with pytest.raises(CapsuleError) as refusal:
        parse(text)
    assert (refusal.value.code, refusal.value.exit_code) == ("CAP-E017", ExitCode.USAGE)


@pytest.mark.parametrize("spec", [DQN, POPULATION])
def test_a_trainer_without_such_actors_is_refused(spec):
    with pytest.raises(CapsuleError) as refusal:
        parse("docker:2", spec)
    assert (refusal.value.code, refusal.value.exit_code) == ("CAP-E018", ExitCode.USAGE)


class RecordingEngine:
    """Keeps the task that it was given."""

    def __init__(self, name):
        self.name = name

    def describe(self):
        return {"name": self.name}

    def run(self, task, **_):
        self.task = task
        return Exit(0, "exited")


def task_of(directory):
    return Task(
        run_directory=directory, environment={"A": "1"}, limits=LimitsSpec(), arguments=("run",)
    )


def given(name, cluster, directory):
    engine = RecordingEngine(name)
    OnCluster(engine, cluster).run(task_of(directory))
    return engine.task


def test_containers_beside_a_run_need_docker(tmp_path):
    assert given("docker", Workers(2), tmp_path).cluster == Workers(2)
    for name in ("process", "podman"):
        with pytest.raises(CapsuleError) as refusal:
            OnCluster(RecordingEngine(name), Workers(2))
        assert (refusal.value.code, refusal.value.exit_code) == ("CAP-E016", ExitCode.NO_ENGINE)


def test_a_bundle_says_that_there_was_a_cluster_and_not_where():
    engine = RecordingEngine("docker")
    remote = RemoteCluster("ray://head.lab:10001", None)
    assert OnCluster(engine, Workers(2)).describe() == {"name": "docker", "cluster": "docker:2"}
    assert OnCluster(engine, remote).describe() == {"name": "docker", "cluster": "remote"}


def test_a_plain_process_gets_variables_alone(tmp_path):
    with_token = RemoteCluster("head:6379", tmp_path / "token")
    assert given("process", with_token, tmp_path).environment == {
        "A": "1",
        CLUSTER_VARIABLE: "head:6379",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"),
    }
    without = given("process", RemoteCluster("head:6379", None), tmp_path).environment
    assert not any("TOKEN" in name for name in without)
    assert given("docker", with_token, tmp_path).environment == {"A": "1"}


class FakeClient:
    """Notes what is made and removed, in order."""

    def __init__(self, fail=None):
        self.log = []
        self._fail = fail
        self.networks = SimpleNamespace(create=self._create)

    def _create(self, _, *, internal, labels):
        assert internal
        assert labels == {"capsule.run": "x"}
        self.log.append("network made")
        return SimpleNamespace(remove=lambda: self.log.append("network removed"))

    def start(self, settings):
        if settings["hostname"] == self._fail:
            raise RuntimeError("no room")
        self.log.append(settings)
        name = settings["hostname"]
        return SimpleNamespace(remove=lambda **_: self.log.append(f"{name} removed"))


def settings_of():
    return {
        "entrypoint": ["/launch", "train"],
        "environment": {"A": "1"},
        "hostname": "capsule",
        "labels": {"capsule.run": "x"},
        "mounts": [OUT, COMPILED],
        "network_mode": "none",
        "read_only": True,
        "cap_drop": ["ALL"],
        "shm_size": "512m",
        "user": f"{os.getuid()}:{os.getgid()}",
        "device_requests": ["gpu"],
    }


def test_without_a_cluster_nothing_changes():
    plain = settings_of()
    with in_cluster(None, plain, FakeClient(), None) as settings:
        assert settings is plain


def test_workers_have_the_hardening_the_bytecode_the_token_and_nothing_else_of_a_run():
    client = FakeClient()
    with in_cluster(Workers(2), settings_of(), client, client.start) as head:
        made, first, second = client.log
        token = next(mount for mount in head["mounts"] if mount["Target"] == TOKEN)
        path = Path(token["Source"])
        assert token["ReadOnly"]
        assert path.stat().st_mode & 0o777 == 0o600
        assert len(path.read_text()) == 64
    assert made == "network made"
    assert client.log[3:] == ["worker-2 removed", "worker-1 removed", "network removed"]
    assert not path.exists()
    assert [mount["Target"] for mount in head["mounts"]] == ["/out", FOLDER, TOKEN]
    assert head["entrypoint"][-4:] == ["head", "384", "/launch", "train"]
    assert head["environment"][CLUSTER_HOSTS_VARIABLE] == "2"
    assert (head["hostname"], head["device_requests"]) == ("capsule", ["gpu"])
    for number, worker in enumerate((first, second), start=1):
        assert worker["entrypoint"][-4:] == ["worker", "384", "head:6379", f"worker-{number}"]
        assert worker["mounts"] == [COMPILED, token]
        assert worker["device_requests"] == []
    for each in (head, first, second):
        assert each["read_only"]
        assert each["cap_drop"] == ["ALL"]
        assert "network_mode" not in each
        assert each["network"] == head["network"]
        assert each["environment"]["RAY_AUTH_TOKEN_PATH"] == TOKEN
        assert each["environment"]["RAY_worker_niceness"] == "0"
        assert path.name in str(token["Source"])
        assert not any("token" in word for word in each["entrypoint"])


def test_what_was_started_is_removed_where_a_worker_does_not_start():
    client = FakeClient(fail="worker-2")
    with (
        pytest.raises(RuntimeError, match="no room"),
        in_cluster(Workers(3), settings_of(), client, client.start),
    ):
        pass
    assert client.log[2:] == ["worker-1 removed", "network removed"]


def test_a_cluster_that_is_there_is_reached_with_its_token(tmp_path):
    token = tmp_path / "token"
    token.write_text("secret")
    remote = RemoteCluster("ray://head:10001", token)
    with in_cluster(remote, settings_of(), FakeClient(), None) as settings:
        mounted = settings["mounts"][-1]
        assert Path(mounted["Source"]).read_text() == "secret"
        assert settings["network_mode"] == "bridge"
        assert settings["environment"][CLUSTER_VARIABLE] == "ray://head:10001"
        assert settings["environment"]["RAY_AUTH_MODE"] == "token"
        assert not any("secret" in value for value in settings["environment"].values())
    open_cluster = RemoteCluster("ray://head:10001", None)
    with in_cluster(open_cluster, settings_of(), FakeClient(), None) as settings:
        assert settings["mounts"] == [OUT, COMPILED]
        assert "RAY_AUTH_MODE" not in settings["environment"]


def test_ports_agree_with_the_training_side():
    from capsule.training.impala.actors.ray import node

    assert clusters._PORT == node.PORT
