"""A container as a node of a Ray cluster: ``python -m capsule.training.cluster_node``.

``head STORE_MIB COMMAND ...`` starts the head, which plays no actors, and becomes the command, to
which it leaves the head's address in ``CAPSULE_CLUSTER``. ``worker STORE_MIB HEAD:PORT NAME``
becomes a node with one processor, as soon as there is that head.

Ray's own processes are started before the command: they are no part of what it is watched for.
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
JOIN_SECONDS = 180  # that the head may take to be there
# Nobody else is in the container. Ports that Ray chose itself it would wait 15 s for, which a busy
# machine may exceed.
_PORTS = {
    "dashboard-agent-grpc-port": 6380,
    "dashboard-agent-listen-port": 6381,
    "runtime-env-agent-port": 6382,
    "metrics-export-port": 6383,
}
_START_SECONDS = {"RAY_raylet_start_wait_time_s": str(JOIN_SECONDS)}
_RAY = (sys.executable, "-P", "-m", "ray.scripts.scripts", "start")


def start_head(store: int, command: Sequence[str]) -> None:
    """Start a head in this container, then become ``command``.

    Args:
        store: Size of Ray's object store in MiB.
        command: Program and arguments.

    Raises:
        subprocess.CalledProcessError: The head does not start.
    """
    head = [*_RAY, "--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false"]
    head += _options("head", store)
    subprocess.run(head, env={**os.environ, **_START_SECONDS}, check=True)
    address = socket.gethostbyname(socket.gethostname())
    _become(command, {contract.CLUSTER_VARIABLE: f"{address}:{PORT}"})


def join(store: int, head: str, name: str) -> None:
    """Become a node of the cluster whose head has the address ``head``, once it is there."""
    host, _, port = head.rpartition(":")
    deadline = time.monotonic() + JOIN_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError):
            socket.create_connection((host, int(port)), 5).close()
            break
        time.sleep(0.2)
    node = [*_RAY, f"--address={head}", "--num-cpus=1", "--block", *_options(name, store)]
    _become(node, _START_SECONDS)


def _options(name: str, store: int) -> list[str]:
    return [
        f"--node-name={name}",
        f"--object-store-memory={store << 20}",
        "--disable-usage-stats",
        *(f"--{name}={port}" for name, port in _PORTS.items()),
    ]


def _become(command: Sequence[str], variables: dict[str, str]) -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and what follows would
    os.execvpe(command[0], list(command), {**os.environ, **variables})  # noqa: S606


if __name__ == "__main__":
    if sys.argv[1] == "head":
        start_head(int(sys.argv[2]), sys.argv[3:])
    else:
        join(int(sys.argv[2]), *sys.argv[3:])
