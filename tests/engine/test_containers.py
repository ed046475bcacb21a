# ruff: noqa: S108 -- paths inside the container
"""What a container may do and may not, asked from inside; and how its end is told."""

import errno
import json
import os
import signal
import subprocess
import sys
import uuid
from dataclasses import replace
from unittest.mock import Mock

import pytest
from docker.errors import APIError, NotFound

from capsule.engine import containers, supervise
from capsule.engine.connection import remove_container
from capsule.engine.containers import ContainerEngine, run_label, task_user
from capsule.engine.select import open_engine
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.host.owner import this_process
from capsule.machine.devices import FIRST
from tests.conftest import wait_until
from tests.engine.conftest import check_data_sets
from tests.refusals import refusal

pytestmark = pytest.mark.engine


def containers_of(engine: ContainerEngine, run_directory):
    label = f"capsule.run={run_label(run_directory)}"
    return listed(engine, filters={"label": label})


def listed(engine, **options):
    """Return the containers of an engine, but those that end meanwhile: others may use it, too."""
    return engine._client.containers.list(all=True, ignore_removed=True, **options)


def status(output):
    """Parse ``/proc/self/status``."""
    return dict(line.split(":\t", 1) for line in output.splitlines() if ":\t" in line)


def test_a_task_ends_with_its_status_and_output(run, engine, run_directory):
    ended, output = run("echo hello; echo world >&2; echo kept > /out/file; exit 7")
    assert (ended.status, ended.reason) == (7, "exited")
    assert sorted(output.split()) == ["hello", "world"]
    assert (run_directory / "file").read_text() == "kept\n"
    assert containers_of(engine, run_directory) == []


def test_a_task_has_no_privileges(run):
    _, output = run("busybox cat /proc/self/status")
    facts = status(output)
    assert {facts[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {
        "0" * 16
    }
    assert facts["NoNewPrivs"] == "1"
    assert facts["Seccomp"] == "2"
    own = str(os.getuid() or task_user())
    assert facts["Uid"].split() == [own] * 4
    assert facts["Gid"].split() == [str(os.getgid() or task_user())] * 4


def test_the_user_of_tasks_has_no_account_on_this_machine(monkeypatch):
    own = task_user()
    assert own <= containers.TASK_USER
    for database, find in (("pwd", "getpwuid"), ("grp", "getgrgid")):
        known = getattr(getattr(containers, database), find)

        def taken(number, known=known):
            return "account" if number == own else known(number)

        with monkeypatch.context() as context:
            context.setattr(f"capsule.engine.containers.{database}.{find}", taken)
            assert task_user() < own


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives the run directory to another user")
def test_a_run_directory_that_others_could_enter_is_refused(run, run_directory):
    run_directory.parent.chmod(0o755)
    with pytest.raises(CapsuleError) as caught:
        run("true")
    assert caught.value.code == "CAP-E042"
    assert run_directory.stat().st_uid == 0
    run_directory.parent.chmod(0o700)
    assert run("true")[0].status == 0
    assert run_directory.stat().st_uid == task_user()


def test_a_task_has_no_network(run):
    _, output = run("busybox cat /proc/net/dev; echo routes; busybox cat /proc/net/route")
    devices, routes = output.split("routes")
    names = [line.split(":")[0].strip() for line in devices.splitlines() if ":" in line]
    # Kernels with tunnels built in show their idle fallback devices in every namespace.
    assert [name for name in names if not name.endswith("0") or name == "eth0"] == ["lo"]
    assert len(routes.strip().splitlines()) <= 1  # the heading


def test_data_sets_can_be_read_and_not_written(run, data):
    check_data_sets(run, data)


def test_only_the_run_directory_and_a_private_tmp_can_be_written(run):
    _, output = run(
        "for place in / /bin /etc /dev /proc /sys /out /tmp /dev/shm; do"
        " (echo x > $place/probe) 2>/dev/null && echo $place; done;"
        " busybox grep -E ' /(tmp|out) ' /proc/mounts"
    )
    lines = output.splitlines()
    assert [line for line in lines if line.startswith("/") and " " not in line] == [
        "/out",
        "/tmp",
        "/dev/shm",
    ]
    tmp = next(line for line in lines if " /tmp " in line)
    for option in ("nosuid", "nodev", "noexec", "size=16384k"):
        assert option in tmp


def test_the_environment_is_the_images_and_the_tasks_and_no_more(run, monkeypatch):
    monkeypatch.setenv("LEAK", "from the caller")
    _, output = run("busybox env", environment={"PYTHONHASHSEED": "0"})
    found = dict(line.split("=", 1) for line in output.splitlines())
    for added_by_the_shell_or_podman in ("PWD", "SHLVL", "TERM", "container"):
        found.pop(added_by_the_shell_or_podman, None)
    assert found == {
        "HOME": "/tmp",
        "HOSTNAME": "capsule",
        "PATH": "/bin",
        "PYTHONHASHSEED": "0",
    }


def test_processes_are_limited(run):
    ended, output = run(
        "for i in $(busybox seq 64); do busybox sleep 6000 & done; echo all", processes=16
    )
    assert ended.status != 0
    assert "fork" in output
    assert "all" not in output


def test_a_task_may_have_another_host_name_and_fewer_processors(run):
    script = "busybox hostname; busybox grep Cpus_allowed_list /proc/self/status"
    first = min(os.sched_getaffinity(0))
    _, output = run(script)
    assert output.splitlines()[0] == "capsule"
    _, output = run(script, hostname="varied-host", processors=str(first))
    assert output.split() == ["varied-host", "Cpus_allowed_list:", str(first)]


def test_too_much_memory_is_reported_as_such(run, engine):
    reasons = []
    # With cgroup version 1, Docker loses the kernel's event at times, and Podman often.
    while "out-of-memory" not in reasons and len(reasons) < 20:
        ended, _ = run("busybox dd if=/dev/zero of=/dev/null bs=200M count=1", memory_mb=32)
        assert ended.status == 137
        reasons.append(ended.reason)
    assert set(reasons) <= {"exited", "out-of-memory"}
    if engine.name == "docker" or engine.describe()["cgroup"] == "2":
        assert ended.reason == "out-of-memory"
        assert ended.evidence == "the engine reports OOMKilled"


def test_too_much_time_ends_a_task(run, time_is_up):
    ended, output = run(
        "trap 'echo saved; exit 3' TERM; echo >/out/ready; while :; do busybox sleep .1; done",
        on_poll=time_is_up,
    )
    assert (ended.status, ended.reason) == (3, "timed-out")
    assert output == "saved\n"


def test_a_task_that_ignores_the_signal_is_killed(run, monkeypatch, time_is_up):
    monkeypatch.setattr("capsule.engine.supervise.GRACE_SECONDS", 0.5)
    ended, _ = run(
        "trap '' TERM; echo >/out/ready; while :; do busybox sleep .1; done", on_poll=time_is_up
    )
    assert (ended.status, ended.reason) == (137, "timed-out")


def test_too_much_disk_ends_a_task(run):
    ended, _ = run(
        "busybox dd if=/dev/zero of=/out/big bs=1M count=40; busybox sleep 600", disk_mb=8
    )
    assert (ended.status, ended.reason) == (137, "disk-full")


def test_a_disk_that_is_too_full_for_the_output_does_not_hide_the_end(
    run, engine, run_directory, monkeypatch
):
    monkeypatch.setattr(supervise, "write_atomic", Mock(side_effect=OSError(errno.ENOSPC, "full")))
    (run_directory / "output.log").touch()
    ended, _ = run("busybox dd if=/dev/zero of=/out/big bs=1M count=40; exec sleep 600", disk_mb=8)
    assert (ended.status, ended.reason) == (137, "disk-full")
    with pytest.raises(CapsuleError, match="CAP-X003"):
        run("busybox rm /out/big", disk_mb=8)
    assert containers_of(engine, run_directory) == []


def test_a_folder_hidden_from_the_limit_ends_a_task(run, engine, run_directory):
    if os.getuid() == 0:
        pytest.skip("root can read every folder")
    with pytest.raises(CapsuleError, match="CAP-E007"):
        run("busybox mkdir /out/hidden; busybox chmod 0 /out/hidden; busybox sleep 600")
    assert containers_of(engine, run_directory) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_lets_the_task_save_and_leaves_no_container(
    run, engine, run_directory, number
):
    def interrupt_once_ready():
        if (run_directory / "ready").exists():
            (run_directory / "ready").unlink()
            os.kill(os.getpid(), number)

    script = (
        "trap 'echo saved > /out/state; exit 0' TERM; echo > /out/ready;"
        "while :; do busybox sleep .1; done"
    )
    ended, _ = run(script, on_poll=interrupt_once_ready)
    assert (ended.status, ended.reason) == (0, "interrupted")
    assert (run_directory / "state").read_text() == "saved\n"
    assert containers_of(engine, run_directory) == []


def test_a_second_interrupt_kills(run, engine, run_directory):
    def interrupt_twice():
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        os.kill(os.getpid(), signal.SIGINT)

    previous = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        ended, _ = run("trap '' TERM; while :; do busybox sleep .1; done", on_poll=interrupt_twice)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert (ended.status, ended.reason) == (137, "interrupted")
    assert containers_of(engine, run_directory) == []


def test_an_error_of_the_caller_leaves_no_container(run, engine, run_directory):
    def fail():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("busybox sleep 600", on_poll=fail)
    assert containers_of(engine, run_directory) == []


def test_output_is_bounded(run, monkeypatch):
    monkeypatch.setattr("capsule.engine.containers.LOG_BYTES", 1 << 20)
    monkeypatch.setattr("capsule.engine.supervise.LOG_BYTES", 1 << 20)
    ended, output = run("busybox yes 0123456789 | busybox head -c 4194304")
    assert ended.status == 0
    assert 0 < len(output) <= 1 << 20


def test_output_never_follows_a_link_that_the_task_made(run, tmp_path, run_directory):
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    _, output = run(f"busybox ln -s {victim} /out/output.log; echo hello")
    assert output == "hello\n"
    assert victim.read_text() == "untouched"


def test_a_path_that_is_not_utf_8_is_named(
    engine, make_task, make_lock, make_image, cache, tmp_path
):
    engine.prepare(make_lock(), make_image(), cache, progress=lambda _: None)
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir(mode=0o700)
    error = refusal("CAP-E005", engine.run, replace(make_task("true"), run_directory=folder))
    assert r"caf\udce9' contains bytes that are not UTF-8" in error.message
    error = refusal("CAP-E005", engine._settings, make_task("true"), [(folder, "/data/set")])
    assert "--data" in error.fix


def test_a_leftover_of_a_killed_capsule_is_removed(run, engine, run_directory, make_task):
    leftover = engine._start(engine._settings(make_task("busybox sleep 600"), []), gpu=False)
    ended, _ = run("exit 0")
    assert ended.status == 0
    assert leftover.id not in [found.id for found in listed(engine)]


def test_a_leftover_that_another_capsule_is_removing_is_waited_for():
    asked = []

    class Leaving:
        def remove(self, **_):
            raise APIError("removal is already in progress", response=Mock(status_code=409))

        def wait(self, condition):
            asked.append(condition)
            raise NotFound("it is gone")

    remove_container(Leaving())
    assert asked == ["removed"]


def test_an_engine_that_looks_an_ended_process_up_is_asked_again(monkeypatch):
    monkeypatch.setattr(containers.time, "sleep", lambda _: None)
    looking = APIError("read /proc/14826/cgroup: no such process")
    container = Mock(attrs={"State": {"OOMKilled": True}})
    container.wait.side_effect = [looking, looking, {"StatusCode": 7}]
    container.reload.side_effect = [looking, None]
    running = containers._RunningContainer(container)
    assert running.wait(60) == 7
    assert running.was_out_of_memory()


def test_a_process_that_ends_while_its_container_is_listed_or_read_is_no_error(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(containers.time, "sleep", lambda _: None)
    monkeypatch.setattr(containers, "is_gone", lambda _: True)
    looking = APIError("read /proc/14826/cgroup: no such process")
    container = Mock(labels={})
    container.logs.side_effect = [looking, [b"output"]]
    client = Mock()
    client.networks.list.return_value = []
    client.containers.list.side_effect = [looking, [container]] * 2
    engine = ContainerEngine(client)
    engine._remove_leftovers(tmp_path)
    container.remove.assert_called_once()
    assert len(engine._abandoned()) == 1
    containers._RunningContainer(container).keep_output(tmp_path / "output.log")
    assert (tmp_path / "output.log").read_bytes() == b"output"


@pytest.mark.parametrize(
    ("machine", "status", "removed"),
    [
        ("here", "created", True),
        ("here", "exited", True),
        ("here", "running", False),  # of a copy of this virtual machine
        ("elsewhere", "exited", False),
    ],
)
def test_a_container_from_before_a_reboot_is_removed_unless_it_runs(machine, status, removed):
    user, here, _, rest = this_process().split("/", 3)
    owner = f"{user}/{here if machine == 'here' else machine}/an-earlier-boot/{rest}"
    container = Mock(labels={"capsule.owner": owner}, status=status)
    client = Mock(**{"version.return_value": {"Version": "27.0"}})
    client.networks.list.return_value = []
    client.containers.list.return_value = [container]
    engine = ContainerEngine(client)
    assert engine.count_abandoned() == int(removed)
    engine.remove_abandoned(progress=lambda _: None)
    assert container.remove.called == removed


def test_a_network_from_before_a_reboot_is_removed():
    user, machine, _, rest = this_process().split("/", 3)
    labels = {"capsule.owner": f"{user}/{machine}/an-earlier-boot/{rest}"}
    network = Mock(attrs={"Labels": labels})
    client = Mock(**{"version.return_value": {"Version": "27.0"}})
    client.networks.list.return_value = [network]
    client.containers.list.return_value = []
    ContainerEngine(client).remove_abandoned(progress=lambda _: None)
    network.remove.assert_called_once()


@pytest.mark.parametrize("reason", ["no space left", "read /proc/14826/cgroup: no such process"])
def test_an_engine_that_keeps_failing_is_believed(monkeypatch, reason):
    monkeypatch.setattr(containers.time, "sleep", lambda _: None)
    running = containers._RunningContainer(Mock(**{"wait.side_effect": APIError(reason)}))
    with pytest.raises(APIError, match=reason):
        running.wait(60)


def test_an_error_of_the_engine_does_not_hide_an_earlier_one(tmp_path):
    failing = {f"{name}.side_effect": APIError(name) for name in ("logs", "remove")}
    container = Mock(**failing)
    with pytest.raises(ZeroDivisionError), containers._collected(container, tmp_path):
        raise ZeroDivisionError
    container.remove.assert_called_once()
    with pytest.raises(APIError, match="logs"), containers._collected(container, tmp_path):
        pass
    assert container.remove.call_count == 2


HOST = """\
import json, sys
from pathlib import Path
from capsule.engine.connection import connect
from capsule.engine.containers import ContainerEngine
from capsule.engine.interface import Task
from capsule.experiment.spec import LimitsSpec

name, image, folder, arguments, limits = json.loads(sys.argv[1])
engine = ContainerEngine(connect(name))
engine._image = image
task = Task(run_directory=Path(folder), environment={}, limits=LimitsSpec(**limits),
            arguments=tuple(arguments))
engine.run(task)
"""


@pytest.fixture
def start_host(engine, make_task, run_directory, make_lock, make_image, cache):
    """Return a function that runs a task by a Capsule of its own."""
    engine.prepare(make_lock(), make_image(), cache, progress=lambda _: None)
    hosts = []

    def start(*arguments):
        limits = make_task("").limits.model_dump()
        facts = [engine.name, engine._image, str(run_directory), arguments, limits]
        hosts.append(subprocess.Popen([sys.executable, "-c", HOST, json.dumps(facts)]))
        wait_until(
            lambda: (
                hosts[-1].poll() is not None
                or [each.status for each in containers_of(engine, run_directory)] == ["running"]
            )
        )
        return hosts[-1]

    yield start
    for host in hosts:
        host.kill()
        host.wait()
    for container in containers_of(engine, run_directory):
        container.remove(force=True)


def test_the_next_capsule_removes_the_container_of_a_killed_one_and_no_other(
    engine, start_host, run_directory
):
    notes = []
    host = start_host("sh", "-c", "trap '' TERM; while :; do busybox sleep 1; done")
    engine.remove_abandoned(progress=notes.append)
    assert len(containers_of(engine, run_directory)) == 1
    host.kill()
    host.wait()
    open_engine(engine.name, progress=notes.append)
    # Any other Capsule on this machine may have been faster, and still be removing it.
    wait_until(lambda: containers_of(engine, run_directory) == [])
    assert set(notes) <= {"removed the remains of a killed Capsule process"}


def test_a_container_that_was_made_and_not_started_is_removed_too(engine, run, make_task):
    settings = engine._settings(make_task("exit 0"), [])
    place, number, started = settings["labels"]["capsule.owner"].rsplit("/", 2)
    gone = {**settings["labels"], "capsule.owner": f"{place}/{number}/{int(started) - 1}"}
    container = engine._client.containers.create(**{**settings, "labels": gone})
    engine.remove_abandoned(progress=lambda _: None)
    assert container.id not in [each.id for each in listed(engine)]


def test_a_run_whose_capsule_stands_still_ends_when_its_time_is_up(
    engine, start_host, run_directory
):
    # Stopped and not killed: any other Capsule on this machine would remove what a killed one left.
    options = ("--entropy", "system", "--keep-address-randomization", "--directory", "/out")
    deaf = "trap '' TERM; while :; do busybox sleep 1; done"
    for limit in ("5", "40", "320"):  # on a busy machine, time may be up before Capsule is stopped
        host = start_host("capsule-launch", *options, "--time-limit", limit, "--", "sh", "-c", deaf)
        host.send_signal(signal.SIGSTOP)
        if host.poll() is None:
            break
    (container,) = containers_of(engine, run_directory)
    assert container.wait(timeout=600)["StatusCode"] == 87
    assert b"CAP-R114" in container.logs()


def test_a_killed_container_is_an_exit_like_any_other(run, engine, run_directory):
    def kill():
        for container in containers_of(engine, run_directory):
            if container.status == "running":
                container.kill()

    ended, _ = run("busybox sleep 600", on_poll=kill)
    assert (ended.status, ended.reason) == (137, "exited")


def test_a_container_that_cannot_start(run, engine, run_directory):
    with pytest.raises(CapsuleError) as refusal:
        run("exit 0", memory_mb=1)
    assert (refusal.value.code, refusal.value.exit_code) == ("CAP-E005", ExitCode.NO_ENGINE)
    assert "memory" in refusal.value.message.lower()
    assert containers_of(engine, run_directory) == []


def test_a_gpu_that_is_not_there_is_inconclusive_before_anything_starts(
    run, engine, run_directory, make_lock, make_image, cache
):
    if engine._info.get("Runtimes", {}).get("nvidia"):
        pytest.skip("this machine has a GPU to give")
    with pytest.raises(CapsuleError) as refusal:
        run("echo started > /out/started", gpus=(FIRST,))
    assert (refusal.value.code, refusal.value.exit_code) == ("CAP-E003", ExitCode.INCONCLUSIVE)
    cuda = {"kind": "cuda", "cuda": "13.0", "cudnn": ">=9", "driver": ">=580"}
    with pytest.raises(CapsuleError) as refusal:
        engine.check(make_lock(accelerator=cuda))
    assert refusal.value.code == "CAP-E003"
    # Its image can be made where there is no GPU.
    engine.prepare(make_lock(accelerator=cuda), make_image(), cache, progress=print)
    assert not (run_directory / "started").exists()
    assert containers_of(engine, run_directory) == []


def test_the_image_is_loaded_once(engine, make_image, make_lock, cache):
    notes = []
    image = make_image(f"fresh-{uuid.uuid4()}")
    for _ in range(2):
        engine.prepare(make_lock(), image, cache, progress=notes.append)
    assert len(notes) == 1
    assert notes[0].startswith("loading the image")


def test_only_missing_layers_are_sent(run, engine, make_image, make_lock, cache, tmp_path):
    text = f"upper-{uuid.uuid4()}"
    image = make_image(text)
    (tmp_path / "base.tar").unlink()  # the engine has this layer; sending it would fail
    engine.prepare(make_lock(), image, cache, progress=lambda _: None)
    _, output = run("busybox cat /text")
    assert output == text


def test_another_image_of_the_same_name_is_not_used(
    engine, make_image, make_lock, make_task, cache, run_directory
):
    first, second = make_image("first"), make_image("second")
    assert first.reference == second.reference
    engine.prepare(make_lock(), first, cache, progress=lambda _: None)
    engine._client.images.load(b"".join(_chunks(second)))  # takes the name
    assert engine._client.images.get(second.reference).id != engine._image
    engine.run(make_task("busybox cat /text"))
    assert (run_directory / "output.log").read_text() == "first"


def test_a_description_names_the_engine_and_no_host(engine):
    facts = engine.describe()
    assert facts["name"] in ("docker", "podman")
    assert set(facts) == {
        "name",
        "version",
        "api",
        "runtime",
        "storage-driver",
        "cgroup",
        "rootless",
    }
    assert os.uname().nodename not in facts.values()


def _chunks(image):
    from capsule.image.assembly.assemble import archive_chunks

    return archive_chunks(image)
