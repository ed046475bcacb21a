"""Programs on other processors: natively, and under QEMU's emulation of a user process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from capsule.experiment.variables import maths_variables
from capsule.native import native_part
from tests.conftest import printed

ROOT = Path(__file__).parents[2]
OLDEST_QEMU = 10  # 7.2 computes oneDNN's LSTM wrongly


@pytest.fixture(scope="session")
def qemu():
    """Path of qemu-x86_64: ``CAPSULE_QEMU``, or Debian 13's."""
    path = os.environ.get("CAPSULE_QEMU") or fetch_qemu()
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"version (\d+)\.", shown)
    assert version and int(version[1]) >= OLDEST_QEMU, shown
    return path


def fetch_qemu():
    script = Path(__file__).with_name("fetch-qemu.sh")
    done = subprocess.run(
        ["bash", str(script), str(ROOT / ".cache" / "qemu")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="session")
def python(qemu):
    """Run Python under a profile, on this processor or on another; return its standard output."""

    def run(profile, *arguments, processor=None, **variables):
        emulator = [] if processor is None else [qemu, "-cpu", processor]
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "LD_PRELOAD": str(native_part("libcapsule-math.so")),
            **maths_variables(profile, threads=1),
            **variables,
        }
        return printed([*emulator, sys.executable, *map(str, arguments)], environment, 1800)

    return run
