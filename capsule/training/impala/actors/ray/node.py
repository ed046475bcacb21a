"""A container as a node of a Ray cluster: ``python -m capsule.training.impala.actors.ray.node``.

``head STORE_MIB COMMAND ...`` starts the head, which runs no actors, and then executes the command
in place of itself, with the head's address in ``CAPSULE_CLUSTER``. ``worker STORE_MIB HEAD:PORT
NAME`` becomes a node with one processor as soon as the head accepts connections.

Ray's own processes are started before the command, so they are not among the processes of the run.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from capsule.experiment import contract

PORT = 6379
JOIN_SECONDS = 180.0  # time in which the head must accept connections
ATTEMPTS = 5  # a node ends if its agents do not start within 15 s, which happens on a busy machine

# Fixed, because Ray waits for ports that it has chosen itself. The container has no other processes
# that could use them.
_PORTS = {
    "dashboard-agent-grpc-port": 6380,
    "dashboard-agent-listen-port": 6381,
    "runtime-env-agent-port": 6382,
    "metrics-export-port": 6383,
}
_RAY = (sys.executable, "-P", "-m", "ray.scripts.scripts", "start")
# An image has no compiled modules, so the modules that Ray's processes import are compiled once,
# before any of these starts.
_COMPILED = "/tmp/ray-modules"  # noqa: S108 - the container's own
_AGENTS = "import ray.dashboard.agent, ray._private.runtime_env.agent.main, ray.scripts.scripts"


def start_head(store: int, command: Sequence[str]) -> None:
    """Start a head in this container, then execute ``command`` in place of this process.

    Args:
        store: Size of Ray's object store in MiB.
        command: Program and arguments.

    Raises:
        subprocess.CalledProcessError: The head does not start.
    """
    head = ["--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false"]
    _compile()
    _start([*head, *_options("head", store)])
    address = socket.gethostbyname(socket.gethostname())
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and execve() keeps that
    variables = {contract.CLUSTER_VARIABLE: f"{address}:{PORT}"}
    os.execvpe(command[0], list(command), {**os.environ, **variables})  # noqa: S606


def join(store: int, head: str, name: str) -> None:
    """Become a node of a cluster as soon as its head accepts connections; return when it has ended.

    Args:
        store: Size of Ray's object store in MiB.
        head: Address of the head, ``HOST:PORT``.
        name: Name of the node.

    Raises:
        subprocess.CalledProcessError: The node does not start, or has ended with its head.
    """
    host, _, port = head.rpartition(":")
    _compile()
    deadline = time.monotonic() + JOIN_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError):
            socket.create_connection((host, int(port)), 5).close()
            break
        time.sleep(0.2)
    _start([f"--address={head}", "--num-cpus=1", "--block", *_options(name, store)])


def _options(name: str, store: int) -> list[str]:
    return [
        f"--node-name={name}",
        f"--object-store-memory={store << 20}",
        "--disable-usage-stats",
        *(f"--{option}={port}" for option, port in _PORTS.items()),
    ]


def _start(options: Sequence[str]) -> None:
    """Start a node, with at most :data:`ATTEMPTS` attempts."""
    for attempt in range(1, ATTEMPTS + 1):
        ended = subprocess.run([*_RAY, *options], env=_variables(), check=attempt == ATTEMPTS)
        if ended.returncode == 0:
            return


def _compile() -> None:
    subprocess.run([sys.executable, "-P", "-c", _AGENTS], env=_variables(), check=True)


def _variables() -> dict[str, str]:
    """Return the environment of Ray's own processes; actor workers get the run's environment."""
    kept = {n: value for n, value in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": _COMPILED}


if __name__ == "__main__":
    if sys.argv[1] == "head":
        start_head(int(sys.argv[2]), sys.argv[3:])
    else:
        join(int(sys.argv[2]), *sys.argv[3:])
