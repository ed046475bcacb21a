"""DQN's hyper-parameters: the defaults are the paper's, and what does not fit is rejected."""

import json

import pytest
from pydantic import ValidationError

from capsule.experiment.trainers import DqnTrainer

ADAM = {"optimizer": "adam"}


def trainer(**fields):
    return DqnTrainer.model_validate_json(json.dumps({"algorithm": "dqn", **fields}))


def refusal(**fields):
    with pytest.raises(ValidationError) as caught:
        trainer(**fields)
    return str(caught.value)


def test_the_defaults_are_those_of_extended_data_table_1():
    """Of Mnih et al. 2015. docs/papers/nagarajan2019.md has the interval of the target network."""
    table = {
        "batch_size": 32,
        "replay_capacity": 1_000_000,
        "discount": 0.99,
        "update_interval": 4,
        "learning_rate": 0.00025,
        "gradient_momentum": 0.95,
        "squared_gradient_momentum": 0.95,
        "min_squared_gradient": 0.01,
        "exploration_initial": 1.0,
        "exploration_final": 0.1,
        "exploration_steps": 1_000_000,
        "replay_start": 50_000,
    }
    found = trainer()
    assert {name: getattr(found, name) for name in table} == table


def test_the_defaults_of_adam_are_those_of_kingma_and_ba():
    assert (trainer(**ADAM).adam_epsilon, trainer(**ADAM).max_gradient_norm) == (1e-8, None)


@pytest.mark.parametrize("interval", [1, 4, 10])
def test_the_steps_between_updates_are_the_update_interval(interval):
    assert trainer(update_interval=interval).interval_steps == interval


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {**ADAM, "adam_epsilon": 1e-5, "max_gradient_norm": 10.0},
        {"optimizer": "centred-rmsprop", "gradient_momentum": 0.9},
        {"concurrent": False, "updates": 4},
        {"micro_batches": [32]},
        {"batch_size": 3, "micro_batches": [1, 1, 1]},
        {"network": {"dense": [64]}},
        {"network": {"module": "nets:make", "dense": [8]}},
        {"network": {"convolutions": [{"filters": 4, "kernel": 2}]}},
        {"replay_start": 8, "replay_capacity": 8, "batch_size": 8, "micro_batches": [8]},
        {"exploration_initial": 0.1, "exploration_final": 0.1},
        {"exploration_initial": 0.0, "exploration_final": 0.0},
        {"discount": 0.0},
        {"discount": 1.0},
    ],
)
def test_what_fits_is_accepted_and_read_back(fields):
    found = trainer(**fields)
    assert DqnTrainer.parse(found.document()) == found


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**ADAM, "gradient_momentum": 0.9}, "gradient_momentum 0.9 is not used by"),
        ({"adam_epsilon": 1e-5}, "adam_epsilon 1e-05 is not used by optimizer 'centred-rmsprop'"),
        (
            {"max_gradient_norm": 10.0},
            "max_gradient_norm 10.0 is not used by optimizer 'centred-rmsprop': remove it",
        ),
        (
            {**ADAM, "squared_gradient_momentum": 0.9},
            "squared_gradient_momentum 0.9 is not used by optimizer 'adam': remove it",
        ),
        (
            {**ADAM, "min_squared_gradient": 0.1},
            "min_squared_gradient 0.1 is not used by optimizer 'adam': remove it",
        ),
        ({"updates": 2}, "updates 2 requires concurrent: false, because only one minibatch"),
        ({"total_steps": 1_001}, "total_steps 1001 is not a multiple of update_interval 4"),
        ({"replay_start": 50_001}, "replay_start 50001 is not a multiple of update_interval 4"),
        ({"target_interval": 10_002}, "target_interval 10002 is not a multiple of update_interval"),
        ({"replay_capacity": 49_999}, "replay_start 50000 exceeds replay_capacity 49999"),
        ({"replay_start": 28}, "replay_start 28 is smaller than batch_size 32"),
        (
            {"exploration_initial": 0.05},
            "exploration_final 0.1 exceeds exploration_initial 0.05",
        ),
        ({"batch_size": 33}, "micro_batches [20, 12] add up to 32, not to batch_size 33"),
        ({"network": {"dense": [4]}, "hidden_units": 3}, "hidden_units 3 is not used by your own"),
        (
            {"network": {"module": "nets:make"}, "hidden_units": 3},
            "hidden_units 3 is not used by your own network",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_rejected(fields, message):
    assert message in refusal(**fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("total_steps", 0),
        ("total_steps", 1e6),
        ("network", "resnet"),
        ("network", "residual"),
        ("network", 3),
        ("hidden_units", 0),
        ("batch_size", 0),
        ("replay_capacity", 0),
        ("discount", -0.1),
        ("discount", 1.1),
        ("update_interval", 0),
        ("updates", 0),
        ("target_interval", 0),
        ("optimizer", "sgd"),
        ("learning_rate", 0.0),
        ("gradient_momentum", 1.5),
        ("min_squared_gradient", 0.0),
        ("adam_epsilon", -1e-8),
        ("max_gradient_norm", 0.0),
        ("exploration_final", 2.0),
        ("exploration_steps", 0),
        ("micro_batches", [32, 0]),
        ("concurrent", 1),
    ],
)
def test_a_value_out_of_range_is_rejected_by_its_field(name, value):
    assert f"\n{name}" in refusal(**{name: value})


def test_the_networks_are_named_where_another_one_is_asked_for():
    assert "Input should be 'nature', 'shallow', 'small-conv' or 'mlp'" in refusal(network="resnet")
