"""Kubernetes: a real kubectl, an API that the test serves, and pods that are processes."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from capsule.bundle.keys import generate
from capsule.host.errors import CapsuleError
from capsule.study.directory import Outcome, StudyDirectory
from capsule.study.jobs import Element
from capsule.study.kubernetes import IndexedJob, Kubernetes
from capsule.study.kubernetes_job import JobTemplate
from capsule.study.running import MemberBatch, RunOptions, run_locally
from tests.refusals import refusal
from tests.study.kubernetes_cluster import one_machine_cluster
from tests.study.short_runs import write_study
from tests.study.slurm_cluster import wait_until

PYTHON = sys.executable
TEMPLATE = """\
apiVersion: batch/v1
kind: Job
spec:
  template:
    spec:
      containers: [{name: capsule, image: capsule}]
"""
# The image's program: the real one, but for the run.
CAPSULE = """\
#!{python}
import sys
sys.path[:0] = {path!r}
from capsule.cli.main import main
sys.executable = {run!r}
main()
"""
NAMES = ("deterministic.1", "deterministic.2", "exploration.1", "exploration.2")


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """The folder of the pods' programs; kubectl is on this process's own path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{Path(PYTHON).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("KUBECACHEDIR", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def cluster(tmp_path, programs):
    with one_machine_cluster(tmp_path, programs) as found:
        yield found


@pytest.fixture
def template(tmp_path):
    (tmp_path / "job.yaml").write_text(TEMPLATE)
    return JobTemplate.load(tmp_path / "job.yaml")


@pytest.fixture
def options(tmp_path):
    generate(tmp_path / "alice")
    return RunOptions(tmp_path / "alice", engine="process")


@pytest.fixture
def image(programs, planned):
    """Install Capsule where pods find it; return the plan of its runs."""
    path = programs / "capsule"
    # 'planned' has replaced sys.executable by the run that ends as planned.
    path.write_text(CAPSULE.format(python=PYTHON, path=sys.path, run=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return planned


@pytest.fixture
def run(directory, template, options):
    """Run members as a command does; return what it noted."""

    def run(names=None, on_poll=lambda: None, **settings):
        noted = []
        settings = {"poll_seconds": 0.05, "settle_seconds": 0.0} | settings
        backend = Kubernetes(noted.append, template, **settings)
        backend.run(MemberBatch(directory, names or directory.missing(), options), on_poll)
        return noted

    return run


def states(directory):
    return [directory.state(name).state for name in NAMES]


def jobs_of(directory):
    paths = sorted((directory.path / "kubernetes").glob("*.members"))
    return [IndexedJob(path.stem, tuple(path.read_text().split())) for path in paths]


@pytest.mark.slow
def test_members_are_done_fail_are_evicted_and_deleted(cluster, directory, image, run):
    image(deterministic_2="refused", exploration_1="wait", exploration_2="wait")
    last, third = (directory.folder(name) for name in NAMES[:1:-1])

    # The command that waits is interrupted; the pods go on.
    def interrupt():
        if (third / "began").exists() and (last / "began").exists():
            raise KeyboardInterrupt

    error = refusal("CAP-Y024", run, on_poll=interrupt)
    (job,) = jobs_of(directory)
    assert job.members == NAMES
    assert job.name.startswith("tiny-")
    assert f"Kubernetes will continue jobs {job.name}" in error.message
    assert f"'kubectl delete job --namespace=rl {job.name}' cancels" in error.fix

    # Another command waits for the same Job. A node evicts one pod, and one is deleted.
    done = []

    def interfere():
        if not done:
            shutil.rmtree(third / "work")  # its run makes it again
            (third / "began").unlink()
            cluster.evict(2)
            cluster.delete_pod(3)
            done.append(1)
        if (third / "began").exists():
            (third / "go").touch()

    noted = run(NAMES[2:], on_poll=interfere)
    assert noted == [f"Kubernetes job {job.name} still has members that wait or run"]
    assert states(directory) == ["done", "failed", "done", "failed"]
    assert (third / "interrupted").exists()  # the first pod's run was asked to save its state
    assert directory.outcome(NAMES[1]).code == "CAP-E007"
    lost = directory.outcome(NAMES[3])
    assert lost.code == "CAP-Y025"
    assert lost.message == f"Kubernetes job {job.name}-3 ended as Failed (exit status 130)"
    assert "kubectl logs --namespace=rl" in lost.fix
    assert jobs_of(directory) == [job]
    assert list(cluster.jobs) == [job.name]
    assert cluster.most == 1  # never two pods of a member

    # What is missing runs again.
    shutil.rmtree(last)
    image(exploration_2="done")
    run([NAMES[3]])
    assert states(directory) == ["done", "failed", "done", "done"]
    assert sorted(each.members for each in jobs_of(directory)) == [NAMES, (NAMES[3],)]


@pytest.mark.slow
def test_as_many_pods_run_as_the_template_says(cluster, directory, image, options, tmp_path):
    (tmp_path / "job.yaml").write_text(TEMPLATE.replace("spec:", "spec:\n  parallelism: 1", 1))
    backend = Kubernetes(print, JobTemplate.load(tmp_path / "job.yaml"), poll_seconds=0.05)
    alive = []

    def count():
        phases = [pod["status"]["phase"] for pod in cluster.pods.values()]
        alive.append(phases.count("Running"))

    backend.run(MemberBatch(directory, NAMES[:2], options), count)
    assert states(directory)[:2] == ["done", "done"]
    assert max(alive) == 1


def test_an_image_without_capsule(cluster, directory, run):
    run([NAMES[0]])
    outcome = directory.outcome(NAMES[0])
    assert outcome.code == "CAP-Y025"
    assert outcome.message.endswith("-0 ended as Failed (exit status 127)")
    assert "has capsule on its PATH" in outcome.fix


def finish(cluster, index_status, **job_status):
    """Have the only Job end with this status of its pod."""
    (job,) = cluster.jobs.values()
    (pod,) = cluster.pods.values()
    cluster.pending.clear()
    pod["status"] = {"phase": "Failed", **index_status}
    job["status"].update(job_status)


def terminated(code, reason, **more):
    end = {"exitCode": code, "reason": reason, **more}
    return {"containerStatuses": [{"name": "capsule", "state": {"terminated": end}}]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "message", "fix"),
    [
        (terminated(137, "OOMKilled"), "ended as Failed (OOMKilled)", "resources.memory_mb"),
        (
            {"reason": "DeadlineExceeded", "message": "Pod was active on the node longer than ..."},
            "ended as Failed (DeadlineExceeded: Pod was active",
            "resources.minutes",
        ),
        (
            {"reason": "Evicted", "message": "Pod ephemeral local storage usage exceeds 4Gi."},
            "ended as Failed (Evicted: Pod ephemeral local storage",
            "Add --resume",
        ),
        (
            terminated(128, "StartError", message="exec: no such file"),
            "ended as Failed (StartError: exec: no such file)",
            "Add --resume",
        ),
    ],
)
def test_the_report_of_a_lost_pod_says_what_to_do(cluster, directory, run, status, message, fix):
    cluster.pending[0] = {}
    run([NAMES[0]], on_poll=lambda: finish(cluster, status))
    assert message in directory.outcome(NAMES[0]).message
    assert fix in directory.outcome(NAMES[0]).fix


@pytest.mark.slow
def test_why_pods_are_pending_is_said_once(cluster, directory, run):
    waits = {"reason": "ImagePullBackOff", "message": "not found: capsule"}
    usual = {"reason": "ContainerCreating"}
    states = [{"name": "capsule", "state": {"waiting": each}} for each in (waits, usual)]
    nodes = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    nodes["message"] = "Insufficient cpu:"
    cluster.pending = {
        0: {"conditions": [nodes | {"message": f"{nodes['message']} 3 CPUs."}]},
        1: {"conditions": [nodes | {"message": f"{nodes['message']} 4 CPUs."}]},
        2: {"containerStatuses": states[:1]},
        3: {"containerStatuses": [{"name": "sidecar"}, *states[1:]]},
    }
    polls = []

    def on_poll():
        polls.append(1)
        if len(polls) == 3:
            cluster.jobs.clear()

    noted = run(on_poll=on_poll)
    (job,) = jobs_of(directory)
    assert noted == [
        f"Kubernetes job {job.name} was submitted for 4 members",
        f"members of Kubernetes job {job.name} wait: Unschedulable: {nodes['message']} 3 CPUs.",
        f"members of Kubernetes job {job.name} wait: ImagePullBackOff: not found: capsule",
    ]
    # The Job was deleted meanwhile.
    assert directory.outcome(NAMES[0]).message == (
        f"Kubernetes job {job.name}-0 has ended, and Kubernetes has no record of how it ended"
    )


@pytest.mark.slow
def test_a_suspended_job_and_one_that_ends_as_a_whole(cluster, directory, tmp_path, options, run):
    text = TEMPLATE.replace("spec:", "spec:\n  suspend: true", 1)
    (tmp_path / "job.yaml").write_text(text)
    noted = []
    backend = Kubernetes(
        noted.append,
        JobTemplate.load(tmp_path / "job.yaml"),
        poll_seconds=0.0,
        settle_seconds=0.0,
    )

    def end():
        (job,) = cluster.jobs.values()
        job["status"]["conditions"] = [
            {"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}
        ]

    backend.run(MemberBatch(directory, NAMES[:1], options), end)
    assert noted[1].endswith("wait: the Job is suspended")
    assert "Failed (DeadlineExceeded)" in directory.outcome(NAMES[0]).message


def test_a_manifest_that_the_cluster_rejects(cluster, directory, tmp_path, options):
    before = Outcome(code="CAP-E011", message="it failed", fix="mend it")
    directory.fail(NAMES[0], before)
    (tmp_path / "job.yaml").write_text(TEMPLATE.replace("image: capsule", "image: a, tti: true"))
    backend = Kubernetes(print, JobTemplate.load(tmp_path / "job.yaml"))
    with pytest.raises(CapsuleError, match="'tti' was unexpected") as caught:
        backend.run(MemberBatch(directory, NAMES, options), print)
    assert caught.value.code == "CAP-Y022"
    assert not cluster.jobs
    assert not jobs_of(directory)
    assert directory.outcome(NAMES[0]) == before


def test_a_cluster_that_is_not_reachable(cluster, directory, run, tmp_path):
    path = tmp_path / "kubeconfig"
    reachable = path.read_text()
    elsewhere = reachable.replace("http://127.0.0.1:", "http://127.0.0.1:1/")
    path.write_text(elsewhere)
    assert "refused" in refusal("CAP-Y022", run).message
    assert not jobs_of(directory)

    path.write_text(reachable)
    cluster.pending = {index: {} for index in range(4)}
    lost = refusal(
        "CAP-Y023", run, on_poll=lambda: path.write_text(elsewhere), patience_seconds=0.0
    )
    (job,) = jobs_of(directory)
    assert f"Kubernetes does not answer; jobs {job.name} may still run" in lost.message


def test_kubectl_is_not_installed(directory, run, programs, monkeypatch):
    monkeypatch.setenv("PATH", str(programs))
    error = refusal("CAP-Y021", run)
    assert error.message == "--on kubernetes needs kubectl, which is not installed here"
    assert not jobs_of(directory)


@pytest.fixture
def after_kubectl(programs, monkeypatch):
    """Have a line of shell follow each command of kubectl that has succeeded."""
    real = Path(PYTHON).with_name("kubectl")

    def follow(line):
        path = programs / "kubectl"
        path.write_text(f'#!/bin/sh\n{real} "$@" || exit\n{line}\n')
        path.chmod(0o700)
        monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")

    return follow


def test_a_job_whose_creation_has_no_answer_is_deleted(cluster, directory, run, after_kubectl):
    after_kubectl("case $* in *create*) echo request timed out >&2; exit 1;; esac")
    cluster.pending = {index: {} for index in range(4)}
    assert refusal("CAP-Y022", run).message == "kubectl failed: request timed out"
    assert not cluster.jobs
    assert not jobs_of(directory)


def test_a_job_that_may_exist_is_named(cluster, directory, run, after_kubectl):
    after_kubectl("echo request timed out >&2; exit 1")
    cluster.pending = {index: {} for index in range(4)}
    error = refusal("CAP-Y022", run)
    name = error.message.partition("Job ")[2].split()[0]
    assert error.message == (
        f"kubectl failed: request timed out; Job {name} may exist, and could not be deleted"
    )
    assert f"'kubectl delete job {name}' deletes it" in error.fix


@pytest.mark.parametrize("interrupted", ["$PPID", "$PPID $$"])
def test_an_interrupted_submission_deletes_what_it_created(
    cluster, directory, run, after_kubectl, interrupted
):
    after_kubectl(f"case $* in *create*) kill -INT {interrupted};; esac")
    cluster.pending = {index: {} for index in range(4)}
    with pytest.raises(KeyboardInterrupt):
        run()
    assert not cluster.jobs
    assert not cluster.pods
    assert not jobs_of(directory)


@pytest.mark.parametrize(
    ("refusal", "wanted"),
    [
        (
            {"reason": "FailedCreate", "message": "pods are forbidden: exceeded quota"},
            ["FailedCreate: pods are forbidden: exceeded quota"],
        ),
        ({}, ["Warning"]),
        ("events", []),
    ],
)
def test_why_no_pod_is_created(cluster, directory, run, refusal, wanted):
    cluster.refusal = refusal
    noted = run(NAMES[:1], on_poll=cluster.jobs.clear)
    assert [line.partition(" wait: ")[2] for line in noted[1:]] == wanted


def test_indexes_that_have_no_pod_are_active(cluster, directory, run):
    job = IndexedJob("rl_tiny-1", NAMES)
    assert job.elements() == {}
    cluster.jobs["tiny-1"] = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "tiny-1", "namespace": "rl"},
        "spec": {"completions": 4, "parallelism": 0},
        "status": {},
    }
    assert job.elements() == dict.fromkeys(NAMES, Element("Active"))


@pytest.mark.network
@pytest.mark.slow
def test_the_claims_are_those_of_a_local_run_also_after_an_eviction(
    cluster, programs, options, tmp_path
):
    write_study(tmp_path)
    (tmp_path / "job.yaml").write_text(TEMPLATE.replace("spec:", "spec:\n  parallelism: 1", 1))
    path = programs / "capsule"
    path.write_text(f'#!/bin/sh\nexec {PYTHON} -m capsule "$@"\n')
    path.chmod(0o700)
    command = [PYTHON, "-m", "capsule", "study", "run", "study.yaml", "--key", "alice", "--json"]
    command += ["--on", "kubernetes:job.yaml", "--engine", "process", "--output", "out"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        wait_until((tmp_path / "out" / "members").exists)
        study = StudyDirectory.open(tmp_path / "out")
        first, *_ = names = [member.name for member in study.lock.members]
        wait_until(lambda: study.state(first).step)
        cluster.evict(0)
        assert study.state(first).state == "stopped"
        printed, _ = process.communicate()
    assert json.loads(printed)["groups"]["exploration"]["done"] == len(names) == 3
    assert len(cluster.pods) == 4

    local = StudyDirectory.create(tmp_path / "local", study.lock, resume=False)
    run_locally(MemberBatch(local, [first], options), 1, lambda: None)
    claims = [study.outcome(name).claim_id for name in names]
    assert claims[0] == local.outcome(first).claim_id
    assert len(set(claims)) == 3
