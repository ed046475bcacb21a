"""Telling what belongs to a process that runs from what a killed one left."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from capsule.host.errors import CapsuleError
from capsule.host.owner import (
    is_gone,
    is_of_earlier_boot,
    remove_abandoned,
    temporary_folder,
    this_process,
)

OWNER = (
    "import sys, time\n"
    "from pathlib import Path\n"
    "from capsule.host.owner import temporary_folder, this_process\n"
    "with temporary_folder('x-', Path(sys.argv[1])) as folder:\n"
    "    (folder / 'deep').mkdir(mode=0)\n"
    "    print(this_process(), flush=True)\n"
    "    time.sleep(600)\n"
)


@pytest.fixture
def owner(tmp_path):
    """Another process that holds a folder, and its name."""
    command = [sys.executable, "-c", OWNER, tmp_path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with process:
        yield process, process.stdout.readline().strip()
        process.kill()


def test_a_process_that_runs_is_not_gone(owner):
    assert not is_gone(this_process())
    assert not is_gone(owner[1])


def test_a_killed_process_is_gone_and_its_folders_are_removed(owner, tmp_path):
    process, name = owner
    (folder,) = tmp_path.iterdir()
    remove_abandoned(tmp_path)
    assert folder.exists()
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_gone(name)  # although nobody has waited for it yet
    process.wait()
    assert is_gone(name)
    remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("same", ["host name", "machine id", "nothing"])
def test_folders_of_another_machine_are_left_alone(owner, tmp_path, monkeypatch, same):
    """NFS and Lustre do not tell this machine of the other's lock on its folder."""
    import capsule.host.owner as module

    (folder,) = tmp_path.iterdir()
    monkeypatch.setattr(module, "lock_file", lambda *_, **__: True)
    if same != "host name":
        there = os.uname_result(("Linux", "another-node", "6.1", "#1", "x86_64"))
        monkeypatch.setattr(os, "uname", lambda: there)
    if same != "machine id":
        number = tmp_path.parent / f"machine-id-of-{tmp_path.name}"
        number.write_text("0123456789abcdef0123456789abcdef\n")
        monkeypatch.setattr(module, "_MACHINE_ID", number)
    remove_abandoned(tmp_path)
    assert folder.exists()
    owner[0].kill()
    owner[0].wait()
    remove_abandoned(tmp_path, anywhere=True)
    assert not folder.exists()


def test_another_process_with_its_number_is_not_taken_for_it():
    place, number, started = this_process().rsplit("/", 2)
    assert is_gone(f"{place}/{number}/{int(started) - 1}")


@pytest.mark.parametrize("part", range(4))
def test_processes_of_other_users_machines_and_namespaces_are_left_alone(part):
    parts = f"{this_process()}0".split("/")  # one that has ended
    assert is_gone("/".join(parts))
    parts[part] = "1" if parts[part] != "1" else "2"
    assert not is_gone("/".join(parts))


def test_a_process_of_an_earlier_boot_is_known_by_its_user_and_machine():
    assert not is_of_earlier_boot(this_process())
    user, machine, _, namespace, number, started = this_process().split("/")
    assert is_of_earlier_boot(f"{user}/{machine}/earlier/1/2/3")
    assert is_of_earlier_boot(f"{user}/{machine}/earlier/{namespace}/{number}/{started}")
    assert not is_of_earlier_boot(f"{int(user) + 1}/{machine}/earlier/1/2/3")
    assert not is_of_earlier_boot(f"{user}/another/earlier/1/2/3")


@pytest.mark.parametrize("text", ["", "/", "a/b/c", "0/0/0/0/x/0", "\u0661/2/3/4/5/6"])
def test_what_is_no_name_of_a_process_is_left_alone(text):
    assert not is_gone(text)
    assert not is_of_earlier_boot(text)


def test_a_folder_is_closed_to_others_and_removed_with_all_in_it(tmp_path):
    with temporary_folder("mine-", tmp_path) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").touch()
        remove_abandoned(tmp_path)  # by the same process: still held
        assert (folder / "file").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_refused_and_keeps_nothing(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(CapsuleError) as refused, temporary_folder("x-", tmp_path):
        pass
    assert refused.value.code == "CAP-Y020"
    assert "TMPDIR" in refused.value.fix
    assert len(list(Path("/proc/self/fd").iterdir())) == opened
    assert list(tmp_path.iterdir()) == []


def test_only_folders_of_this_form_are_removed(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "my-notes.held").mkdir()  # of the user's own, who knows nothing of locks
    (tmp_path / "file.capsule-held").touch()
    (tmp_path / "target").mkdir()
    (tmp_path / "link.capsule-held").symlink_to(tmp_path / "target")
    remove_abandoned(tmp_path, anywhere=True)
    assert len(list(tmp_path.iterdir())) == 5


def test_a_folder_that_is_removed_before_it_is_held_is_made_again(tmp_path, monkeypatch):
    import capsule.host.owner as module

    taken = []

    def swept(descriptor, path):
        if not taken:
            taken.append(path)
            path.rmdir()
        return lock_open(descriptor, path)

    lock_open = module.lock_open
    monkeypatch.setattr(module, "lock_open", swept)
    with temporary_folder("raced-", tmp_path) as folder:
        assert folder.is_dir()
        assert folder != taken[0]


def test_a_folder_that_is_taken_for_an_abandoned_one_before_it_is_locked_is_made_again(
    tmp_path, monkeypatch
):
    """Another Capsule may look for abandoned folders between the making and the locking."""
    make, made = tempfile.mkdtemp, []

    def mkdtemp(**options):
        made.append(make(**options))
        if len(made) == 1:
            remove_abandoned(tmp_path)
        return made[-1]

    monkeypatch.setattr("capsule.host.owner.tempfile.mkdtemp", mkdtemp)
    with temporary_folder("x-", tmp_path) as folder:
        assert folder.is_dir()
        assert len(made) == 2
