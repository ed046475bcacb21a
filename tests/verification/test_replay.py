"""What of a bundle can be played again, before anything is executed."""

from types import SimpleNamespace

import pytest

from capsule.experiment.contract import (
    Evaluation,
    EvaluationPoint,
    StreamProfile,
    StreamProfiles,
)
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.spec import EntropySpec
from capsule.experiment.trainers import DqnTrainer
from capsule.verification.replay import _compare, _order

ONE, TWO = (1.0).hex(), (2.0).hex()
STREAM = StreamProfile(name="evaluation", seed=7, key="0", draws=0, digest="0" * 64)


def recorded(returns=(ONE, TWO, TWO), lengths=(3, 4, 5), streams=(STREAM,), points=1):
    """Return a run with as much of a bundle as is read for an order."""
    point = EvaluationPoint(step=8, returns=returns, lengths=lengths)
    documents = {
        Evaluation: Evaluation(starts=((0,),) * 3, points=(point,) * points),
        StreamProfiles: StreamProfiles(streams=streams),
    }
    trainer = DqnTrainer(algorithm="dqn", network="mlp")
    return SimpleNamespace(
        lock=SimpleNamespace(spec=SimpleNamespace(trainer=trainer)),
        bundle=SimpleNamespace(read=lambda _, model: documents[model]),
    )


def test_the_first_of_the_best_episodes_is_played():
    point, order = _order(recorded(), None)
    assert (order.seed, order.step, order.episode) == (7, 8, 1)
    assert point.lengths[order.episode] == 4


@pytest.mark.parametrize(
    "run",
    [
        recorded(points=0),
        recorded(returns=(), lengths=()),
        recorded(lengths=(3,)),
        recorded(returns=("0x1p+99999", ONE, ONE)),
        recorded(streams=()),
    ],
)
def test_an_evaluation_that_cannot_be_played_is_refused(run):
    with pytest.raises(CapsuleError) as caught:
        _order(run, None)
    assert (caught.value.code, caught.value.exit_code) == ("CAP-V090", ExitCode.USAGE)


def test_an_episode_that_was_not_played_is_refused():
    with pytest.raises(CapsuleError, match="--episode 3: the evaluation has 3 episodes"):
        _order(recorded(), 3)


@pytest.mark.parametrize(
    ("mode", "code", "status"),
    [
        ("virtual", "CAP-V091", ExitCode.DIFFERS),
        ("recorded", "CAP-V090", ExitCode.USAGE),
        ("system", "CAP-V090", ExitCode.USAGE),
    ],
)
def test_a_difference_that_randomness_may_have_made_is_not_held_against_the_claim(
    mode, code, status
):
    claimed = EvaluationPoint(step=8, returns=(ONE, TWO), lengths=(3, 4))
    played = EvaluationPoint(step=8, returns=(ONE, ONE), lengths=(3, 4))
    _compare(claimed, claimed, EntropySpec(mode=mode))
    with pytest.raises(CapsuleError, match="of 2 episodes, number 1 is the first") as caught:
        _compare(claimed, played, EntropySpec(mode=mode))
    assert (caught.value.code, caught.value.exit_code) == (code, status)
