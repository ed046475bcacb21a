"""IMPALA's trainer on a small task, and what its tests share."""

import pytest

from capsule.experiment import contract
from capsule.experiment.errors import CapsuleError
from capsule.experiment.schedule_log import ScheduleLog
from tests.training.conftest import CARTPOLE, merge
from tests.training.impala import tasks as impala_tasks

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
COUNTING = merge(
    TASK,
    {
        "environment": {"id": impala_tasks.NAME, "modules": [impala_tasks.__name__]},
        "trainer": {"reward_clipping": "none", "total_steps": 400},
        "evaluation": {"interval": 400},
        "recording": {"trace_interval": 20, "tensor_interval": 100},
    },
)
LIVE = {"schedule": {"mode": "recorded", "policy_lag": 3}}


def train(learner, steps=None):
    while learner.step < (steps or learner._trainer.total_steps):
        learner.train_step()
    return learner


def log_of(learner):
    return learner.artifacts()[contract.SCHEDULE]


def refusal_of(make, replay, steps=None, **changes):
    with pytest.raises(CapsuleError) as refusal:
        train(make(COUNTING, replay=replay, **merge({"trainer": LIVE}, changes)), steps)
    return refusal.value


def edited(log, **changes):
    """Return a log with other fields, as a program makes it that knows the format."""
    return ScheduleLog(**{**vars(log), **changes}).document()


@pytest.fixture
def make(open_trainer):
    """A function that makes a trainer of the small task, or of another one."""
    return lambda document=TASK, *arguments, **options: open_trainer(
        document, *arguments, **options
    )
