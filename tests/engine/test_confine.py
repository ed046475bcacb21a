"""What is confined inside, where an engine cannot be told to, and that it is read back."""

import base64
import json
import os
import subprocess
import sys

import pytest

from capsule.engine import confine
from capsule.engine.seccomp_filter import compiled_profile

pytestmark = pytest.mark.engine

BARE = ("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--unshare-all", "--as-pid-1")
SHOW = (
    "ulimit -n; ulimit -c; grep -E 'Seccomp:|NoNewPrivs' /proc/self/status; env; ls /proc/self/fd"
)

# A bridge, because the kernel of a machine with container engines has bridges.
ADD_INTERFACE = """
import fcntl, os, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    fcntl.ioctl(any_socket, 0x89A0, b"tunl0" + bytes(11))  # SIOCBRADDBR
    flags = struct.pack("16sH22x", b"tunl0", int(sys.argv[1]))  # IFF_UP
    fcntl.ioctl(any_socket, 0x8914, flags)  # SIOCSIFFLAGS
os.execvp(sys.argv[2], sys.argv[2:])
"""


def execute(*options, before=(), **changes):
    asked = {
        "command": ["/bin/sh", "-c", SHOW],
        "variables": {"ONLY": "this"},
        "limits": {"nofile": 64, "core": 0},
        "filter": base64.b64encode(compiled_profile()).decode(),
        **changes,
    }
    command = [sys.executable, "-I", "-S", confine.__file__, json.dumps(asked)]
    opened = os.open("/", os.O_RDONLY)
    try:
        return subprocess.run(
            [*before, "bwrap", *options, "--", *command],
            capture_output=True,
            text=True,
            pass_fds=[opened],
        )
    finally:
        os.close(opened)


def test_a_program_is_limited_filtered_and_gets_nothing_of_the_caller():
    done = execute(*BARE, "--cap-drop", "ALL")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[-1] for line in lines[:2]] == ["64", "0"]
    assert {"NoNewPrivs:\t1", "Seccomp:\t2", "ONLY=this"} <= set(lines)
    assert lines[-4:] == ["0", "1", "2", "3"]  # the last is that of the listing


def test_without_a_filter_for_system_calls():
    assert "Seccomp:\t0" in execute(*BARE, "--cap-drop", "ALL", filter="").stdout


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((*BARE, "--share-net", "--cap-drop", "ALL"), "it has the network"),
        ((*BARE[:-1], "--cap-drop", "ALL"), "it is not the first process"),
        ((*BARE, "--cap-add", "CAP_SYS_ADMIN"), "it has capabilities"),
    ],
)
def test_a_program_that_would_be_confined_less_is_not_started(options, reason):
    done = execute(*options)
    assert (done.returncode, done.stdout) == (125, "")
    assert f"capsule: the program was not started, because {reason}" in done.stderr


@pytest.mark.parametrize("up", [False, True])
def test_an_interface_that_is_down_is_no_network(up):
    """As the fallback interfaces of tunnels that some kernels make in every namespace."""
    python = (sys.executable, "-I", "-S", "-c", ADD_INTERFACE, str(int(up)))
    before = ("unshare", "--map-root-user", "--net", *python)
    done = execute(*BARE, "--share-net", "--cap-drop", "ALL", before=before)
    assert (done.returncode == 0) is not up, done.stderr
    assert ("it has the networks tunl0" in done.stderr) is up


def test_a_program_that_does_not_exist():
    done = execute(*BARE, "--cap-drop", "ALL", command=["/nowhere"])
    assert done.returncode == 125
    assert "No such file or directory" in done.stderr
