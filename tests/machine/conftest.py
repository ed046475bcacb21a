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
    yield f"devices={len(devices)}"
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


@pytest.fixture
def on_machine(nvml_library, tmp_path):
    """Return a function that runs a program on one of the machines, and returns what it printed.

    The program prints a JSON document. Variables are added to the environment of the tests, from
    which the choice of GPUs is removed.
    """

    def run(name, program, **variables):
        facts = tmp_path / f"{name}.machine"
        facts.write_text("".join(f"{line}\n" for line in machine_lines(MACHINES[name])))
        kept = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={
                **kept,
                "LD_LIBRARY_PATH": str(nvml_library),
                "NVML_MACHINE": str(facts),
                **variables,
            },
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        return json.loads(done.stdout)

    return run
