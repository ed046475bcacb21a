"""The spec's section ``trainer.population``: appendix F's constants, references, refusals."""

import json

import pytest
from pydantic import ValidationError

from capsule.experiment.contract import Ancestry, Generation
from capsule.experiment.spec import MAX_UNROLLS_OF_A_RECORD, Spec, references_of
from capsule.experiment.trainers import DRAWN_BY_MEMBERS, ImpalaTrainer, PopulationSpec
from capsule.training.impala.population import DMLAB_PRIORS

GIVEN = {"random": 20.0, "human": 400.0}
ATARI = {"suite": "atari", "game": "breakout"}
CARTPOLE = {"suite": "gymnasium", "id": "CartPole-v1"}
MINATAR = {"suite": "minatar", "game": "breakout"}
NETWORKS = {"atari": "shallow", "gymnasium": "mlp", "minatar": "small-conv"}


def spec(environment=ATARI, population=None, recording=None, **trainer):
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
            **(recording or {}),
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


def test_published_scores_are_taken_for_atari_in_the_order_of_the_tasks():
    environment = ATARI | {"game": "pong", "further_games": ["boxing", "alien", "enduro"]}
    given = spec(environment | {"full_action_set": True})
    found = references_of(given.environment, given.trainer.population)
    assert list(found) == ["pong", "boxing", "alien", "enduro"]
    assert (found["pong"].random, found["pong"].human) == (-20.7, 14.6)


def test_a_gymnasium_id_of_an_atari_game_has_published_scores():
    environment = {"suite": "gymnasium", "id": "ALE/Pong-v5"}
    assert references_of(spec(environment).environment, PopulationSpec())["ALE/Pong-v5"].human > 0


@pytest.mark.parametrize(
    ("environment", "name"), [(CARTPOLE, "CartPole-v1"), (MINATAR, "breakout")]
)
def test_other_tasks_need_references_and_take_them(environment, name):
    """MinAtar's games count otherwise than the Atari games they are called after."""
    assert f"trainer.population.references lacks '{name}'" in refusal(environment)
    given = spec(environment, {"references": {name: GIVEN}})
    found = references_of(given.environment, given.trainer.population)[name]
    assert (found.random, found.human) == (20.0, 400.0)


@pytest.mark.parametrize(
    ("environment", "population", "message"),
    [
        (ATARI, {"references": {"breakout": GIVEN}}, "'breakout' has published scores; remove it"),
        (ATARI, {"references": {"pong": GIVEN}}, "'pong' is not one of the tasks breakout"),
        (CARTPOLE, {"references": {"CartPole-v0": GIVEN}}, "'CartPole-v0' is not one of the tasks"),
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


def test_a_trace_record_has_room_for_the_unrolls_of_all_members():
    fits = {"members": 64}
    room = MAX_UNROLLS_OF_A_RECORD // 64 * 20 // 640 * 640
    rest = {"tensor_interval": room, "checkpoint_interval": room}
    spec(population=fits, recording=rest | {"trace_interval": room})
    rest = {"tensor_interval": room + 640, "checkpoint_interval": room}
    message = refusal(population=fits, recording=rest | {"trace_interval": room + 640})
    assert f"at most {MAX_UNROLLS_OF_A_RECORD}" in message


def test_an_ancestry_is_read_back():
    generation = Generation(
        number=0, member=0, parent=None, step=0, parent_step=None,
        hyperparameters={"learning_rate": (0.1).hex()}, score=None, rival=None,
        rival_score=None, copied=False,
    )  # fmt: skip
    assert generation.name == "generation 0, member 0"
    ancestry = Ancestry(generations=(generation,))
    assert Ancestry.model_validate_json(ancestry.model_dump_json(by_alias=True)) == ancestry
