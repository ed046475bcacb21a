"""IMPALA's hyper-parameters: the defaults are the paper's, and what does not fit is refused."""

from array import array
from pathlib import Path

import pytest

from capsule.experiment.errors import CapsuleError
from capsule.experiment.schedule_log import ScheduleLog
from capsule.experiment.trainers import MAX_RECORDED_ACTORS, ImpalaTrainer
from capsule.host.spec_file import load_spec

SPECS = Path(__file__).parents[3] / "specs"


def load(*overrides):
    return load_spec(SPECS / "impala-breakout-small.yaml", list(overrides))


def refused(*overrides):
    with pytest.raises(CapsuleError) as caught:
        load(*[f"trainer.{text}" for text in overrides])
    return str(caught.value)


def test_the_defaults_are_those_of_table_g1():
    trainer = ImpalaTrainer(algorithm="impala")
    table = {
        "network": "shallow",
        "recurrent_units": 0,
        "unroll_length": 20,
        "batch_size": 32,
        "discount": 0.99,
        "baseline_cost": 0.5,
        "entropy_cost": 0.01,
        "learning_rate": 0.0006,
        "anneals": True,
        "rmsprop_momentum": 0.0,
        "rmsprop_epsilon": 0.01,
        "max_gradient_norm": 40.0,
        "reward_clipping": "unit",
        "correction": "v-trace",
        "rho_bar": 1.0,
        "c_bar": 1.0,
        "trace_decay": 1.0,
        "action_values": "targets",
    }
    assert {name: getattr(trainer, name) for name in table} == table
    assert trainer.total_steps == 200_000_000 / 4
    assert trainer.schedule.mode == "lockstep"


def test_an_interval_is_one_parameter_update():
    assert load().trainer.interval_steps == 8 * 20


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actors=7"], "actors 7 cannot fill a batch with 8 new unrolls: each has one in it"),
        (["actors=0"], "trainer.actors: must be greater than 0, not 0"),
        (
            ["actors=33"],
            "schedule.policy_lag 4 cannot be kept: 33 actors take turns in batches of 8, so",
        ),
        (["actors=33"], "it needs at least 5"),
        (
            ["schedule.policy_lag=1"],
            "schedule.policy_lag 1 cannot be kept: 16 actors take turns in batches of 8",
        ),
        (["schedule.policy_lag=0"], "trainer.schedule.policy_lag: must be greater than 0"),
        (
            ["schedule.policy_lag=65536"],
            "policy_lag: must be less than or equal to 65535, not 65536",
        ),
        (["schedule.policy_lag=1.5"], "policy_lag: must be a valid integer"),
        (
            ["schedule={mode: lockstep, policy_lag: -1}"],
            "policy_lag: must be greater than or equal to 0",
        ),
        (["schedule.mode=free"], "must be one of 'lockstep', 'recorded'"),
        (["schedule={lag: 3}"], "trainer.schedule"),
        (["schedule.delay=3"], "trainer.schedule.delay is not a known key"),
        (
            ["actors=65537", "schedule.policy_lag=9000"],
            "actors 65537 exceeds the 65536 of a recorded schedule",
        ),
        (
            ["total_steps=671091200", "schedule.policy_lag=9000"],
            "total_steps / unroll_length 33554560 exceeds the 33554432 of a recorded schedule",
        ),
        (["batch_size=9"], "micro_batches [4, 4] add up to 8, not to batch_size 9"),
        (["micro_batches=[8, 0]"], "micro_batches.1: must be greater than 0"),
        (["micro_batches=[]"], "micro_batches [] add up to 0, not to batch_size 8"),
        (
            ["total_steps=16001"],
            "total_steps 16001 is not a multiple of the 8 new unrolls of a batch times unroll_",
        ),
        (["unroll_length=0"], "trainer.unroll_length: must be greater than 0"),
        (
            ["unroll_length=21"],
            "total_steps 16000 is not a multiple of the 8 new unrolls of a batch times unroll_",
        ),
        (["c_bar=2"], "c_bar 2.0 exceeds rho_bar 1.0 (section 4.1)"),
        (["rho_bar=0"], "trainer.rho_bar: must be greater than 0"),
        (["rho_bar=.inf"], "trainer.rho_bar"),
        (["learning_rate=.nan"], "trainer.learning_rate"),
        (["max_gradient_norm=.inf"], "trainer.max_gradient_norm"),
        (["trace_decay=1.5"], "trainer.trace_decay: must be less than or equal to 1"),
        (["discount=-0.1"], "trainer.discount: must be greater than or equal to 0"),
        (["correction=retrace"], "trainer.correction: must be 'v-trace', 'one-step', "),
        (["correction_epsilon=0"], "trainer.correction_epsilon: must be greater than 0"),
        (["reward_clipping=sign"], "trainer.reward_clipping: must be 'unit', 'asymmetric'"),
        (["baseline_cost=-1"], "trainer.baseline_cost: must be greater than or equal to 0"),
        (["entropy_cost=-1"], "trainer.entropy_cost: must be greater than or equal to 0"),
        (["rmsprop_epsilon=0"], "trainer.rmsprop_epsilon: must be greater than 0"),
        (["rmsprop_decay=2"], "trainer.rmsprop_decay: must be less than or equal to 1"),
        (["max_gradient_norm=0"], "trainer.max_gradient_norm: must be greater than 0"),
        (["recurrent_units=-1"], "trainer.recurrent_units: must be greater than or equal"),
        (["hidden_units=0"], "trainer.hidden_units: must be greater than 0"),
        (["network=deep"], "trainer.network: must be 'shallow', 'nature', 'residual', "),
        (["action_values=v"], "trainer.action_values: must be 'targets' or 'baseline'"),
        (["replay_capacity=100"], "trainer.replay_capacity is not a known key"),
        (["algorithm=impalla"], "must be one of 'dqn', 'r2d2', 'impala'"),
    ],
)
def test_what_does_not_fit_is_refused_and_named(overrides, message):
    assert message in refused(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["actors=8"],
        ["actors=32"],
        ["schedule.policy_lag=65535"],
        ["schedule={mode: lockstep}"],
        ["schedule={mode: lockstep, policy_lag: 0}"],
        ["schedule={mode: lockstep, policy_lag: 0}", "actors=70000"],  # nothing is recorded
        ["micro_batches=[1, 6, 1]"],
        ["rho_bar=4", "c_bar=2"],
        ["max_gradient_norm=null"],
        ["network=residual", "recurrent_units=256"],
    ],
)
def test_what_fits_is_taken(overrides):
    assert isinstance(load(*[f"trainer.{text}" for text in overrides]).trainer, ImpalaTrainer)


def test_a_log_has_room_for_what_the_spec_lets_pass():
    spec = load("trainer.actors=65536", "trainer.schedule.policy_lag=8192")
    log = ScheduleLog(spec.digest(), spec.trainer.actors, 8, array("H"), array("H"))
    assert log.header.actors == MAX_RECORDED_ACTORS
