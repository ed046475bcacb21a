"""Commands of Capsule in processes of their own, which a server forks.

The server imports the modules of the host side once. To import them takes as long as most commands
themselves, and the tests execute some two hundred commands. A command has its own folder,
environment, processors, standard streams and exit status. ``tests/cli`` tests that
``python -m capsule`` starts as well.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# What the modules of Capsule import when a command needs it.
LATE = (
    "cryptography.hazmat.primitives.asymmetric.ed25519",
    "cyclonedx.spdx",
    "cyclonedx.validation.json",
    "docker",
    "pydantic.type_adapter",
    "rich.console",
    "rich.table",
    "ruamel.yaml",
    "typer._adapters",
    "zstandard",
)


def start_command(*arguments: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess:
    """Execute a command of Capsule and return its exit status and what it printed."""
    words = list(map(str, arguments))
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        ask = {
            "words": words,
            "cwd": str(cwd),
            "environment": {**os.environ, **variables},
            "processors": sorted(os.sched_getaffinity(0)),
            "streams": [f"/proc/{os.getpid()}/fd/{each.fileno()}" for each in (output, errors)],
        }
        server = _server(os.getpid())
        server.stdin.write(json.dumps(ask) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        printed = []
        for stream in (output, errors):
            stream.seek(0)
            printed.append(stream.read().decode())
    return subprocess.CompletedProcess(words, status, *printed)


@functools.cache
def _server(_process: int) -> subprocess.Popen[str]:
    """Start the server of a process of tests, once."""
    server = subprocess.Popen(
        [sys.executable, "-m", __name__],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def end() -> None:
        server.stdin.close()
        server.wait()
        server.stdout.close()

    atexit.register(end)
    return server


def serve() -> None:
    """Fork a process for each command that a line of the standard input asks for."""
    main = _import_host_side()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _become(json.loads(line))
            main()
            sys.exit(0)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def _import_host_side() -> Any:
    """Import all modules but those that a run imports in its image, and return ``main``."""
    import capsule

    for package in pkgutil.iter_modules(capsule.__path__, "capsule."):
        if package.name not in {"capsule.training", "capsule.__main__"}:
            importlib.import_module(package.name)
            if package.ispkg:
                path = Path(capsule.__path__[0]) / package.name.rpartition(".")[2]
                for module in pkgutil.walk_packages([str(path)], f"{package.name}."):
                    importlib.import_module(module.name)
    for name in LATE:
        importlib.import_module(name)
    gc.freeze()
    return importlib.import_module("capsule.cli.main").main


def _become(ask: Mapping[str, Any]) -> None:
    """Be the process that executes a command."""
    os.chdir(ask["cwd"])
    os.sched_setaffinity(0, ask["processors"])
    os.environ.clear()
    os.environ.update(ask["environment"])
    for number, path in enumerate(("/dev/null", *ask["streams"])):
        stream = os.open(path, os.O_RDWR)
        os.dup2(stream, number)
        os.close(stream)
    sys.argv = ["capsule", *ask["words"]]
    sys.modules["__main__"].__package__ = None  # else its messages name another command


if __name__ == "__main__":
    serve()
