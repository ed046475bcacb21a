# ruff: noqa: S108 -- paths inside the container
"""Podman without root: its service and Capsule belong to an ordinary user."""

import dataclasses
import multiprocessing
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from capsule.engine.connection import connect
from capsule.engine.containers import ContainerEngine
from capsule.image.cache import Cache

pytestmark = [
    pytest.mark.engine,
    pytest.mark.xdist_group("programs"),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can start programs of another user"),
    pytest.mark.skipif(shutil.which("podman") is None, reason="needs podman"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]
USER = pwd.getpwnam("nobody")
SCRIPT = (
    "cat /text; echo; id -u; busybox grep CapEff /proc/self/status;"
    "for place in / /bin /etc /out /tmp; do"
    " (echo x > $place/probe) 2>/dev/null && echo $place; done;"
    "busybox ifconfig; exit 7"
)


@pytest.fixture
def folder():
    """A folder of the user; those of pytest are closed to others."""
    made = Path(tempfile.mkdtemp(prefix="capsule-user-", dir="/var/tmp"))
    os.chown(made, USER.pw_uid, USER.pw_gid)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def address(folder):
    """The address of a service that the user started."""
    socket = folder / "podman.sock"
    storage = ["--root", folder / "storage", "--runroot", folder / "state"]
    with subprocess.Popen(
        ["podman", "--storage-driver", "vfs", *storage, "system", "service", "--time", "0",
         f"unix://{socket}"],
        user=USER.pw_uid, group=USER.pw_gid, extra_groups=(), cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "XDG_RUNTIME_DIR": str(folder)},
        stderr=subprocess.PIPE, start_new_session=True,
    ) as service:  # fmt: skip
        while not socket.exists():
            assert service.poll() is None, service.communicate()[1]
            time.sleep(0.05)
        yield f"unix://{socket}"
        os.killpg(service.pid, signal.SIGKILL)  # it started itself again in a user namespace
    # Podman keeps the user's namespaces open with a process that outlives the service.
    os.kill(int((folder / "libpod" / "tmp" / "pause.pid").read_text()), signal.SIGKILL)


def test_a_run_is_root_in_the_container_and_the_user_outside(
    folder, address, make_image, make_lock, make_task
):
    image = make_image()
    layers = [
        dataclasses.replace(layer, path=Path(shutil.copy(layer.path, folder)))
        for layer in image.layers
    ]
    image = dataclasses.replace(image, layers=tuple(layers))
    task = dataclasses.replace(make_task(SCRIPT), run_directory=folder / "run" / "work")
    task.run_directory.mkdir(parents=True)
    for path in (task.run_directory.parent, task.run_directory, *folder.glob("*.tar")):
        os.chown(path, USER.pw_uid, USER.pw_gid)
    answers = multiprocessing.SimpleQueue()
    child = multiprocessing.get_context("fork").Process(
        target=_run_as_user,
        args=(address, image, make_lock(), task, Cache(folder / "cache"), answers),
    )
    child.start()
    child.join()
    assert child.exitcode == 0
    described, messages, ended = answers.get()
    assert (described["name"], described["rootless"]) == ("podman", "true")
    assert (ended.status, ended.reason, ended.image) == (7, "exited", image.config_digest)
    lines = (task.run_directory / "output.log").read_text().splitlines()
    assert lines[:3] == ["one", "0", "CapEff:\t0000000000000000"]
    assert lines[3:5] == ["/out", "/tmp"]
    assert not any("HWaddr" in line for line in lines[5:])  # no network
    assert (task.run_directory / "probe").stat().st_uid == USER.pw_uid
    # The engine cannot use control groups of version 1, and users are told.
    told = [] if described["cgroup"] == "2" else ["memory and processes are not limited"]
    assert [text for text in told if text in messages] == told


def _run_as_user(address, image, lock, task, cache, answers):
    os.setgroups([])
    os.setgid(USER.pw_gid)
    os.setuid(USER.pw_uid)
    os.environ["CONTAINER_HOST"] = address
    engine = ContainerEngine(connect("podman"))
    messages = []
    engine.prepare(lock, image, cache, progress=messages.append)
    ended = engine.run(task)
    answers.put((engine.describe(), " ".join(messages), ended))
