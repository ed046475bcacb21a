"""Real runs of the training side: small specs, in this process and in processes of their own."""

import itertools
import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from capsule.experiment import contract
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.contract import Job
from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import Spec
from capsule.experiment.variables import environment_variables
from capsule.native import native_part
from tests.conftest import one_processor
from tests.training.warm_start import SERVERS_OF_THIS_PROCESS

ROOT = Path(__file__).parents[2]


def merge(document, changes):
    """Return ``document`` with nested ``changes`` applied."""
    result = dict(document)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merge(result[key], value) if nested else value
    return result


CARTPOLE = {
    "schema": "capsule/spec/v1",
    "name": "cartpole",
    "environment": {"suite": "gymnasium", "id": "CartPole-v1"},
    "trainer": {
        "algorithm": "dqn",
        "network": "mlp",
        "hidden_units": 32,
        "total_steps": 1_600,
        "replay_capacity": 600,
        "replay_start": 200,
        "target_interval": 100,
        "exploration_steps": 600,
    },
    "evaluation": {
        "interval": 800,
        "starts": 3,
        "candidates": 6,
        "shortlist": 4,
        "min_actions": 0,
        "max_actions": 5,
        "max_minutes": 0.02,
    },
    "recording": {"trace_interval": 8, "tensor_interval": 80, "checkpoint_interval": 400},
}
BREAKOUT = merge(
    CARTPOLE,
    {
        "name": "breakout",
        "environment": {"suite": "atari", "game": "breakout"},
        "trainer": {
            "network": "nature",
            "hidden_units": 64,
            "total_steps": 240,
            "replay_capacity": 150,
            "replay_start": 120,
            "target_interval": 40,
            "micro_batches": [20, 12],
        },
        "evaluation": {"interval": 120, "max_minutes": 0.01},
        "recording": {"trace_interval": 4, "tensor_interval": 40, "checkpoint_interval": 60},
    },
)
BREAKOUT["environment"].pop("id")
# The section ``accelerator`` for the GPU of this machine, whatever it is.
ANY_GPU = {"kind": "cuda", "cuda": ">=12", "cudnn": ">=9", "driver": ">=1"}


def make_spec(document, **changes):
    """Build a spec from a document and nested changes."""
    return Spec.model_validate_json(json.dumps(merge(document, changes)))


def new_run(directory, spec, stop_after=None, tree=None):
    """Make a run directory that holds a job."""
    directory.mkdir(parents=True)
    job = Job(spec=spec, stop_after=stop_after, tree=tree or {})
    (directory / contract.JOB).write_bytes(job.document())
    return directory


def tree_facts(folder):
    """Return what a lock says of a source tree of regular files."""
    files = {path for path in folder.rglob("*") if path.is_file()}
    return {
        path.relative_to(
            folder
        ).as_posix(): f"file {'0755' if path.stat().st_mode & 0o100 else '0644'} "
        f"{sha256_hex(path.read_bytes())}"
        for path in files
    }


def start_variables(spec):
    """Return what the launcher sets: the spec's variables and the maths shim."""
    shim = {"LD_PRELOAD": str(native_part("libcapsule-math.so"))}
    return environment_variables(spec) | shim


def start_run(
    directory, *, environment=None, added=None, warm=None, interpreter=(sys.executable,), **options
):
    """Start ``python -m capsule.training`` as an engine does.

    A run that is started warm begins in a process in which torch is imported already, see
    :mod:`tests.training.warm_start`: by default that of a spec's own variables. What other runs are
    compared with is started as an engine starts it.

    Args:
        directory: Of the run.
        environment: Its variables; None: those of its spec.
        added: Further variables, which one that is started warm sets itself.
        warm: Whether it is started warm.
        interpreter: The command that starts Python in a run that is not started warm.
        options: Of ``subprocess.Popen``.
    """
    added = added or {}
    if warm is None:
        warm = environment is None and not options
    variables = environment
    if variables is None:
        job = Job.model_validate_json((directory / contract.JOB).read_bytes())
        variables = start_variables(job.spec)
    base = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    variables = {**base, "PYTHONPATH": str(ROOT), **variables}
    if warm:
        return SERVERS_OF_THIS_PROCESS.start(directory, variables, added)
    return subprocess.Popen(
        [*interpreter, "-m", "capsule.training", str(directory)],
        env={**variables, **added},
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish_run(directory, **options):
    """Run to the end; return the exit status and what was said on standard error."""
    process = start_run(directory, **options)
    _, errors = process.communicate(timeout=1_000)
    return process.returncode, errors


def kill_when_traced(directory, size, **options):
    """Start a run and kill it with signal 9 once its trace has this many bytes."""
    process = start_run(directory, **options)
    trace = directory / contract.TRACE
    while process.poll() is None:
        if trace.exists() and trace.stat().st_size >= size:
            break
        time.sleep(0.005)  # each look asks another process whether the run goes on
    process.kill()
    process.communicate()


def read(directory, name):
    """Parse one JSON document of a run directory."""
    return json.loads((directory / name).read_text())


def claimed(directory):
    """Return what a re-execution must give again, byte for byte."""
    result = read(directory, contract.RESULT)
    result.pop("seconds")
    names = [contract.TRACE, contract.STREAMS, contract.CHECKPOINT_INDEX, contract.EVALUATION]
    checkpoints = sorted((directory / contract.CHECKPOINTS).iterdir())
    paths = [directory / name for name in names] + checkpoints
    return result, {path.name: path.read_bytes() for path in paths if path.exists()}


@pytest.fixture
def one_core():
    """See :func:`tests.conftest.one_processor`."""
    with one_processor():
        yield


@pytest.fixture
def no_tf32(monkeypatch):
    """Have cuDNN and cuBLAS multiply in float32, as runs do; cuDNN does not by default."""
    import torch

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.fixture
def warm_workers(monkeypatch):
    """Have trainers in this process fork their workers; see :mod:`tests.training.warm_workers`."""
    from tests.training.warm_workers import fork_workers

    fork_workers(monkeypatch)


@pytest.fixture(scope="session")
def cartpole_run(tmp_path_factory):
    """A finished CartPole run; not to be changed."""
    directory = new_run(tmp_path_factory.mktemp("runs") / "cartpole", make_spec(CARTPOLE))
    status, errors = finish_run(directory, warm=False)
    assert status == 0, errors
    return directory


@pytest.fixture(scope="session")
def saved_run(tmp_path_factory):
    """A run directory that holds the state of step 400; not to be changed."""
    directory = new_run(tmp_path_factory.mktemp("saved") / "run", make_spec(CARTPOLE), 400)
    status, errors = finish_run(directory)
    assert status == 0, errors
    (directory / contract.RESULT).unlink()
    return directory


@contextmanager
def trainers_in(folder):
    """Yield a function that makes a trainer in a run directory, which may have a log to follow."""
    import torch

    from capsule.training.registry import make_trainer
    from capsule.training.state.streams import make_streams
    from capsule.training.state.trace import Trace
    from capsule.training.trainer import TrainerContext

    learners, numbers = [], itertools.count()

    def build(document, workers=1, device="cpu", replay=None, **changes):
        # Without the environment that a run starts in, only 'native' keeps its promises.
        changes = {"accelerator": {"kind": "cpu", "numerics": "native"}} | changes
        spec = make_spec(document, **changes).training()
        directory = folder / str(next(numbers))
        state = directory / contract.STATE
        state.mkdir(parents=True)
        if replay is not None:
            (directory / contract.SCHEDULE_REPLAY).write_bytes(replay)
        trace, streams = Trace(directory / contract.TRACE), make_streams(spec.seeds)
        trace.restore(None)
        place = torch.device(device)
        try:
            learner = make_trainer(
                TrainerContext(state, spec, spec.seeds, streams, trace, place, workers)
            )
        except CapsuleError:
            trace.close()
            raise
        learner.streams, learner.trace, learner.directory = streams, trace, directory
        learners.append(learner)
        return learner

    try:
        yield build
    finally:
        for learner in learners:
            learner.close()
            learner.trace.close()


@pytest.fixture
def open_trainer(tmp_path):
    """See :func:`trainers_in`."""
    with trainers_in(tmp_path) as build:
        yield build
