"""Processes of workers: none is left behind, whatever becomes of the trainer."""

import gc
import subprocess
import sys

import pytest

from capsule.experiment.spec import DeterminismSpec
from capsule.training.acting.worker_process import WorkerProcess, stop
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


@pytest.mark.slow
@pytest.mark.usefixtures("importable", "warm_workers")
def test_the_garbage_collector_of_a_worker_visits_no_object_of_torch():
    process = WorkerProcess(0, gc.get_freeze_count, [0], DeterminismSpec(), "native")
    process.ask(int)  # the object is the number
    assert process.answer() > 100_000
    stop([process])
