"""Runs of the training side that share one start of the interpreter: each is a fork of it.

A process per segment would spend its time on importing torch. The parent has imported everything,
has computed nothing and has one thread, so that a child is where a new process would be.
"""

import json
import os
import subprocess
import sys

from capsule.experiment import contract
from capsule.experiment.contract import Failure, Job
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.lock import Lock
from capsule.experiment.spec import Spec
from tests.bundle.locks import make_lock
from tests.training.conftest import CARTPOLE, ROOT, make_spec, merge, start_variables

FAILED = ExitCode.TRAINING_FAILED
_SERVER = """\
import os, secrets, sys, traceback
from pathlib import Path
import gymnasium.envs.classic_control, safetensors.numpy, torch, torch._inductor.config
from capsule.experiment.errors import CapsuleError
import capsule.training.impala.factory, capsule.training.r2d2.factory
import capsule.training.dqn.learner, capsule.training.evaluation.protocol
from capsule.training import lifecycle
# On one processor actors play in the learner's process.
os.sched_setaffinity(0, {secrets.choice([*os.sched_getaffinity(0)])})
lifecycle.flags.prepare = lambda spec: None  # it refuses where torch is imported already
for line in sys.stdin:
    if not (child := os.fork()):
        try:
            lifecycle.run(Path(line.strip()))
        except CapsuleError:
            pass  # it left the reason
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.waitpid(child, 0)
    print(flush=True)
"""


class Forks:
    """The parent."""

    def __init__(self):
        base = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        variables = {**base, "PYTHONPATH": str(ROOT), **start_variables(make_spec(CARTPOLE))}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def train(self, directory, job):
        """Do a job in a run directory.

        Raises:
            CapsuleError: As the run left it, or CAP-E010 if it left nothing.
        """
        (directory / contract.JOB).write_bytes(job.document())
        self._process.stdin.write(f"{directory}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "\n"
        if (directory / contract.FAILURE).exists():
            failure = Failure.model_validate_json((directory / contract.FAILURE).read_bytes())
            raise CapsuleError(failure.code, failure.message, fix="")
        if not (directory / contract.RESULT).exists():
            raise CapsuleError("CAP-E010", "no result", fix="")
        return directory

    def execute(self, lock, directory, *, stop_after, schedule):
        """Do what :func:`capsule.execution.execute` does for a segment, without an engine."""
        directory.mkdir(exist_ok=True)
        if schedule is not None:
            (directory / contract.SCHEDULE_REPLAY).write_bytes(schedule.read_bytes())
        self.train(directory, Job(spec=lock.spec, stop_after=stop_after, segment=True))

    def close(self):
        """End the parent."""
        self._process.communicate()


def lock_of(spec: Spec) -> Lock:
    """Return a lock of an image that was never made."""
    return make_lock().model_copy(update={"spec": spec})


_KEPT = {"recording": {"segment_states": True}}
DQN = merge(
    CARTPOLE,
    merge(_KEPT, {"trainer": {"total_steps": 1_000, "replay_start": 160}}),
)
R2D2 = merge(
    DQN,
    {
        "name": "r2d2",
        "recording": {"trace_interval": 30, "tensor_interval": 300, "checkpoint_interval": 300},
        "evaluation": {"interval": 900},
    },
)
R2D2["trainer"] = {
    "algorithm": "r2d2",
    "network": "mlp",
    "recurrent_units": 8,
    "hidden_units": 8,
    "actors": 3,
    "update_interval": 10,
    "actor_update_interval": 20,
    "burn_in": 4,
    "sequence_length": 8,
    "sequence_stride": 4,
    "replay_capacity": 450,
    "replay_start": 150,
    "batch_size": 8,
    "micro_batches": [5, 3],
    "target_interval": 7,
    "total_steps": 900,
}
IMPALA = merge(DQN, {"name": "impala", "evaluation": {"interval": 480}})
IMPALA["recording"] = {
    "trace_interval": 40,
    "tensor_interval": 120,
    "checkpoint_interval": 160,
    "segment_states": True,
}
IMPALA["trainer"] = {
    "algorithm": "impala",
    "network": "mlp",
    "recurrent_units": 8,
    "hidden_units": 8,
    "actors": 6,
    "unroll_length": 5,
    "batch_size": 4,
    "micro_batches": [3, 1],
    "replay": {"capacity": 12, "unrolls": 2},
    "total_steps": 480,
}
LIVE = merge(
    IMPALA, {"name": "live", "trainer": {"schedule": {"mode": "recorded", "policy_lag": 3}}}
)
POPULATION = merge(
    IMPALA,
    {
        "name": "population",
        "trainer": {
            "population": {
                "members": 2,
                "burn_in": 80,
                "episodes": 1,
                "references": {"CartPole-v1": {"random": 9.0, "human": 60.0}},
            }
        },
    },
)
SPECS = {"dqn": DQN, "r2d2": R2D2, "impala": IMPALA, "live": LIVE, "population": POPULATION}


def spec_of(name: str, **changes: object) -> Spec:
    """Return one of the small specs, with changes."""
    return Spec.model_validate_json(json.dumps(merge(SPECS[name], changes)))
