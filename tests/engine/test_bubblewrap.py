# ruff: noqa: S108 -- paths inside the sandbox
"""bubblewrap: the unpacked image, and how a run is confined in it."""

import dataclasses
import multiprocessing
import os
import pwd
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from capsule.engine import bubblewrap
from capsule.engine.bubblewrap import BubblewrapEngine
from capsule.engine.cluster import OnCluster
from capsule.engine.interface import RemoteCluster
from capsule.engine.process import descendants
from capsule.engine.seccomp_filter import compiled_profile
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.image.cache import Cache
from tests.engine.conftest import check_data_sets, interrupt_once_there

pytestmark = pytest.mark.engine


@pytest.fixture
def image(make_image):
    return make_image()


@pytest.fixture
def run(image, make_lock, make_task, cache, run_directory):
    """Return a function that runs a script under bubblewrap: its end, and its output."""
    engine = BubblewrapEngine()
    engine.prepare(make_lock(), image, cache, progress=lambda _: None)

    def run_script(script, *, on_poll=lambda: None, **settings):
        ended = engine.run(make_task(script, **settings), on_poll)
        return ended, (run_directory / "output.log").read_text()

    return run_script


def test_a_task_has_the_image_no_privileges_and_no_network(run, image, run_directory):
    ended, output = run(
        "cat /text; echo; id -u; hostname; echo $$; ls /sys/class /proc/1/root 2>&1 | head -1;"
        "busybox grep -E 'CapEff|CapBnd|NoNewPrivs|Seccomp:' /proc/self/status;"
        "echo result >/out/made; busybox ifconfig; exit 7"
    )
    assert (ended.status, ended.reason, ended.image) == (7, "exited", image.config_digest)
    lines = output.splitlines()
    assert lines[:4] == ["one", "61183", "capsule", "1"]
    assert [line.split("\t")[1] for line in lines if "\t" in line] == [
        "0000000000000000",
        "0000000000000000",
        "1",
        "2",
    ]
    # Kernels with tunnels make an interface for each kind in every namespace, which is not up.
    assert [line.split()[0] for line in lines if "Link encap" in line] == ["lo"]
    assert (run_directory / "made").read_text() == "result\n"


def test_a_task_can_have_another_host_name(run):
    ended, output = run("hostname; echo $HOSTNAME", hostname="varied-host")
    assert (ended.status, output) == (0, "varied-host\nvaried-host\n")


def test_data_sets_can_be_read_and_not_written(run, data):
    check_data_sets(run, data)


def test_only_the_run_directory_and_memory_can_be_written(run, cache):
    _, output = run(
        "for place in / /bin /etc /dev /proc /proc/sys /sys /out /tmp /dev/shm; do"
        " (echo x > $place/probe) 2>/dev/null && echo $place; done;"
        " busybox grep -E ' /(tmp|dev/shm) ' /proc/mounts"
    )
    lines = output.splitlines()
    written = [line for line in lines if line.startswith("/")]
    assert written == ["/out", "/tmp", "/dev/shm"]
    mounts = [line for line in lines if line.startswith("tmpfs")]
    assert len(mounts) == 2
    for mount in mounts:
        for option in ("nosuid", "nodev", "size=16384k"):
            assert option in mount


def test_the_machines_settings_can_neither_be_written_nor_its_memory_read(run):
    # Root outside could write there without any capability, if the mount did not forbid it.
    _, output = run(
        "for setting in sys/kernel/core_pattern sys/vm/swappiness; do"
        " (cat /proc/$setting >/proc/$setting) 2>/dev/null && echo $setting; done;"
        " (echo >/proc/sysrq-trigger) 2>/dev/null && echo sysrq;"
        " busybox head -c 1 /proc/kcore 2>/dev/null"
    )
    assert not output


def test_the_environment_is_the_images_and_the_tasks(run, monkeypatch):
    monkeypatch.setenv("LEAK", "from the caller")
    _, output = run("busybox env", environment={"PYTHONHASHSEED": "0"})
    found = dict(line.split("=", 1) for line in output.splitlines())
    for added_by_the_shell in ("PWD", "SHLVL"):
        found.pop(added_by_the_shell, None)
    assert found == {
        "HOME": "/tmp",
        "HOSTNAME": "capsule",
        "PATH": "/bin",
        "PYTHONHASHSEED": "0",
    }


def test_the_profile_forbids_what_containers_may_not(run):
    _, output = run(
        "exec 2>&1; busybox unshare -r true; busybox chroot / true; mount -t tmpfs x /tmp"
    )
    assert output.count("Operation not permitted") >= 2


def test_a_limit_of_time(run, time_is_up):
    ended, _ = run(
        "trap 'exit 3' TERM; echo >/out/ready; while :; do busybox sleep 0.1; done",
        on_poll=time_is_up,
    )
    assert (ended.status, ended.reason) == (3, "timed-out")


def test_limits_of_memory_and_files(run):
    large = "x=$(busybox head -c 100m /dev/zero | busybox tr '\\0' a); busybox sleep 600; echo"
    ended, _ = run(large, memory_mb=64)
    assert (ended.status, ended.reason) == (137, "out-of-memory")
    _, output = run("ulimit -c; ulimit -n")
    assert output.split() == ["0", "4096"]


def test_a_program_that_does_not_exist(make_lock, image, make_task, cache):
    engine = BubblewrapEngine()
    engine.prepare(make_lock(), image, cache, progress=lambda _: None)
    task = dataclasses.replace(make_task(""), arguments=("/nowhere",))
    ended = engine.run(task)
    assert ended.status != 0


def test_a_start_that_hangs_can_be_interrupted(make_lock, image, make_task, cache, tmp_path):
    engine = BubblewrapEngine()
    engine.prepare(make_lock(), image, cache, progress=lambda _: None)
    engine._program = str(tmp_path / "bwrap")
    (tmp_path / "bwrap").write_text(f"#!/bin/sh\n: >{tmp_path}/ready\nexec sleep 600\n")
    (tmp_path / "bwrap").chmod(0o755)
    interrupt_once_there(tmp_path / "ready")
    ended = engine.run(make_task("exit 0"))
    assert (ended.status, ended.reason) == (137, "interrupted")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_every_process_leaves_the_task_to_save_its_state(run, run_directory, number):
    """Schedulers and shutdowns send one. bubblewrap would end by it, and the task at once."""
    ready = run_directory / "ready"
    of_other_tests = set(descendants(os.getpid()))

    def signal_all():
        if ready.exists():
            ready.unlink()
            for each in (*set(descendants(os.getpid())) - of_other_tests, os.getpid()):
                with suppress(ProcessLookupError):  # a sleep of the task has just ended
                    os.kill(each, number)

    ended, _ = run(
        "trap 'busybox sleep 0.5; echo saved >/out/state; exit 5' TERM HUP INT; echo >/out/ready;"
        "while :; do busybox sleep 0.1; done",
        on_poll=signal_all,
    )
    assert (ended.status, ended.reason) == (5, "interrupted")
    assert (run_directory / "state").read_text() == "saved\n"


def test_a_task_ignores_no_signal_and_has_no_descriptor_of_capsules(run):
    _, output = run(
        "busybox grep SigIgn /proc/self/status;"
        "for each in /proc/$$/fd/*; do busybox readlink $each; done"
    )
    ignored, *opened = output.splitlines()
    assert int(ignored.split()[1], 16) == 0
    assert opened == ["/dev/null", opened[1], opened[1]]


def test_a_start_that_fails_is_reported_with_what_bubblewrap_printed(
    make_lock, image, make_task, cache, tmp_path
):
    engine = BubblewrapEngine()
    engine.prepare(make_lock(), image, cache, progress=lambda _: None)
    engine._program = str(tmp_path / "bwrap")
    (tmp_path / "bwrap").write_text(
        "#!/bin/sh\necho bwrap: Creating new namespace failed\nexit 1\n"
    )
    (tmp_path / "bwrap").chmod(0o755)
    with pytest.raises(CapsuleError, match="Creating new namespace failed") as refused:
        engine.run(make_task("exit 0"))
    assert refused.value.code == "CAP-E005"


def test_what_a_container_confines_more_is_said(make_lock, image, cache):
    engine, said = BubblewrapEngine(), []
    engine.prepare(make_lock(), image, cache, progress=said.append)
    facts = engine.describe()
    assert (facts["name"], facts["seccomp"], facts["memory"]) == ("bwrap", "profile", "watched")
    assert facts["processes"] == ("limited" if os.getuid() else "unlimited")
    assert "memory is watched" in said[-1]
    assert ("number of processes" in said[-1]) == (os.getuid() == 0)


def test_without_bubblewrap_or_namespaces(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CapsuleError, match="not on the PATH") as refused:
        BubblewrapEngine()
    assert (refused.value.code, refused.value.exit_code) == ("CAP-E001", ExitCode.NO_ENGINE)
    program = tmp_path / "bwrap"
    program.write_text(
        "#!/bin/sh\necho bwrap: No permissions to create new namespace >&2\nexit 1\n"
    )
    program.chmod(0o755)
    with pytest.raises(CapsuleError, match="No permissions to create"):
        BubblewrapEngine()


@pytest.mark.parametrize("option", ["--size", "--perms", "--clearenv", "--remount-ro"])
def test_a_bubblewrap_without_an_option_of_runs_is_found_at_once(tmp_path, monkeypatch, option):
    program = tmp_path / "bwrap"
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *{option}*) echo Unknown option {option} >&2; exit 1; esac\n'
        f'exec {shutil.which("bwrap")} "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(CapsuleError, match=f"CAP-E001 .*{option}") as refused:
        BubblewrapEngine()
    assert "0.7 or newer" in refused.value.fix


def test_a_cluster_is_refused():
    with pytest.raises(CapsuleError) as refused:
        OnCluster(BubblewrapEngine(), RemoteCluster("head:6379", None))
    assert refused.value.code == "CAP-E016"


@pytest.mark.skipif(os.getuid() != 0, reason="the other tests ran as an ordinary user already")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_an_ordinary_user_has_its_processes_limited(image, make_lock, make_task):
    folder = Path(tempfile.mkdtemp(prefix="capsule-user-", dir="/var/tmp"))
    try:
        layers = [
            dataclasses.replace(la, path=Path(shutil.copy(la.path, folder))) for la in image.layers
        ]
        (folder / "run").mkdir()
        script = "for i in $(busybox seq 64); do busybox sleep 600 & done; echo all"
        task = dataclasses.replace(make_task(script, processes=16), run_directory=folder / "run")
        owned = dataclasses.replace(image, layers=tuple(layers))
        for path in (folder, *folder.iterdir()):
            os.chown(path, pwd.getpwnam("nobody").pw_uid, -1)
        child = multiprocessing.get_context("fork").Process(
            target=_as_nobody, args=(owned, make_lock(), task, Cache(folder / "cache"))
        )
        child.start()
        child.join()
        output = (folder / "run" / "output.log").read_text()
        assert child.exitcode == 0, output
        assert "fork" in output
        assert "all" not in output
    finally:
        shutil.rmtree(folder)


def _as_nobody(image, lock, task, cache):
    profile = compiled_profile()  # the checkout may be in a folder that only root may enter
    bubblewrap.compiled_profile = lambda: profile
    user = pwd.getpwnam("nobody")
    os.setgroups([])
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)
    engine = BubblewrapEngine()
    assert engine.describe()["processes"] == "limited"
    engine.prepare(lock, image, cache, progress=lambda _: None)
    ended = engine.run(task)
    assert ended.status != 0
