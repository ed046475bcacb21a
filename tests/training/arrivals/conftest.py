"""Programs in a run directory, in processes of their own or in that of the test."""

import asyncio
import itertools
import json
import os
import selectors
import subprocess
import sys
from dataclasses import dataclass

import pytest

from capsule.experiment import contract
from capsule.experiment.arrival_log import ArrivalLog, parse_arrivals
from capsule.experiment.errors import CapsuleError
from capsule.native import native_part
from capsule.training.arrivals.files import check_arrivals, collect_arrivals
from capsule.training.arrivals.waits import Wait
from tests.training.conftest import ROOT

# A name is numbered for the whole process, so each test has its own.
NAMES = (f"inbox {number}" for number in itertools.count())
# The log of a run directory is read once, and pytest uses the folder of a test that passed again.
RUNS = (f"run-{number}" for number in itertools.count())
HEAD = """\
import asyncio, json, multiprocessing, os, queue, sys, threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from capsule.training import arrivals

ORDER = json.loads(sys.argv[1])
LIVE = not os.path.exists(os.environ.get("CAPSULE_RUN", "") + "/arrivals.replay")
"""


@dataclass
class Finished:
    output: str
    errors: str
    status: int
    directory: object

    @property
    def log(self) -> ArrivalLog:
        return parse_arrivals((self.directory / contract.ARRIVALS).read_bytes())


@pytest.fixture
def run(tmp_path):
    """Run a program as in a run directory, with derived randomness; collect its arrivals."""

    def run(code, order=(), *, replay=None, entropy="virtual", clock="system", under_capsule=True):
        number = sum(1 for _ in tmp_path.iterdir())
        directory = tmp_path / f"run-{number}"
        (directory / "journal").mkdir(parents=True)
        script = directory / "program.py"
        script.write_text(HEAD + code)
        if replay is not None:
            (directory / contract.ARRIVALS_REPLAY).write_bytes(replay.document())
        variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        if entropy is not None:
            variables |= {
                "LD_PRELOAD": str(native_part("libcapsule-entropy.so")),
                "CAPSULE_ENTROPY": entropy,
                "CAPSULE_CLOCK": clock,
                "CAPSULE_ENTROPY_PATH": "0",
                "CAPSULE_ENTROPY_KEY": "00" * 32,
                "CAPSULE_ENTROPY_DIRECTORY": str(directory / "journal"),
            }
        if under_capsule:
            variables[contract.RUN_VARIABLE] = str(directory)
        done = subprocess.run(
            [sys.executable, script, json.dumps(order)],
            capture_output=True,
            text=True,
            env=variables,
            timeout=600,
        )
        if under_capsule and done.returncode == 0:
            collect_arrivals(directory)
        return Finished(done.stdout, done.stderr, done.returncode, directory)

    return run


def refusal(finished):
    assert finished.status != 0
    with pytest.raises(CapsuleError) as caught:
        check_arrivals(finished.directory)
    assert caught.value.code in finished.errors
    return caught.value


@pytest.fixture
def begun(tmp_path):
    """A wait of this process that has been given one of two results."""
    wait = Wait(tmp_path, "completions", "full~1", 2)
    for number in range(2):
        wait.offer(number, number)
    wait.take()
    return wait


@pytest.fixture
def in_run(tmp_path, monkeypatch):
    """A function that gives this process a run directory, with a log to follow or without."""

    def enter(log=None):
        directory = tmp_path / next(RUNS)
        enter_run(directory, monkeypatch, log)
        return directory

    return enter


def enter_run(directory, patch, log=None):
    directory.mkdir()
    if log is not None:
        (directory / contract.ARRIVALS_REPLAY).write_bytes(ArrivalLog(waits=log).document())
    patch.setenv(contract.RUN_VARIABLE, str(directory))


def collected(directory):
    """Collect the arrivals of a run directory, and return the waits of its log by their names."""
    collect_arrivals(directory)
    return parse_arrivals((directory / contract.ARRIVALS).read_bytes()).waits


def only_wait(directory):
    (wait,) = collected(directory).values()
    return wait


def refused(directory, call, *arguments):
    with pytest.raises(CapsuleError) as caught:
        call(*arguments)
    assert caught.value.code == "CAP-T382"
    with pytest.raises(CapsuleError, match="CAP-T382"):
        check_arrivals(directory)
    return caught.value.message


class StandstillError(Exception):
    """All tasks wait for one another."""


class _NoWaiting(selectors.SelectSelector):
    """A selector with which the clock of its loop advances, and nothing else happens."""

    now = 0.0

    def select(self, timeout=None):
        if timeout is None:
            raise StandstillError
        self.now += max(timeout, 0)
        return []


class _Loop(asyncio.SelectorEventLoop):
    """An event loop of which each second takes no time, and which ends when all tasks wait."""

    def __init__(self):
        self._clock = _NoWaiting()
        super().__init__(self._clock)

    def time(self):
        return self._clock.now


def in_simulated_time(coroutine):
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(coroutine)
