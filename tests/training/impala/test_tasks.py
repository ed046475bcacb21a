"""IMPALA on several games at once, and evaluations that begin with no-ops."""

import pytest

from capsule.experiment.spec import SeedsSpec, tasks_of
from capsule.training.evaluation.protocol import evaluation_environments, generate_starts
from capsule.training.state.streams import Stream
from tests.training.conftest import merge
from tests.training.impala.conftest import TASK, train
from tests.training.impala.test_learner import results

pytestmark = pytest.mark.usefixtures("deterministic", "importable")

GAMES = merge(
    TASK,
    {
        "environment": {
            "suite": "atari",
            "game": "pong",
            "further_games": ["breakout"],
            "full_action_set": True,
            "frame_stack": 1,
        },
        "trainer": {
            "network": "shallow",
            "actors": 4,
            "batch_size": 2,
            "micro_batches": [1, 1],
            "total_steps": 100,
        },
        "evaluation": {"interval": 100, "starts": 4, "noop_max": 30},
        "recording": {"trace_interval": 10, "tensor_interval": 100},
    },
)
for key in ("id", "max_episode_steps"):
    GAMES["environment"].pop(key)


@pytest.mark.slow
def test_every_game_has_its_actors_and_who_plays_them_changes_no_bit(make):
    alone = train(make(GAMES))
    players = alone._executor._transport._worker._actors
    games = [player.environment._begin().tobytes() for player in players]
    assert games[0] == games[2] != games[1] == games[3]
    assert results(train(make(GAMES, workers=2))) == results(alone)


@pytest.mark.slow
def test_starts_are_up_to_so_many_no_ops_and_each_has_its_task(make):
    spec = make(GAMES, evaluation={"starts": 400, "candidates": 400, "shortlist": 400})._spec
    starts = generate_starts(None, 18, spec.evaluation, Stream("evaluation", 3), None)
    assert len(starts) == 400
    assert {action for start in starts for action in start} == {0}
    assert {len(start) for start in starts} == set(range(1, 31))
    tasks = tasks_of(spec.environment)
    assert [task.game for task in tasks] == ["pong", "breakout"]
    assert all(task.further_games == () for task in tasks)
    make_env = evaluation_environments(spec.environment, SeedsSpec(root=1), 4)
    first = [make_env(index).reset().tobytes() for index in range(4)]
    assert first[0] == first[2] != first[1] == first[3]
