"""Machines with GPUs that this one does not have, played through NVIDIA's own binding of NVML."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

FOLDER = Path(__file__).parent / "nvml"
MACHINES = YAML(typ="safe").load(FOLDER / "machines.yaml")
ROOT = Path(__file__).parents[2]


def machine_lines(machine):
    """Yield the lines that the stand-in reads."""
    for key in ("driver", "cuda", "init"):
        if key in machine:
            yield f"{key}={machine[key]}"
    devices = machine.get("devices", [])
    yield f"devices={machine.get('count', len(devices))}"
    for number, device in enumerate(devices):
        yield from field_lines(number, device)
        for slot, instance in device.get("slots", {}).items():
            yield from field_lines(f"{number}.{slot}", instance)


def field_lines(name, fields):
    return (f"{name}.{field}={value}" for field, value in fields.items() if field != "slots")


@pytest.fixture(scope="session")
def nvml_library(compiled, tmp_path_factory):
    """Return the folder with the stand-in, under the name that the binding loads."""
    folder = tmp_path_factory.mktemp("nvml")
    built = compiled(FOLDER / "nvml.c", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")
    (folder / "libnvidia-ml.so.1").symlink_to(built)
    return folder


# Forks a process for each program, after importing the modules that most programs need. The
# stand-in is not loaded here: a program that asks for GPUs loads it.
SERVER = """
import json, os, sys, traceback
import capsule.cli.common, capsule.machine.fingerprint, tests.machine.test_compare
for line in sys.stdin:
    request = json.loads(line)
    if not (child := os.fork()):
        try:
            os.environ.update(request["variables"])
            with open(request["output"], "w") as sys.stdout:
                exec(request["program"], {})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def programs(nvml_library):
    """Return the process that executes programs beside the stand-in."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        cwd=ROOT,
        env={**kept, "LD_LIBRARY_PATH": str(nvml_library)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:
        yield server
        server.stdin.close()


@pytest.fixture
def on_machine(programs, tmp_path):
    """Return a function that runs a program on one of the machines, and returns what it printed.

    The program prints a JSON document. Variables are added to the environment of the tests, from
    which the choice of GPUs is removed.
    """

    def run(name, program, **variables):
        facts, output = tmp_path / f"{name}.machine", tmp_path / "output"
        facts.write_text("".join(f"{line}\n" for line in machine_lines(MACHINES[name])))
        variables["NVML_MACHINE"] = str(facts)
        request = {"program": program, "variables": variables, "output": str(output)}
        programs.stdin.write(json.dumps(request) + "\n")
        programs.stdin.flush()
        assert int(programs.stdout.readline()) == 0
        return json.loads(output.read_text())

    return run
