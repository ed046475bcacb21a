"""IMPALA learns; the benchmark ``learning.py`` has more tasks, seeds and policy lags."""

import pytest
import torch

from capsule.training.registry import make_trainer
from capsule.training.state.streams import make_streams
from capsule.training.state.trace import Trace
from capsule.training.trainer import TrainerContext
from tests.training.conftest import make_spec

CARTPOLE = {
    "schema": "capsule/spec/v1",
    "name": "impala-cartpole",
    # Without the environment that a run starts in, only 'native' keeps its promises.
    "accelerator": {"kind": "cpu", "numerics": "native"},
    "environment": {"suite": "gymnasium", "id": "CartPole-v1"},
    "trainer": {
        "algorithm": "impala",
        "network": "mlp",
        "hidden_units": 64,
        "actors": 8,
        "batch_size": 8,
        "micro_batches": [8],
        "learning_rate": 0.005,
        "baseline_cost": 0.1,
        "total_steps": 48_000,
    },
    "evaluation": {"interval": 48_000},
    "recording": {
        "trace_interval": 16_000,
        "tensor_interval": 16_000,
        "checkpoint_interval": 16_000,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param({"mode": "lockstep", "policy_lag": 1}, marks=pytest.mark.soak),
        {"mode": "recorded", "policy_lag": 4},
    ],
)
def test_it_learns_cartpole(deterministic, tmp_path, schedule):
    """Seed 0: the last 100 of 48,000 steps' episodes average above 100; random play scores 22."""
    spec = make_spec(CARTPOLE, trainer={"schedule": schedule}).training()
    trace, streams = Trace(tmp_path / "trace"), make_streams(spec.seeds)
    trace.restore(None)
    device = torch.device("cpu")
    learner = make_trainer(
        TrainerContext(tmp_path, spec, spec.seeds, streams, trace, device, workers=1)
    )
    while learner.step < spec.trainer.total_steps:
        learner.train_step()
    learner.close()
    trace.close()
    assert learner.mean_return > 100
