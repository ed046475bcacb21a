"""IMPALA's trainer on a small task, and what its tests share."""

import itertools
import os

import pytest
import torch

from capsule.experiment import contract
from capsule.experiment.errors import CapsuleError
from capsule.training.registry import make_trainer
from capsule.training.state.streams import make_streams
from capsule.training.state.trace import Trace
from capsule.training.trainer import TrainerContext
from tests.training.conftest import CARTPOLE, make_spec

TASK = {
    "schema": "capsule/spec/v1",
    "name": "impala-cartpole",
    "environment": {"suite": "gymnasium", "id": "CartPole-v1", "max_episode_steps": 60},
    "trainer": {
        "algorithm": "impala",
        "network": "mlp",
        "hidden_units": 9,
        "recurrent_units": 7,
        "actors": 6,
        "unroll_length": 5,
        "batch_size": 4,
        "micro_batches": [3, 1],
        "discount": 0.97,
        "learning_rate": 0.01,
        "total_steps": 600,
    },
    "evaluation": {**CARTPOLE["evaluation"], "interval": 600},
    "recording": {"trace_interval": 60, "tensor_interval": 300, "checkpoint_interval": 100},
}


@pytest.fixture
def make(tmp_path):
    """A function that builds a learner in a run directory, which may have a log to follow."""
    learners, numbers = [], itertools.count()

    def build(document=TASK, workers=1, replay=None, **changes):
        # Without the environment that a run starts in, only 'native' keeps its promises.
        changes = {"accelerator": {"kind": "cpu", "numerics": "native"}} | changes
        spec = make_spec(document, **changes).training()
        directory = tmp_path / str(next(numbers))
        state = directory / contract.STATE
        state.mkdir(parents=True)
        if replay is not None:
            (directory / contract.SCHEDULE_REPLAY).write_bytes(replay)
        trace, streams = Trace(directory / contract.TRACE), make_streams(spec.seeds)
        trace.restore(None)
        device = torch.device("cpu")
        try:
            learner = make_trainer(
                TrainerContext(state, spec, spec.seeds, streams, trace, device, workers)
            )
        except CapsuleError:
            trace.close()
            raise
        learner.streams, learner.trace, learner.directory = streams, trace, directory
        learners.append(learner)
        return learner

    yield build
    for learner in learners:
        learner.close()
        learner.trace.close()


@pytest.fixture
def one_core():
    """Have children run on one core, and so in one process."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)
