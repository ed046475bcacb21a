"""IMPALA's trainer on a small task, and what its tests share."""

import pytest

from tests.training.conftest import CARTPOLE

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
def make(open_trainer):
    """A function that makes a trainer of the small task, or of another one."""
    return lambda document=TASK, *arguments, **options: open_trainer(
        document, *arguments, **options
    )
