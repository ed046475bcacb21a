"""R2D2's actors: step by step by hand, in any worker, their states and exploration rates."""

import itertools
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from capsule.experiment.spec import DeterminismSpec
from capsule.training.environments import make_environment
from capsule.training.layers.backends import LIBRARY
from capsule.training.r2d2.actor_worker import (
    exploration_ladder,
)
from capsule.training.r2d2.cutting import SequenceLayout
from capsule.training.r2d2.priorities import PriorityRule
from capsule.training.r2d2.replay import Frames, SequenceReplay
from tests.training.acting.actor_networks import PlacedNetwork
from tests.training.r2d2.conftest import (
    bits,
    parameters_of,
    play,
    recurrent,
    settings_of,
    streams_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def textbook(settings, actor, parameters, steps):
    """Play one actor alone, step by step, and return what an experience holds."""
    streams = streams_of(actor)
    environment = make_environment(settings.tasks[0], streams, training=True)
    span = max(1, settings.actors - 1)
    epsilon = settings.exploration_base ** (1 + settings.exploration_exponent * actor / span)
    blank = np.zeros(environment.frame_shape, environment.frame_dtype)
    found = SimpleNamespace(
        frames=[],
        actions=[],
        rewards=[],
        game_rewards=[],
        terminals=[],
        ended=[],
        values=[],
        states={},
        last_frames={},
        last_values={},
        returns=[],
    )

    def begin(frame):
        stack = deque([blank] * environment.frame_stack, environment.frame_stack)
        stack.append(frame)
        return stack, -1, 0.0, torch.zeros(1, *settings.network.state_shape), 0

    def evaluate():
        return settings.network.unroll(
            parameters.views,
            torch.from_numpy(np.stack(stack))[None, None],
            torch.tensor([[action]]),
            torch.tensor([[reward]], dtype=torch.float32),
            state,
            torch.ones(1, 1, dtype=torch.bool),
        )

    stack, action, reward, state, age = begin(environment.reset())
    score = 0.0
    for step in range(steps):
        starts = {0} | {k * settings.layout.period - settings.layout.burn_in for k in range(999)}
        if age in starts:
            found.states[step] = state[0].numpy()
        values, state = evaluate()
        values = values[0, 0].numpy()
        explores = streams["exploration"].uniform() < epsilon
        action = streams["exploration"].integer(environment.actions)
        if not explores:
            action = values.tolist().index(max(values.tolist()))
        found.frames.append(stack[-1])
        found.actions.append(action)
        found.values.append((values[action], values.max()))
        transition = environment.step(action)
        reward, age, score = transition.reward, age + 1, score + transition.game_reward
        stack.append(transition.frame)
        found.rewards.append(reward)
        found.game_rewards.append(transition.game_reward)
        found.terminals.append(transition.terminal)
        found.ended.append(
            transition.ended or (transition.terminal and settings.life_loss == "reset")
        )
        if transition.ended:
            if not transition.terminal:
                found.last_frames[step] = transition.frame
                found.last_values[step] = float(evaluate()[0].max())
            found.returns.append(score)
            score = 0.0
            stack, action, reward, state, age = begin(environment.reset())
        elif found.ended[-1]:
            stack, action, reward, state, age = begin(transition.frame)
    return found


def check_same(experience, found):
    for name in ("frames", "actions", "rewards", "game_rewards", "terminals", "ended", "values"):
        array = getattr(experience, name)
        np.testing.assert_array_equal(array, np.array(getattr(found, name), array.dtype), name)
    for name in ("states", "last_frames"):
        assert bits(getattr(experience, name)) == bits(getattr(found, name)), name
    assert experience.last_values == found.last_values
    assert experience.returns == found.returns


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "life_loss"),  # there is no life to lose in CartPole
    [("cartpole", "roll"), ("breakout", "roll"), ("breakout", "reset"), ("sticky", "reset")],
)
def test_an_experience_is_what_the_actor_alone_would_have_made(name, life_loss):
    settings = settings_of(name, actors=3, life_loss=life_loss)
    parameters = parameters_of(settings)
    made = play(settings, 250, parameters)
    for actor, experience in enumerate(made):
        check_same(experience, textbook(settings, actor, parameters, 250))
    assert any(experience.returns for experience in made)
    if name != "breakout":
        assert any(experience.last_frames for experience in made)


@pytest.mark.slow
def test_only_with_reset_a_lost_life_begins_an_episode():
    made = {}
    for life_loss in ("roll", "reset"):
        settings = settings_of("breakout", actors=1, life_loss=life_loss, exploration_base=1.0)
        made[life_loss] = play(settings, 250, parameters_of(settings))[0]
    roll, reset = made["roll"], made["reset"]
    np.testing.assert_array_equal(roll.terminals, reset.terminals)
    lost = np.flatnonzero(roll.terminals & ~roll.ended)
    assert len(lost) >= 4
    assert reset.ended[lost].all()
    assert roll.returns == reset.returns
    assert not any(reset.states[step + 1].any() for step in lost.tolist())
    assert (roll.values[lost + 1] != reset.values[lost + 1]).any()


def test_the_replay_memory_finds_every_recurrent_state_that_it_needs():
    layout = SequenceLayout(burn_in=1, trained=3, period=2)
    settings = settings_of("cartpole", actors=2, layout=layout)
    replay = SequenceReplay(
        None,
        layout=layout,
        actors=2,
        capacity=2_000,
        slack=100,
        frames=Frames((4,), np.float32, 1),
        state_shape=(2, 1),
        priorities=PriorityRule(0.9, 1e-6),
    )
    finished = []
    unknown = np.full((2, 1), np.nan, np.float32)
    made = play(settings, 300, parameters_of(settings))
    for actor, experience in enumerate(made):
        for step in range(300):
            terminal, ended = bool(experience.terminals[step]), bool(experience.ended[step])
            finished += replay.append(
                actor,
                experience.frames[step],
                int(experience.actions[step]),
                float(experience.rewards[step]),
                terminal,
                ended=ended and terminal,
                state=experience.states.get(step, unknown),
            )
            if ended and not terminal:
                finished += replay.end_episode(actor, experience.last_frames[step])
    batch = replay.gather(np.array(finished))
    counts = batch.states[:, 0, 0]
    assert set(counts.tolist()) == {0.0, 1.0, 3.0, 5.0, 7.0, 9.0}
    first = batch.resets.sum(0) - 1  # the first row that is no padding
    begins = batch.previous_actions[first, np.arange(len(first))] == -1
    np.testing.assert_array_equal(begins, counts == 0)


def play_apart(settings, cuts, steps=40):
    """Return what actors do in workers that end at ``cuts``."""
    parameters = parameters_of(settings)
    shares = [range(first, end) for first, end in itertools.pairwise((0, *cuts))]
    return bits([each for share in shares for each in play(settings, steps, parameters, share)])


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [(3, 19), (16, 19), (1, 2, 17, 19)])
@pytest.mark.parametrize("network", [PlacedNetwork(2), recurrent("cartpole", products=LIBRARY)])
def test_libraries_that_depend_on_the_batch_find_the_same_one_in_any_worker(network, cuts):
    settings = settings_of(actors=19, network=network)
    assert play_apart(settings, cuts) == play_apart(settings, (19,))


def test_in_batches_of_its_own_size_a_worker_would_show_in_such_a_network():
    free = DeterminismSpec(batch_invariance=False)
    settings = settings_of(actors=4, network=PlacedNetwork(2), determinism=free)
    assert play_apart(settings, (1, 4)) != play_apart(settings, (4,))


def test_ties_go_to_the_lowest_action():
    settings = settings_of(exploration_base=0.0)
    parameters = parameters_of(settings)
    parameters.flat.zero_()
    for experience in play(settings, 30, parameters):
        assert not experience.actions.any()
        assert not experience.values.any()


def test_the_ladder_of_exploration_rates():
    assert exploration_ladder(1, 0.4, 7.0) == [0.4]
    rates = exploration_ladder(256, 0.4, 7.0)
    assert rates[0] == 0.4
    assert rates[-1] == pytest.approx(0.4**8)
    logarithms = np.log(rates)
    np.testing.assert_allclose(np.diff(logarithms), 7 / 255 * np.log(0.4))


@pytest.mark.slow
def test_hundreds_of_actors_live_in_one_process():
    settings = settings_of(actors=256, network=recurrent("cartpole"))
    made = play(settings, 20, parameters_of(settings))
    assert len({experience.frames.tobytes() for experience in made}) == 256
