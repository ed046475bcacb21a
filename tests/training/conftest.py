"""Real runs of the training side: small specs, in this process and in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from capsule.experiment import contract
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.contract import Job
from capsule.experiment.spec import Spec
from capsule.experiment.variables import environment_variables
from capsule.native import native_part

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


def start_run(directory, *, environment=None, **options):
    """Start ``python -m capsule.training`` as an engine does."""
    variables = environment
    if variables is None:
        job = Job.model_validate_json((directory / contract.JOB).read_bytes())
        variables = start_variables(job.spec)
    base = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    return subprocess.Popen(
        [sys.executable, "-m", "capsule.training", str(directory)],
        env={**base, "PYTHONPATH": str(ROOT), **variables},
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish_run(directory, **options):
    """Run to the end; return the exit status and what was said on standard error."""
    process = start_run(directory, **options)
    _, errors = process.communicate(timeout=300)
    return process.returncode, errors


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


@pytest.fixture(scope="session")
def cartpole_run(tmp_path_factory):
    """A finished CartPole run; not to be changed."""
    directory = new_run(tmp_path_factory.mktemp("runs") / "cartpole", make_spec(CARTPOLE))
    status, errors = finish_run(directory)
    assert status == 0, errors
    return directory
