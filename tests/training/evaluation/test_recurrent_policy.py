"""The policy of a network with memory: what it is shown, and what it remembers of each row."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from capsule.experiment.errors import CapsuleError
from capsule.training.evaluation.protocol import ObservationBatch
from capsule.training.evaluation.recurrent_policy import RecurrentPolicy
from capsule.training.networks.language import Vocabulary
from tests.training.conftest import BREAKOUT, CARTPOLE, make_spec

NETWORK = SimpleNamespace(state_shape=(2, 3))
TASK = make_spec(CARTPOLE).environment


class Adding:
    """Adds what it sees to the state, and keeps what it was given."""

    def __init__(self):
        self.given = []

    def __call__(self, inputs):
        assert torch.is_inference_mode_enabled()
        self.given.append(inputs)
        after = inputs.states + inputs.observations.reshape(-1, 1, 1)
        return after[:, 0, :2], after


def seen(*observations, begins=None, active=None, actions=None, rewards=None, instructions=None):
    """Return what a row for each observation sees; all of them go on by default."""
    rows = len(observations)
    return ObservationBatch(
        observations=np.array(observations, np.float32).reshape(rows, 1),
        previous_actions=np.array(actions or [-1] * rows),
        previous_rewards=np.array(rewards or [0.0] * rows, np.float32),
        instructions=instructions or [""] * rows,
        begins=np.array(begins or [False] * rows),
        active=np.array(active or [True] * rows),
    )


def policy(evaluate=None, environment=TASK, **options):
    return RecurrentPolicy(
        NETWORK, environment, torch.device("cpu"), evaluate or Adding(), **options
    )


def test_each_row_remembers_what_it_saw_alone():
    adding = policy()
    assert adding.recurrent
    assert adding(seen(1, 10)).tolist() == [[1, 1], [10, 10]]
    assert adding(seen(2, 20)).tolist() == [[3, 3], [30, 30]]
    assert adding(seen(4, 40)).dtype == np.float32


def test_states_are_valued_by_the_networks_value_or_by_the_largest_number_of_an_action():
    assert policy().state_values(seen(1, 10)).tolist() == [1, 10]

    def value(inputs):
        _, after = Adding()(inputs)
        return -after[:, 0, :1], after

    valued = policy(value=value)
    assert valued.state_values(seen(1, 10)).tolist() == [-1, -10]
    assert valued(seen(2, 20)).tolist() == [[3, 3], [30, 30]]  # it remembers what it valued


def test_nothing_is_remembered_at_first_and_where_an_episode_begins():
    evaluate = Adding()
    adding = policy(evaluate)
    adding(seen(1, 10))
    assert evaluate.given[0].states.shape == (2, 2, 3)
    assert not evaluate.given[0].states.any()
    assert adding(seen(2, 20, begins=[False, True])).tolist() == [[3, 3], [20, 20]]
    assert adding(seen(4, 40)).tolist() == [[7, 7], [60, 60]]


def test_rows_that_wait_keep_what_they_remember():
    adding = policy()
    adding(seen(1, 10))
    adding(seen(2, 20, active=[True, False]))
    assert adding(seen(4, 40)).tolist() == [[7, 7], [50, 50]]


def test_a_row_that_begins_again_while_it_waits_has_forgotten():
    adding = policy()
    adding(seen(1))
    adding(seen(2, begins=[True], active=[False]))
    assert adding(seen(4)).tolist() == [[4, 4]]


def test_the_network_is_shown_previous_actions_and_rewards_of_the_game():
    evaluate = Adding()
    policy(evaluate)(seen(1, 2, actions=[-1, 3], rewards=[0.0, -2.5]))
    given = evaluate.given[0]
    assert given.previous_actions.tolist() == [-1, 3]
    assert given.previous_actions.dtype == torch.int64
    assert given.previous_rewards.tolist() == [0.0, -2.5]


@pytest.mark.parametrize(("clips", "shown"), [(True, [1, 0, -1]), (False, [7.0, 0.0, -0.5])])
def test_a_network_that_was_trained_with_signs_of_rewards_is_shown_these(clips, shown):
    environment = make_spec(BREAKOUT, environment={"clip_rewards": clips}).environment
    evaluate = Adding()
    policy(evaluate, environment)(seen(1, 2, 3, rewards=[7.0, 0.0, -0.5]))
    assert evaluate.given[0].previous_rewards.tolist() == shown
    assert evaluate.given[0].previous_rewards.dtype == torch.float32


def test_instructions_are_shown_by_the_numbers_of_their_words():
    evaluate = Adding()
    vocabulary = Vocabulary(["red", "go", "box"], longest=3)  # numbered box, go, red
    policy(evaluate, vocabulary=vocabulary)(seen(1, 2, instructions=["Go, red!", ""]))
    assert evaluate.given[0].instructions.tolist() == [[1, 2, -1], [-1, -1, -1]]


def test_an_unknown_word_is_refused_before_anything_is_remembered():
    vocabulary = Vocabulary(["go"], longest=3)
    adding = policy(vocabulary=vocabulary)
    adding(seen(1))
    with pytest.raises(CapsuleError, match="'blue'") as refusal:
        adding(seen(2, instructions=["go blue"]))
    assert refusal.value.code == "CAP-T242"
    assert "trainer.language.vocabulary" in refusal.value.fix
    assert adding(seen(4)).tolist() == [[5, 5]]


def test_without_a_vocabulary_there_are_no_words():
    evaluate = Adding()
    policy(evaluate)(seen(1, 2))
    assert evaluate.given[0].instructions.shape == (2, 0)
