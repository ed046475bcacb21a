"""R2D2's hyper-parameters: the defaults make sense together, and what does not is refused."""

from pathlib import Path

import pytest

from capsule.experiment.errors import CapsuleError
from capsule.host.spec_file import load_spec

SPECS = Path(__file__).parents[3] / "specs"


def refused(*overrides):
    with pytest.raises(CapsuleError) as caught:
        load_spec(SPECS / "r2d2-breakout-small.yaml", [f"trainer.{text}" for text in overrides])
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["burn_in=21"], "trainer.burn_in 21 exceeds sequence_length 20"),
        (["n_step=21"], "trainer.n_step 21 exceeds sequence_length 20"),
        (["sequence_stride=7"], "sequence_length 20 is not a multiple of sequence_stride 7"),
        (["sequence_stride=40"], "sequence_length 20 is not a multiple of sequence_stride 40"),
        (["actors=0"], "trainer.actors: must be greater than 0, not 0"),
        (["burn_in=-1"], "trainer.burn_in: must be greater than or equal to 0"),
        (["batch_size=9"], "micro_batches [4, 4] add up to 8, not to batch_size 9"),
        (["total_steps=8001"], "total_steps 8001 is not a multiple of actors 8"),
        (["actor_update_interval=7"], "actor_update_interval 7 is not a multiple of"),
        (["replay_start=9000"], "replay_start 9000 exceeds replay_capacity 8000"),
        (["replay_start=200"], "gives each of 8 actors 25 steps, but a sequence needs 35"),
        (["recurrent_units=0"], "recurrent_state 'stored' requires an LSTM"),
        (["burn_inn=3"], "trainer.burn_inn is not a known key"),
        (["algorithm=r2d3"], "must be one of 'dqn', 'r2d2', 'impala'"),
    ],
)
def test_what_does_not_fit_is_refused_and_named(overrides, message):
    assert message in refused(*overrides)
