"""R2D2's actors: step by step by hand, in any worker, their states and exploration rates."""

import itertools
import json
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import DeterminismSpec
from capsule.training.acting.actor_worker import ActorRequest
from capsule.training.acting.batched_actors import Inputs
from capsule.training.environments import make_environment
from capsule.training.layers.backends import LIBRARY
from capsule.training.networks.recurrent import Sequences
from capsule.training.r2d2.actor_worker import (
    EpsilonGreedyActor,
    Experience,
    exploration_ladder,
    q_values,
    stream_profiles,
)
from capsule.training.r2d2.cutting import SequenceLayout
from capsule.training.r2d2.replay import Frames, SequenceReplay
from capsule.training.state.streams import Stream
from tests.training.acting.actor_networks import PlacedNetwork
from tests.training.r2d2.conftest import (
    ENVIRONMENTS,
    SEEDS,
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
            Sequences(
                torch.from_numpy(np.stack(stack))[None, None],
                torch.tensor([[action]]),
                torch.tensor([[reward]], dtype=torch.float32),
                state,
                torch.ones(1, 1, dtype=torch.bool),
            ),
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
        priority_exponent=0.9,
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


@given(st.integers(1, 300), st.floats(0.01, 0.99), st.floats(0, 20))
def test_exploration_rates_fall_from_the_base_to_its_power(actors, base, exponent):
    rates = exploration_ladder(actors, base, exponent)
    assert len(rates) == actors
    assert rates[0] == base
    assert rates == sorted(rates, reverse=True)
    if actors > 1:
        assert rates[-1] == pytest.approx(base ** (1 + exponent))


@pytest.mark.parametrize(("epsilon", "explores"), [(0.0, False), (1.0, True)])
def test_a_choice_is_the_best_action_or_the_drawn_one(epsilon, explores):
    actor = EpsilonGreedyActor(settings_of(), 2, epsilon)
    draws = Stream("exploration", 3, 2)
    for best in (0, 1, 1, 0, 1, 0):
        values = np.array([1.0, 1.0], np.float32)
        values[best] = 2.0
        draws.uniform()
        drawn = draws.integer(2)
        assert actor.choose(values) == (drawn if explores else best)


def test_an_actor_explores_where_its_uniform_lies_below_epsilon():
    actor = EpsilonGreedyActor(settings_of(), 0, 0.3)
    draws = Stream("exploration", 3, 0)
    explored = 0
    for _ in range(400):
        explores, drawn = draws.uniform() < 0.3, draws.integer(2)
        explored += explores
        assert actor.choose(np.array([0.0, 1.0], np.float32)) == (drawn if explores else 1)
    assert 80 < explored < 160


def test_an_actor_continues_from_its_document():
    one, other = (EpsilonGreedyActor(settings_of(), 1, 0.5) for _ in range(2))
    one.environment.reset()
    for _ in range(3):
        one.environment.step(one.choose(np.zeros(2, np.float32)))
    one.age, one.episode_return = 3, 2.5
    other.restore(json.loads(json.dumps(one.document())))
    assert (other.age, other.episode_return) == (3, 2.5)
    assert other.document() == one.document()
    values = np.zeros(2, np.float32)
    assert [other.choose(values) for _ in range(9)] == [one.choose(values) for _ in range(9)]


@pytest.mark.parametrize("name", ["cartpole", "sticky"])
def test_a_blank_experience_has_room_for_each_step(name):
    environment = make_environment(ENVIRONMENTS[name], streams_of(0), training=True)
    blank = Experience.blank(7, environment)
    assert blank.frames.shape == (7, *environment.frame_shape)
    assert blank.frames.dtype == environment.frame_dtype
    arrays = [part for part in blank if isinstance(part, np.ndarray)]
    assert {len(array) for array in arrays} == {7}
    assert not any(array.any() for array in arrays)
    assert [part for part in blank if not isinstance(part, np.ndarray)] == [{}, {}, {}, []]
    # Nothing is shared between two of them.
    blank.states[0] = blank.returns
    assert Experience.blank(7, environment).states == {}


def test_values_of_a_step_take_the_states_that_they_are_given():
    network = recurrent("cartpole", units=6)
    parameters = parameters_of(settings_of(network=network))
    rows = 3
    draw = torch.Generator().manual_seed(1)
    inputs = Inputs(
        observations=torch.randn(rows, 1, 4, generator=draw),
        previous_actions=torch.tensor([-1, 0, 1]),
        previous_rewards=torch.randn(rows, generator=draw),
        states=torch.randn(rows, 2, 6, generator=draw),
        instructions=torch.zeros(rows, 0, dtype=torch.int64),
    )
    with torch.no_grad():
        values, after = q_values(network, parameters, inputs)
        forgotten, _ = q_values(network, parameters, inputs._replace(states=inputs.states * 0))
        for row in range(rows):
            alone = Inputs(*(part[row : row + 1] for part in inputs))
            one, state = q_values(network, parameters, alone)
            assert torch.equal(one[0], values[row])
            assert torch.equal(state[0], after[row])
    assert values.shape == (rows, 2)
    assert after.shape == inputs.states.shape
    assert (values != forgotten).any(1).all()


def test_profiles_are_those_of_streams_that_were_drawn_from_as_often():
    settings = settings_of("sticky", actors=3, steps=9)
    worker = settings.make_worker([2])
    flat = parameters_of(settings).flat.numpy()
    (played,) = worker.play([ActorRequest(2, 0)], {0: flat}, 0)
    found = {profile.name: profile for profile in stream_profiles(SEEDS, 2, played.after)}
    expected = streams_of(2)
    expected["exploration"].uniforms(18)  # two words for each step
    expected["environment"].uniforms(4 * 9)  # one for each emulator frame
    expected["no-op"].integer(30)  # one for the episode
    assert set(found) == {"environment/2", "exploration/2", "no-op/2"}
    for name, stream in expected.items():
        assert found[f"{name}/2"].draws == stream.draws
        assert (found[f"{name}/2"].key, found[f"{name}/2"].seed) == (
            stream.profile().key,
            stream.profile().seed,
        )


def test_profiles_of_another_actors_snapshot_are_refused():
    settings = settings_of(actors=2)
    worker = settings.make_worker([0])
    flat = parameters_of(settings).flat.numpy()
    (played,) = worker.play([ActorRequest(0, 0)], {0: flat}, 0)
    with pytest.raises(CapsuleError) as refusal:
        stream_profiles(SEEDS, 1, played.after)
    assert refusal.value.code == "CAP-T201"
