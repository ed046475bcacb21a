"""Runs that begin in a process which has imported torch: the import is most of the work of a start.

A server is started with the variables of a run. It imports what a run imports, and forks for each
run. The run's process executes ``python -m capsule.training`` from there. Only the import of torch
is not repeated: the module is hidden until the run imports it, because a run refuses to begin after
torch was imported, and is then found as it was.

usage: python -m tests.training.warm_start DESCRIPTOR   # a socket, on which requests come as JSON
"""

import atexit
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What a run imports, itself or by what it does, before its environment is made.
MODULES = (
    "gymnasium",
    "ale_py",
    "safetensors.torch",
    "capsule.training.lifecycle",
    "capsule.training.checkpointer",
    "capsule.training.evaluator",
    "capsule.training.registry",
)
LONGEST = 1 << 16  # request or answer
SERVERS = 2  # that a process of the tests keeps, each with torch in its memory

# --- the server -----------------------------------------------------------------------------------


class Imported(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module that has been imported already."""

    def __init__(self, module):
        self.module, self.spec = module, module.__spec__

    def find_spec(self, name, *_):
        if name != self.module.__name__:
            return None
        return importlib.machinery.ModuleSpec(name, self, origin=self.spec.origin, is_package=True)

    def create_module(self, _spec):
        return self.module

    def exec_module(self, module):
        sys.meta_path.remove(self)
        module.__spec__, module.__loader__ = self.spec, self.spec.loader


def serve(descriptor):
    """Import torch, then start runs and tell how they end, until the other side is closed."""
    for name in MODULES:
        importlib.import_module(name)
    torch = sys.modules.pop("torch")
    assert [*Path("/proc/self/task").iterdir()][1:] == [], "a process with threads should not fork"
    connection = socket.socket(fileno=descriptor)
    while request := connection.recv(LONGEST):
        request = json.loads(request)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                connection.close()
                run(torch, **request)
        connection.send(json.dumps(answer).encode())


def run(torch, directory, processors, errors, added):
    """Do what ``python -m capsule.training DIRECTORY`` does, as the last thing of this process."""
    with open(errors, "wb") as file:  # noqa: PTH123
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.sched_setaffinity(0, processors)
    os.environ.update(added)
    sys.meta_path.insert(0, Imported(torch))
    sys.argv = ["capsule.training", directory]
    for name in ("capsule.training.__main__", "tests.training.warm_start"):
        sys.modules.pop(name, None)
    runpy.run_module("capsule.training", run_name="__main__", alter_sys=True)


# --- the tests' side ------------------------------------------------------------------------------


class Server:
    """A server that this process has started."""

    def __init__(self, variables):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.training.warm_start", str(number)],
                env=variables,
                cwd=ROOT,
                pass_fds=[number],
            )

    def ask(self, **request):
        """Send a request; return the answer."""
        self._socket.send(json.dumps(request).encode())
        answer = self._socket.recv(LONGEST)
        assert answer, "the server of runs has ended"
        return json.loads(answer)

    def close(self):
        """End the server, and not the runs."""
        self._socket.close()
        self._process.wait()


class WarmRun:
    """A run's process, as ``subprocess.Popen`` shows one whose standard error is read as text."""

    def __init__(self, server, directory, added):
        self._server, self.returncode = server, None
        descriptor, self._errors = tempfile.mkstemp(prefix="errors-of-a-run-")
        os.close(descriptor)
        self.pid = server.ask(
            directory=str(directory),
            processors=sorted(os.sched_getaffinity(0)),
            errors=self._errors,
            added=added,
        )

    def poll(self):
        if self.returncode is None:
            self.returncode = self._server.ask(poll=self.pid)
        return self.returncode

    def wait(self, timeout=None):
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(["capsule.training"], timeout)
            descriptor = os.pidfd_open(self.pid)
            select.select([descriptor], [], [], 1)
            os.close(descriptor)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=None):
        self.wait(timeout)
        path = Path(self._errors)
        errors = path.read_text()
        path.unlink()
        return None, errors


class Servers:
    """The servers of this process, by the variables that they were started with."""

    def __init__(self):
        self._servers = OrderedDict()

    def start(self, directory, variables, added):
        """Start a run in a directory, with variables that its own start does not have."""
        key = json.dumps(variables, sort_keys=True)
        if key not in self._servers:
            while len(self._servers) >= SERVERS:
                self._servers.popitem(last=False)[1].close()
            self._servers[key] = Server(variables)
        self._servers.move_to_end(key)
        return WarmRun(self._servers[key], directory, added)

    def close(self):
        """End all servers."""
        while self._servers:
            self._servers.popitem()[1].close()


SERVERS_OF_THIS_PROCESS = Servers()
atexit.register(SERVERS_OF_THIS_PROCESS.close)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
