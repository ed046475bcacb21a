"""The spec's section ``trainer.population``: appendix F's constants, and what is refused."""

import json

import pytest
from pydantic import ValidationError

from capsule.experiment.spec import Spec
from capsule.experiment.trainers import DRAWN_BY_MEMBERS, ImpalaTrainer, PopulationSpec
from capsule.training.impala.population import DMLAB_PRIORS

GIVEN = {"random": 20.0, "human": 400.0}
ATARI = {"suite": "atari", "game": "breakout"}
CARTPOLE = {"suite": "gymnasium", "id": "CartPole-v1"}
NETWORKS = {"atari": "shallow", "gymnasium": "mlp"}


def spec(environment=ATARI, population=None, **trainer):
    document = {
        "schema": "capsule/spec/v1",
        "name": "population",
        "environment": environment,
        "trainer": {
            "algorithm": "impala",
            "network": NETWORKS[environment["suite"]],
            "total_steps": 64_000,
            "population": population or {},
            **trainer,
        },
        "evaluation": {"interval": 6_400, "noop_max": 30},
        "recording": {
            "trace_interval": 640,
            "tensor_interval": 6_400,
            "checkpoint_interval": 6_400,
        },
    }
    return Spec.model_validate_json(json.dumps(document))


def refusal(*args, **changes):
    with pytest.raises(ValidationError) as caught:
        spec(*args, **changes)
    return str(caught.value)


def test_the_defaults_are_appendix_f_with_four_frames_to_a_step():
    rules = PopulationSpec()
    assert (rules.members, rules.episodes, rules.margin) == (24, 5_000, 0.05)
    assert (rules.probability, rules.factor) == (0.33, 1.2)
    assert rules.burn_in * 4 == 20_000_000  # frames
    assert ImpalaTrainer(algorithm="impala").population is None
    assert set(DRAWN_BY_MEMBERS) == set(DMLAB_PRIORS)


@pytest.mark.parametrize(
    ("environment", "population", "message"),
    [
        (
            CARTPOLE,
            {"references": {"CartPole-v1": {"random": 3.0, "human": 3.0}}},
            "human 3.0 does not exceed random 3.0",
        ),
        (ATARI, {"members": 1}, "greater than or equal to 2"),
        (ATARI, {"members": 65}, "less than or equal to 64"),
        (ATARI, {"burn_in": -1}, "greater than or equal to 0"),
        (ATARI, {"episodes": 0}, "greater than 0"),
        (ATARI, {"margin": -0.1}, "greater than or equal to 0"),
        (ATARI, {"probability": 1.1}, "less than or equal to 1"),
        (ATARI, {"factor": 1.0}, "greater than 1"),
    ],
)
def test_what_does_not_fit_is_refused_and_named(environment, population, message):
    assert message in refusal(environment, population)


@pytest.mark.parametrize("name", DRAWN_BY_MEMBERS)
def test_values_that_members_draw_are_not_given(name):
    assert f"{name} 0.5 does not apply: each member of the population" in refusal(**{name: 0.5})


def test_a_recorded_schedule_is_refused():
    message = refusal(schedule={"mode": "recorded", "policy_lag": 8})
    assert "schedule.mode 'recorded' is not supported with a population" in message
