"""Truncation is not termination: trainers learn values that reach beyond a time limit.

Every step pays 1, and only a limit of 2 steps ends an episode. So the value of every state is that
of the geometric series, ``1 / (1 - gamma)``, which is 3.3; if the return ended at the limit, no
state would have more than 1.7.
"""

import numpy as np
import pytest
import torch

from capsule.experiment import contract
from capsule.training.environments import Environment, make_environment
from capsule.training.networks.recurrent import Sequences
from capsule.training.registry import make_trainer
from capsule.training.state.streams import make_streams
from capsule.training.state.trace import Trace
from capsule.training.trainer import TrainerContext
from tests.training.conftest import CARTPOLE, make_spec
from tests.training.environments import endless_tasks

pytestmark = pytest.mark.usefixtures("deterministic")

DISCOUNT = 0.7
ENDLESS = 1 / (1 - DISCOUNT)
FINITE = 1 + DISCOUNT  # at the first of 2 steps, and less at the other
GYMNASIUM = {"suite": "gymnasium", "id": endless_tasks.NAME, "modules": [endless_tasks.__name__]}
ENVIRONMENTS = {
    "numbers": {**GYMNASIUM, "observation": "number"},
    "images": {**GYMNASIUM, "observation": "image", "frames": "image", "frame_stack": 2},
    "minatar": {"suite": "minatar", "game": "freeway", "max_episode_steps": endless_tasks.STEPS},
    "atari": {
        "suite": "atari",
        "game": "pong",
        "noop_max": 0,
        "max_episode_frames": 4 * endless_tasks.STEPS,
    },
}
NETWORKS = {
    "numbers": "mlp",
    "images": "small-conv",
    "minatar": "small-conv",
    "atari": "shallow",
}
TRAINERS = {
    "dqn": {
        "learning_rate": 0.003,
        "min_squared_gradient": 0.0001,
        "batch_size": 8,
        "micro_batches": [8],
        "replay_capacity": 100,
        "replay_start": 20,
        "target_interval": 40,
    },
    "r2d2": {
        "recurrent_units": 8,
        "actors": 2,
        "update_interval": 2,
        "actor_update_interval": 2,
        "burn_in": 1,
        "sequence_length": 4,
        "sequence_stride": 2,
        "n_step": 2,
        "rescaling_epsilon": None,
        "replay_capacity": 200,
        "replay_start": 40,
        "batch_size": 4,
        "micro_batches": [4],
        "target_interval": 10,
        "learning_rate": 0.01,
    },
    "impala": {
        "actors": 2,
        "unroll_length": 4,
        "batch_size": 2,
        "micro_batches": [2],
        "learning_rate": 0.01,
        "annealing": False,
        "rmsprop_epsilon": 0.0001,
    },
}
STEPS = {"dqn": 800, "r2d2": 400, "impala": 400}


@pytest.fixture
def endless(monkeypatch):
    """Have every step pay 1, and games not end but by their limit."""
    step = Environment.step

    def paid(environment, action):
        transition = step(environment, action)
        assert not transition.terminal
        return transition._replace(reward=1.0, game_reward=1.0)

    monkeypatch.setattr(Environment, "step", paid)


@pytest.fixture
def trained(tmp_path, endless):
    """A function that trains; returns the trainer and the first observation of an episode."""
    opened = []

    def train(algorithm, name, **changes):
        document = {
            **CARTPOLE,
            "environment": ENVIRONMENTS[name],
            "accelerator": {"kind": "cpu", "numerics": "native"},
            "trainer": {
                "algorithm": algorithm,
                "network": NETWORKS[name],
                "hidden_units": 8,
                "discount": DISCOUNT,
                "total_steps": 8_000,
                **TRAINERS[algorithm],
                **changes,
            },
            "evaluation": {"interval": 8_000},
            "recording": {
                "trace_interval": 8_000,
                "tensor_interval": 8_000,
                "checkpoint_interval": 8_000,
            },
        }
        spec = make_spec(document).training()
        trace, streams = Trace(tmp_path / contract.TRACE), make_streams(spec.seeds)
        trace.restore(None)
        context = TrainerContext(tmp_path, spec, spec.seeds, streams, trace, torch.device("cpu"), 1)
        opened.extend((trace, make_trainer(context)))
        while opened[-1].step < STEPS[algorithm]:
            opened[-1].train_step()
        example = make_environment(spec.environment, make_streams(spec.seeds), training=True)
        stack = np.zeros((example.frame_stack, *example.frame_shape), example.frame_dtype)
        stack[-1] = example.reset()
        return opened[-1], torch.from_numpy(stack)

    yield train
    for each in reversed(opened):
        each.close()


def value_of(trainer, observation):
    """Return the value that the network gives to the first observation of an episode."""
    network, parameters = trainer.network, trainer.online.views
    with torch.no_grad():
        if not hasattr(network, "unroll"):
            return network.values(parameters, observation[None]).max().item()
        none, reward = torch.full((1, 1), -1), torch.zeros(1, 1)
        states, begins = torch.zeros(1, *network.state_shape), torch.ones(1, 1, dtype=torch.bool)
        inputs = observation[None, None], none, reward, states, begins
        found = network.unroll(parameters, Sequences(*inputs))
    return found[0].max().item() if len(found) == 2 else found[1].item()


EVERY_TRAINER = [(algorithm, "numbers") for algorithm in TRAINERS]
EVERY_SUITE = [("impala", "images"), ("impala", "minatar"), ("impala", "atari"), ("dqn", "minatar")]


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "name"), EVERY_TRAINER + EVERY_SUITE)
def test_a_time_limit_is_no_end_of_the_return(trained, algorithm, name):
    slower = {"learning_rate": 0.003} if name == "atari" else {}
    value = value_of(*trained(algorithm, name, **slower))
    assert value == pytest.approx(ENDLESS, abs=0.8)


@pytest.mark.slow
def test_impala_can_take_a_time_limit_for_the_end_as_its_authors_code_does(trained):
    value = value_of(*trained("impala", "numbers", truncation="terminal"))
    assert 1 < value < FINITE
