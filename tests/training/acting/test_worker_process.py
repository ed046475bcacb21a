"""Processes of workers: none is left behind, whatever becomes of the trainer."""

import subprocess
import sys

import pytest

from tests.training.conftest import ROOT

FAILS_BETWEEN_STARTS = """
from capsule.experiment.spec import DeterminismSpec
from capsule.training.acting.worker_process import WorkerProcess

def start():
    processes = [WorkerProcess(0, dict, [0], DeterminismSpec(), "native")]
    raise OSError("no more processes")

start()
"""


@pytest.mark.slow
def test_an_interpreter_ends_that_failed_between_the_starts_of_two_workers():
    done = subprocess.run(
        [sys.executable, "-c", FAILS_BETWEEN_STARTS],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
    )
    assert done.returncode == 1
    assert done.stderr.endswith("OSError: no more processes\n")
