# ruff: noqa: S108 -- paths inside the enclosure
"""Namespaces without a container engine: what a program sees, and that nothing is left of it."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from capsule.native import native_part
from tests.conftest import wait_until

NOBODY = 54_321  # a number without an account


@pytest.fixture(params=["caller", "ordinary user"])
def enclose(request):
    """Return a function that runs a shell script in namespaces, as root and as an ordinary user."""
    user = {}
    if request.param == "ordinary user":
        if os.getuid() != 0:
            pytest.skip("the caller is one")
        user = {"user": NOBODY, "group": NOBODY}
    with tempfile.TemporaryDirectory() as name:
        folder, program, out = Path(name), Path(name, "capsule-enclose"), Path(name, "out")
        shutil.copy(native_part("capsule-enclose"), program)
        out.mkdir()
        for path, mode in ((folder, 0o755), (program, 0o755), (out, 0o777)):
            path.chmod(mode)

        def run(script, *options):
            command = [program, f"--writable={out}=/out", *options, "--", "sh", "-c", script]
            return subprocess.run(
                command, capture_output=True, text=True, timeout=600, cwd="/", **user
            )

        yield run


def test_a_program_sees_itself_alone_at_fixed_paths(enclose):
    ended = enclose("echo $$ /proc/[0-9]*; pwd; hostname; ls -A /tmp /dev/shm")
    assert ended.stdout.split() == ["1", "/proc/1", "/tmp", "capsule", "/dev/shm:", "/tmp:"]
    ended = enclose("ls /project/bin", "--read-only=/usr=/project")
    assert "env" in ended.stdout.split()


def test_what_it_writes_to_temporary_folders_is_gone_and_never_on_the_machine(enclose):
    marker = f"capsule-test-{os.getpid()}"
    script = f"for d in /tmp /var/tmp /dev/shm; do ls $d/{marker} 2>&-; echo > $d/{marker}; done"
    for _ in range(2):
        assert enclose(f"{script}; ls /tmp/{marker}").stdout == f"/tmp/{marker}\n"
    assert not any(Path(folder, marker).exists() for folder in ("/tmp", "/var/tmp", "/dev/shm"))


def test_it_can_write_its_folder_and_nothing_else_of_the_machine(enclose):
    ended = enclose("for d in / /out /etc /var /home /proc/..; do echo > $d/probe; done; ls /out")
    assert ended.stdout == "probe\n"
    assert ended.stderr.count("Read-only file system") == 5


def test_temporary_files_are_limited(enclose):
    ended = enclose("head -c 9000000 /dev/zero > /tmp/large", "--temporary=8")
    assert "No space left on device" in ended.stderr


def test_there_is_a_network_of_its_own_that_leads_nowhere(enclose):
    code = (
        "import socket\n"
        "print([name for _, name in socket.if_nameindex() if not name.endswith('0')])\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "socket.create_connection(server.getsockname())\n"
        "try: socket.create_connection(('192.0.2.1', 9), timeout=5)\n"
        "except OSError as error: print(error.strerror)\n"
    )
    ended = enclose(f"/usr/bin/env python3 -c {code!r}".replace("\\n", "\n"))
    assert ended.stdout.splitlines() == ["['lo']", "Network is unreachable"], ended.stderr


def test_the_status_and_signals_are_passed_on(enclose):
    assert enclose("exit 7").returncode == 7
    assert enclose("kill -9 $$; exit 3").returncode == 3  # from inside nothing ends the first one
    assert enclose("trap 'exit 5' TERM; kill $$; sleep 600").returncode == 5


@pytest.mark.parametrize("options", [(), ("--writable=/etc",), ("--writable=/etc=/a/b",)])
def test_misuse_is_told(options):
    ended = subprocess.run([native_part("capsule-enclose"), *options], capture_output=True)
    assert (ended.returncode, ended.stdout) == (2, b"")
    assert ended.stderr.startswith(b"capsule-enclose: ")


def test_a_kernel_that_refuses_is_told_before_anything_runs():
    """Without a privilege, and with no user namespace allowed, as on some machines."""
    script = "echo 0 > /proc/sys/user/max_user_namespaces && setpriv --bounding-set=-all $0 --probe"
    outer = ["unshare", "--user", "--map-root-user", "sh", "-c", script]
    ended = subprocess.run([*outer, native_part("capsule-enclose")], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (88, ""), ended.stderr
    assert ended.stderr.startswith("capsule-enclose: namespaces cannot be created: ")


def test_nothing_is_left_when_the_process_that_started_it_is_killed(tmp_path):
    marker = f"601.{os.getpid()}"
    script = f"setsid sleep {marker} & echo > /out/ready; sleep {marker}"
    command = [native_part("capsule-enclose"), f"--writable={tmp_path}=/out", "--", "sh", "-c"]
    starter = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    started = subprocess.Popen([sys.executable, "-c", starter, *command, script])
    wait_until(lambda: (tmp_path / "ready").exists() and len(_mentioning(marker)) >= 2, seconds=600)
    started.send_signal(signal.SIGKILL)
    started.wait()
    wait_until(lambda: not _mentioning(marker), seconds=600)


def _mentioning(text):
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if text.encode() in words:
            found.append(folder.name)
    return found


def test_signals_that_are_ignored_get_their_default_action_back():
    with native_part("capsule-enclose").open() as program:
        number = program.fileno()
        begin = f"/proc/self/fd/{number} --default-signals={number}"  # as bubblewrap executes it
        shown = f"grep SigIgn /proc/self/status; ls /proc/$$/fd/{number}"
        ended = subprocess.run(
            ["sh", "-c", f'trap "" HUP INT TERM; exec {begin} -- "$@"', "sh", "sh", "-c", shown],
            capture_output=True,
            text=True,
            check=False,
            pass_fds=(number,),
        )
    assert int(ended.stdout.split()[1], 16) & (1 << signal.SIGTERM - 1) == 0
    assert "No such file" in ended.stderr


def test_a_program_with_default_signals_that_does_not_exist():
    command = [native_part("capsule-enclose"), "--default-signals=9", "--", "/nowhere"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stderr.startswith("capsule-enclose: /nowhere cannot be executed")
    assert ended.returncode == 88
