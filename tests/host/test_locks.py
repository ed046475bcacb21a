"""Locks between processes."""

import errno
import fcntl
import os
import subprocess
import sys
import threading

import pytest

from capsule.host.errors import CapsuleError
from capsule.host.locks import is_locked, lock, lock_open
from tests.conftest import wait_until

HOLDER = """
import os, sys, time
from pathlib import Path
from capsule.host.locks import lock
path = Path(sys.argv[1])
assert lock(os.open(path, os.O_RDONLY), path)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["file", "folder"])
def place(tmp_path, request):
    path = tmp_path / "place"
    path.touch() if request.param == "file" else path.mkdir()
    return path


def test_a_lock_excludes_other_processes_until_its_own_ends(place):
    descriptor = os.open(place, os.O_RDONLY)
    command = [sys.executable, "-c", HOLDER, str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        assert is_locked(place)
        assert not lock(descriptor, place, patience=0.05)
        other.kill()
    assert not is_locked(place)
    assert lock(descriptor, place)
    os.close(descriptor)
    assert not is_locked(place)


def test_what_does_not_exist_is_not_locked(tmp_path):
    assert not is_locked(tmp_path / "nothing")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_refused(place, monkeypatch, number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(CapsuleError, match=os.strerror(number)) as error:
        is_locked(place)
    assert error.value.code == "CAP-Y020"


@pytest.mark.parametrize("shared", [False, True])
def test_a_long_wait_says_what_it_waits_for(place, monkeypatch, capfd, shared):
    monkeypatch.setattr("capsule.host.locks.NOTICE_SECONDS", 0.0)
    holder, waiting = (os.open(place, os.O_RDONLY) for _ in range(2))
    assert lock(holder, place)
    waiter = threading.Thread(target=lock_open, args=(waiting, place), kwargs={"shared": shared})
    waiter.start()
    said = []
    wait_until(lambda: said.append(capfd.readouterr().err) or "".join(said).endswith("\n"))
    assert "".join(said) == f"waiting for another Capsule process, which has locked {place}\n"
    assert waiter.is_alive()
    os.close(holder)
    waiter.join()
    os.close(waiting)


def test_a_free_lock_is_taken_without_a_word(place, monkeypatch, capfd):
    monkeypatch.setattr("capsule.host.locks.NOTICE_SECONDS", 0.0)
    monkeypatch.setattr(threading, "Timer", None)
    descriptor = os.open(place, os.O_RDONLY)
    assert lock_open(descriptor, place)
    os.close(descriptor)
    assert capfd.readouterr().err == ""
