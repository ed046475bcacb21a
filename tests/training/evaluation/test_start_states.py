"""The starts of the shipped full-size protocol, played in the real game."""

from pathlib import Path

import numpy as np
import pytest

from capsule.experiment.spec import SeedsSpec
from capsule.host.spec_file import load_spec
from capsule.training.environments.atari import AtariGame
from capsule.training.evaluation.protocol import evaluation_environments, generate_starts
from capsule.training.state.streams import Stream

SPECS = Path(__file__).parents[3] / "specs"
CANDIDATES, AT_ONCE = 60, 2


class Watching:
    """A network that ranks nothing and counts the lives of those that it is asked about."""

    recurrent = False

    def __init__(self, environments):
        self.environments, self.lives = environments, []

    def __call__(self, seen):
        self.lives += [self.environments[row].lives for row in np.flatnonzero(seen.active)]
        return np.zeros((len(seen.active), 1), np.float32)

    def state_values(self, seen):
        return self(seen)[:, 0]


def share_of_starts_that_lost_a_life():
    spec = load_spec(SPECS / "dqn-breakout.yaml").training()
    few = {"candidates": CANDIDATES, "shortlist": AT_ONCE, "starts": AT_ONCE}
    protocol = spec.evaluation.model_copy(update=few)
    make = evaluation_environments(spec.environment, SeedsSpec(root=1), AT_ONCE)
    environments = [make(slot) for slot in range(AT_ONCE)]
    watching = Watching(environments)
    actions = environments[0].actions
    generate_starts(make, actions, protocol, Stream("evaluation", 1), watching)
    return sum(lives < 5 for lives in watching.lives) / CANDIDATES


@pytest.mark.slow
def test_no_start_of_the_full_size_protocol_loses_a_life():
    assert share_of_starts_that_lost_a_life() == 0


@pytest.mark.slow
def test_most_would_lose_one_if_their_actions_were_held_as_long_as_an_agents(monkeypatch):
    """What the audit measured: 96 % of starts that are played for four frames an action."""
    monkeypatch.setattr(AtariGame, "_advance_frame", AtariGame._advance)
    assert share_of_starts_that_lost_a_life() > 0.5
