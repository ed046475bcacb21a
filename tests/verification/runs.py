"""Finished runs to compare: small, real, in processes of their own, and bundled like any other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

import capsule
from capsule import execution
from capsule.bundle.keys import generate, load_private
from capsule.bundle.packing import FinishedRun, pack_run
from capsule.engine.interface import Exit
from capsule.experiment import contract
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.lock import Lock, LockedWheel
from capsule.host.run_directory import LOCK, WORK
from capsule.host.spec_file import parse_spec
from capsule.image.cache import Cache
from capsule.machine.fingerprint import take_fingerprint
from capsule.native import native_part
from capsule.report.progress import SilentReporter
from tests.conftest import one_processor
from tests.hostile import genuine
from tests.locked_images import locked_image
from tests.training.warm_start import SERVERS_OF_THIS_PROCESS

PACKAGE = Path(capsule.__file__).parent
NATIVE = str(PACKAGE / "native" / "lib").removeprefix("/")
CARTPOLE = {
    "name": "cartpole",
    "image": {"packages": []},
    "environment": {
        "suite": "gymnasium",
        "id": "capsule-tests/CartPole-v0",
        "modules": ["tests.verification.physics"],
    },
    "trainer": {
        "algorithm": "dqn",
        "network": "mlp",
        "hidden_units": 32,
        "total_steps": 400,
        "replay_capacity": 400,
        "replay_start": 200,
        "target_interval": 40,
        "exploration_initial": 0.4,
        "exploration_steps": 100,
    },
    "evaluation": {
        "interval": 400,
        "starts": 2,
        "candidates": 4,
        "shortlist": 3,
        "min_actions": 0,
        "max_actions": 5,
        "max_minutes": 0.01,
    },
    "recording": {"trace_interval": 40, "tensor_interval": 80, "checkpoint_interval": 200},
}
IMPALA = {
    **CARTPOLE,
    "name": "impala",
    "trainer": {
        "algorithm": "impala",
        "network": "mlp",
        "recurrent_units": 8,
        "hidden_units": 16,
        "total_steps": 120,
        "actors": 4,
        "unroll_length": 10,
        "batch_size": 4,
        "micro_batches": [2, 2],
        "schedule": {"mode": "recorded", "policy_lag": 3},
    },
    "evaluation": {**CARTPOLE["evaluation"], "interval": 120},
    "recording": {"trace_interval": 40, "tensor_interval": 120, "checkpoint_interval": 120},
}


def merged(document, changes):
    """Return a document with nested changes."""
    result = dict(document)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if nested else value
    return result


def make_lock(document, code="code", wheels=None):
    """Lock a spec for packages that nobody will install."""
    locked = tuple(
        LockedWheel(
            name=name,
            version=version,
            filename=f"{name}-{version}-py3-none-any.whl",
            sha256=sha256_hex(f"{name} {version}".encode()),
            requested=name,
        )
        for name, version in sorted((wheels or {}).items())
    )
    return Lock(
        spec=parse_spec(json.dumps(document).encode(), "test"),
        image=locked_image(
            sha256_hex(code.encode()),
            capsule.__version__,
            recipe_sha256=sha256_hex(b"recipe"),
            wheels=locked,
        ),
    )


@dataclass(frozen=True)
class Machine:
    """Executes tasks with the packages of the tests (an engine), maybe in its own way.

    Runs have one processor: small ones are faster without processes of their own for actors. Those
    of the usual packages and variables are forked from a process that has imported torch.

    Attributes:
        path: Folder with ``capsule`` and the tests' modules.
        variables: What only this machine has set.
        forks: Whether such runs are forked. Each run has a new interpreter otherwise.
    """

    path: str = str(PACKAGE.parent)
    variables: dict[str, str] = field(default_factory=dict)
    forks: bool = True
    name: str = "process"

    def describe(self):
        return {"name": self.name, "version": capsule.__version__}

    def check(self, _lock):
        pass

    def prepare(self, *_arguments, **_options):
        pass

    def run(self, task, on_poll=lambda: None):
        command = replace(task, native=NATIVE).command(
            run_directory=str(task.run_directory), prefix=""
        )
        variables = {
            **task.environment,
            **self.variables,
            "PATH": f"{Path(sys.executable).parent}:{os.defpath}",
            "PYTHONPATH": f"{self.path}:{PACKAGE.parent}",
        }
        with (task.run_directory / contract.LOG).open("w") as log, one_processor():
            usual = self.path == str(PACKAGE.parent) and not self.variables
            if self.forks and usual and "capsule.training" in command:
                shim = {"LD_PRELOAD": str(native_part("libcapsule-math.so"))}
                run = SERVERS_OF_THIS_PROCESS.start(task.run_directory, variables | shim, {})
                log.write(run.communicate()[1])
                log.flush()
                # The launcher, which sets the shim, reports on a program that ends as the run did.
                launcher = command[: command.index("--") + 1]
                command = [*launcher, "sh", "-c", f"exit {run.returncode}"]
            words = [sys.executable if word == "python3.11" else word for word in command]
            done = subprocess.run(words, env=variables, stdout=log, stderr=subprocess.STDOUT)
        on_poll()
        return Exit(done.returncode, "exited")


@dataclass(frozen=True)
class Finished:
    """A finished run: a folder as ``capsule run`` makes it."""

    folder: Path
    lock: Lock
    machine: Machine

    @property
    def directory(self):
        return self.folder / WORK

    def copy(self, folder):
        shutil.copytree(self.folder, folder)
        return replace(self, folder=folder)


def train(folder, lock, machine=None, schedule=None):
    """Run a locked experiment to its end, maybe by a schedule that was recorded."""
    folder.mkdir(parents=True)
    (folder / LOCK).write_bytes(lock.document() + b"\n")
    machine = machine or Machine()
    reporter = SilentReporter()
    options = execution.ExecutionOptions(schedule=schedule)
    execution.execute(lock, machine, folder / WORK, options, reporter=reporter)
    return Finished(folder, lock, machine)


@pytest.fixture(scope="session")
def honest(tmp_path_factory):
    """A DQN run in a new interpreter, not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "honest"
    return replace(train(folder, make_lock(CARTPOLE), Machine(forks=False)), machine=Machine())


@pytest.fixture(scope="session")
def other_numerics(tmp_path_factory):
    """The same run under another numerics profile."""
    portable = {"accelerator": {"kind": "cpu", "numerics": "portable-v2"}}
    lock = make_lock(merged(CARTPOLE, portable))
    return train(tmp_path_factory.mktemp("runs") / "numerics", lock)


@pytest.fixture(scope="session")
def patched(tmp_path_factory):
    """The same run by a package with another constant in the optimizer's update."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(PACKAGE, folder / "capsule", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "capsule" / "training" / "optimizers" / "centred_rmsprop.py"
    before = "self._floor = min_squared_gradient"
    path.write_text(path.read_text().replace(before, f"{before} * 1.5"))
    lock = make_lock(CARTPOLE, code="another")
    return train(folder / "patched", lock, Machine(path=str(folder)))


@pytest.fixture(scope="session")
def key(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "alice"
    generate(path)
    return path


@pytest.fixture(scope="session")
def honest_bundle(honest, key, tmp_path_factory):
    return bundled(honest, key, tmp_path_factory.mktemp("bundles"))


def bundled(run, key, folder):
    """Pack and sign a finished run."""
    finished = FinishedRun(
        lock=run.lock,
        image=None,
        engine=run.machine.describe(),
        fingerprint=take_fingerprint(run.machine.describe()),
        started=datetime.now(UTC),
        directory=run.directory,
    )
    return pack_run(
        finished, load_private(key), folder, Cache(folder / "cache"), embed_image=False
    )[0]


def forged(bundle, key, change, destination):
    """Repack a bundle with changed files, signed with the same key: a lie that looks like it."""
    return genuine.forged(bundle, Path(f"{key}.pub"), Path(key), change, destination)
