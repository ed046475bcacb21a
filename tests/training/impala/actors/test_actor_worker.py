"""IMPALA's actors: step by step by hand, alone and together, from a snapshot."""

import itertools
import json
from bisect import bisect_right
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from capsule.experiment.canonical import canonical_json
from capsule.experiment.errors import CapsuleError
from capsule.training.acting.actor_worker import ActorRequest, Snapshot, actor_streams
from capsule.training.acting.batched_actors import Inputs
from capsule.training.environments import make_environment
from capsule.training.impala.actors.actor_worker import (
    RequestingActor,
    UnrollWorker,
    act,
    logits_of,
)
from capsule.training.impala.actors.unrolls import stacked
from capsule.training.layers.backends import FIXED_ORDER, LIBRARY
from capsule.training.networks.recurrent import Sequences
from capsule.training.state.streams import RequestWords, Stream, uniform_of
from tests.training.impala import tasks as impala_tasks
from tests.training.impala.actors.conftest import (
    parameters_of,
    play,
    settings_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def same(a, b):
    """Tell whether two unrolls are equal, bit for bit."""
    return all(
        left == right
        if isinstance(left, list)
        else (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
        for left, right in zip(a, b, strict=True)
    )


def textbook(settings, actor, versions):
    """Play one actor alone, step by step, and return what its unrolls hold."""
    streams = actor_streams(settings.seeds, actor)
    environment = make_environment(settings.tasks[0], streams, training=True)
    blank = np.zeros(environment.frame_shape, environment.frame_dtype)
    blank_state = torch.zeros(1, *settings.network.state_shape)

    def begin():
        stack = deque([blank] * environment.frame_stack, environment.frame_stack)
        stack.append(environment.reset())
        return SimpleNamespace(
            stack=stack, action=-1, reward=0.0, state=blank_state, age=0, score=0, cut_off=False
        )

    def see():
        made.observations.append(np.stack(now.stack))
        made.ages.append(now.age)
        made.previous_actions.append(now.action)
        made.previous_rewards.append(now.reward)

    words, requests = RequestWords(Stream("exploration", 3, actor).key), itertools.count()
    now, found = begin(), []
    for version in versions:
        parameters = parameters_of(settings, version)
        made = SimpleNamespace(
            observations=[], ages=[], previous_actions=[], previous_rewards=[], actions=[],
            log_behaviour=[], rewards=[], terminals=[], returns=[], state=now.state[0].numpy(),
            acted=[],
        )  # fmt: skip

        for _ in range(settings.steps):
            see()
            made.acted.append(not now.cut_off)
            if now.cut_off:
                for part in (made.actions, made.log_behaviour, made.rewards):
                    part.append(0)
                made.terminals.append(True)
                now = begin()
                continue
            logits, _, now.state = settings.network.unroll(
                parameters.views,
                Sequences(
                    torch.from_numpy(np.stack(now.stack))[None, None],
                    torch.tensor([[now.action]]),
                    torch.tensor([[now.reward]], dtype=torch.float32),
                    now.state,
                    torch.zeros(1, 1, dtype=torch.bool),
                ),
            )
            mu = logits[0, 0].detach().double().softmax(0)
            uniform = uniform_of(words.word(next(requests)))
            now.action = bisect_right(list(itertools.accumulate(mu.tolist()))[:-1], uniform)
            transition = environment.step(now.action)
            now.state, now.reward, now.age = now.state.detach(), transition.reward, now.age + 1
            now.score += transition.game_reward
            now.stack.append(transition.frame)
            made.actions.append(now.action)
            made.log_behaviour.append(mu[now.action].log().item())
            made.rewards.append(transition.reward)
            truncated = transition.ended and not transition.terminal
            now.cut_off = truncated and settings.truncation == "bootstrap"
            made.terminals.append(transition.terminal or (truncated and not now.cut_off))
            if transition.ended:
                made.returns.append(now.score)
                if not now.cut_off:
                    now = begin()
        see()
        found.append(made)
    return found


def check(unroll, made):
    steps = len(made.actions)
    assert len(unroll.ages) == steps + 1
    for name in (
        "ages", "previous_actions", "previous_rewards", "acted", "actions", "rewards", "terminals",
    ):  # fmt: skip
        array = getattr(unroll, name)
        np.testing.assert_array_equal(array, np.array(getattr(made, name), array.dtype), name)
    np.testing.assert_array_equal(unroll.state, made.state)
    np.testing.assert_allclose(unroll.log_behaviour, made.log_behaviour, rtol=2e-6)
    assert unroll.returns == made.returns
    stack = len(made.observations[0])
    np.testing.assert_array_equal(stacked([unroll], stack)[:, 0], np.stack(made.observations))
    np.testing.assert_array_equal(unroll.frames[stack - 1 :], [o[-1] for o in made.observations])
    assert [unroll.log_behaviour.dtype, unroll.previous_rewards.dtype] == [np.float32] * 2
    assert [unroll.actions.dtype, unroll.ages.dtype, unroll.rewards.dtype] == ["i8", "i8", "f8"]


@pytest.mark.slow
@pytest.mark.parametrize(("units", "truncation"), [(5, "bootstrap"), (0, "terminal")])
@pytest.mark.parametrize(("name", "length"), [("counting", 7), ("cartpole", 9), ("sticky", 20)])
def test_an_unroll_is_what_the_actor_alone_does_step_by_step(name, length, units, truncation):
    actors = range(1 if name == "sticky" else 3)
    settings = settings_of(name, length, units, truncation=truncation)
    versions = [0, 1, 1, 2, 5, 6] + ([6] * 4 if name == "sticky" else [])
    made = play(UnrollWorker(settings, actors), actors, versions, settings)
    for actor in actors:
        unrolls = [played[actor].experience for played in made]
        for unroll, expected in zip(unrolls, textbook(settings, actor, versions), strict=True):
            check(unroll, expected)
        assert sum(len(unroll.returns) for unroll in unrolls) > 0
        ended = np.concatenate([unroll.terminals for unroll in unrolls])
        begun = np.concatenate([unroll.ages[1:] == 0 for unroll in unrolls])
        assert (ended >= begun).all()
        waited = sum((~unroll.acted).sum() for unroll in unrolls)
        assert bool(waited) == (truncation == "bootstrap")
        if name == "sticky":  # lost lives end returns, but not episodes
            assert (ended & ~begun).sum() >= 2


@pytest.mark.parametrize("truncation", ["bootstrap", "terminal"])
def test_an_unroll_of_a_counting_environment_as_written_down(truncation):
    """Terminated and truncated episodes of known lengths; what the network is shown of them."""
    settings = settings_of(length=17, truncation=truncation)
    (((_, unroll, after),),) = play(UnrollWorker(settings, [2]), [2], [0], settings)
    stream = Stream("environment", 3, 2)
    seeds = [stream.integer(2**32) for _ in range(9)]
    lengths = [impala_tasks.length_of(seed) for seed in seeds]
    shown_last = [impala_tasks.is_truncated(seed) and truncation == "bootstrap" for seed in seeds]
    rows = [length + last for length, last in zip(lengths, shown_last, strict=True)]
    ages = [age for count in rows for age in range(count)][:18]
    episode = np.repeat(range(9), rows)[:18].tolist()
    assert unroll.ages.tolist() == ages
    acted = [age < lengths[number] for age, number in zip(ages, episode, strict=True)][:17]
    assert unroll.acted.tolist() == acted
    assert all(acted) == (truncation == "terminal")
    assert unroll.terminals.tolist() == [age == 0 for age in ages[1:]]
    assert unroll.frames[:, 0].tolist() == ages
    np.testing.assert_array_equal(
        unroll.frames[:, 2], np.array([seeds[e] % 97 / 97 for e in episode], np.float32)
    )
    shown = [
        -1 if age == 0 else action for age, action in zip(ages[1:], unroll.actions, strict=True)
    ]
    assert unroll.previous_actions.tolist() == [-1, *shown]
    assert unroll.frames[:, 1].tolist() == [-1, *shown]
    rewards = [
        impala_tasks.REWARDS[(age + 1 + action) % 4] if acts else 0.0
        for age, action, acts in zip(ages, unroll.actions.tolist(), acted, strict=False)
    ]
    assert unroll.rewards.tolist() == rewards
    complete = [sum(1 for e in episode[:17] if e == n) >= lengths[n] for n in range(9)].index(False)
    assert {impala_tasks.is_truncated(seed) for seed in seeds[:complete]} == {True, False}
    assert unroll.returns == [
        sum(r for r, e in zip(rewards, episode, strict=False) if e == number)
        for number in range(complete)
    ]
    earned = [0.0 if age == 0 else reward for age, reward in zip(ages[1:], rewards, strict=True)]
    assert unroll.previous_rewards.tolist() == [0.0, *earned]
    assert not unroll.state.any()
    assert after.document["age"] == ages[-1]


@pytest.mark.slow
@pytest.mark.parametrize("products", [FIXED_ORDER, LIBRARY], ids=["chained", "library"])
@pytest.mark.parametrize("units", [5, 0])
def test_who_unrolls_together_changes_no_bit(products, units):
    settings = settings_of(products=products, units=units)
    actors, versions = list(range(20)), [0, 1, 1, 2]
    expected = play(UnrollWorker(settings, actors), actors, versions, settings)
    alone = {
        a: play(UnrollWorker(settings, [a]), [a], versions, settings) for a in (0, 7, 15, 16, 19)
    }
    some = play(UnrollWorker(settings, [1, 7, 16, 18]), [18, 7], versions, settings)
    for version in range(len(versions)):
        for actor, made in alone.items():
            assert same(made[version][0].experience, expected[version][actor].experience)
        for played in some[version]:
            assert same(played.experience, expected[version][played.actor].experience)


def test_versions_of_one_call_are_each_their_own():
    """Actors that unroll with an older version do not reach those that have a newer one."""
    settings = settings_of("cartpole")
    worker = UnrollWorker(settings, range(4))
    flats = {version: parameters_of(settings, version).flat.numpy() for version in (3, 4)}
    requests = [ActorRequest(2, 4), ActorRequest(0, 3), ActorRequest(3, 3), ActorRequest(1, 4)]
    made = {played.actor: played.experience for played in worker.play(requests, flats, 1)}
    for actor, version in requests:
        ((alone,),) = play(UnrollWorker(settings, [actor]), [actor], [version], settings)
        assert same(made[actor], alone.experience)


def test_parameters_are_copied_and_kept_as_long_as_the_lag_asks_for():
    settings = settings_of()
    worker = UnrollWorker(settings, [0])
    flat = parameters_of(settings, 0).flat.numpy().copy()
    worker.play([], {0: flat}, 2)
    flat[:] = 0
    worker.play([], {2: flat}, 2)
    (played,) = worker.play([ActorRequest(0, 0)], {}, 2)
    ((expected,),) = play(UnrollWorker(settings, [0]), [0], [0], settings)
    assert same(played.experience, expected.experience)
    worker.play([], {3: flat}, 2)
    with pytest.raises(KeyError):
        worker.play([ActorRequest(0, 0)], {}, 2)


def saved(snapshot):
    """Return a snapshot as a run that is resumed reads it."""
    return Snapshot.of(json.loads(canonical_json(snapshot.saved())))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "length"), [("counting", 3), ("cartpole", 4), ("sticky", 30)])
def test_a_snapshot_goes_on_elsewhere_to_the_same_bits(name, length):
    settings = settings_of(name, length)
    actors = range(1 if name == "sticky" else 4)
    worker = UnrollWorker(settings, actors)
    before, given = [], set()
    for version in range(3):
        before += play(worker, actors, [version], settings, given=given)
    expected = play(worker, actors, [3, 3, 4], settings, given=given)
    assert any(played.experience.ages[-1] for played in before[-1])
    if name == "cartpole":  # a snapshot between a truncated episode and the next one
        assert not all(played.experience.acted[0] for played in expected[0])
    if name == "counting":  # a zero that JSON has no sign for
        last = [played.experience.previous_rewards[-1] for played in before[-1]]
        assert any(reward == 0 and np.signbit(reward) for reward in last)
    other = UnrollWorker(settings, actors)
    other.restore({played.actor: saved(played.after) for played in before[-1]})
    found = play(other, actors, [3, 3, 4], settings)
    for ours, theirs in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        assert same(ours.experience, theirs.experience)
        assert canonical_json(ours.after.saved()) == canonical_json(theirs.after.saved())
    alone = UnrollWorker(settings, [0])
    alone.restore({0: saved(before[1][0].after)})
    assert same(play(alone, [0], [2], settings)[0][0].experience, before[2][0].experience)


def test_a_snapshot_is_of_one_actor():
    settings = settings_of()
    (((_, _, after),),) = play(UnrollWorker(settings, [0]), [0], [0], settings)
    with pytest.raises(CapsuleError) as refusal:
        UnrollWorker(settings, [1]).restore({1: after})
    assert refusal.value.code == "CAP-T201"


def test_a_snapshot_is_not_written_to_as_its_actor_goes_on():
    settings = settings_of("cartpole")
    worker = UnrollWorker(settings, [0])
    ((first,),) = play(worker, [0], [0], settings)
    kept = canonical_json(first.after.saved()), first.experience.digest()
    play(worker, [0], [1], settings)
    assert (canonical_json(first.after.saved()), first.experience.digest()) == kept


# --- the parts ------------------------------------------------------------------------------------


def inputs_of(settings, rows=3, seed=1):
    """Return inputs of a step for actors of CartPole."""
    draw = torch.Generator().manual_seed(seed)
    return Inputs(
        observations=torch.randn(rows, 1, 4, generator=draw),
        previous_actions=torch.arange(rows) % 3 - 1,
        previous_rewards=torch.randn(rows, generator=draw),
        states=torch.randn(rows, *settings.network.state_shape, generator=draw),
        instructions=torch.zeros(rows, 0, dtype=torch.int64),
    )


def test_a_policy_is_the_softmax_of_its_logits():
    settings = settings_of("cartpole")
    parameters, inputs = parameters_of(settings), inputs_of(settings)
    with torch.no_grad():
        logits, after = logits_of(settings.network, parameters, inputs)
        logarithms, probabilities, again = act(settings.network, parameters, inputs)
    exact = torch.softmax(logits.double(), 1)
    torch.testing.assert_close(probabilities.double(), exact, rtol=1e-7, atol=0)
    torch.testing.assert_close(logarithms.double(), exact.log(), rtol=1e-6, atol=1e-9)
    assert torch.equal(after, again)
    assert (logits.shape, after.shape) == ((3, 2), inputs.states.shape)


def test_a_step_continues_from_the_states_that_it_is_given():
    settings = settings_of("cartpole")
    parameters, first = parameters_of(settings), inputs_of(settings)
    second, blank = inputs_of(settings, seed=2), first._replace(states=first.states * 0)
    with torch.no_grad():
        logits, middle = logits_of(settings.network, parameters, first)
        other, _ = logits_of(settings.network, parameters, blank)
        last, after = logits_of(settings.network, parameters, second._replace(states=middle))
        # The same two steps in one unroll, in which no episode begins.
        parts = (torch.stack(pair) for pair in zip(first[:3], second[:3], strict=True))
        resets = torch.zeros(2, 3, dtype=torch.bool)
        unrolled, _, states = settings.network.unroll(
            parameters.views, Sequences(*parts, first.states, resets)
        )
    assert (logits != other).any()
    assert torch.equal(unrolled[1], last)
    assert torch.equal(states, after)


def test_an_actor_continues_from_its_document():
    settings = settings_of("cartpole")
    one, other = (RequestingActor(settings, 1, 0) for _ in range(2))
    one.environment.reset()
    for action in (0, 1, 1):
        one.environment.step(action)
    one.age, one.episode_return = 3, 2.5
    saved = json.loads(json.dumps(one.document()))
    other.restore(saved)
    assert (other.age, other.episode_return) == (3, 2.5)
    assert other.document() == one.document() == saved
    assert [stream.draws for stream in other.streams.values()] == [
        stream.draws for stream in one.streams.values()
    ]
    steps = [actor.environment.step(0) for actor in (one, other)]
    assert steps[0].frame.tolist() == steps[1].frame.tolist()


def test_a_document_of_another_actor_is_refused():
    settings = settings_of("cartpole")
    one = RequestingActor(settings, 1, 0)
    one.environment.reset()
    with pytest.raises(CapsuleError) as refusal:
        RequestingActor(settings, 2, 0).restore(one.document())
    assert refusal.value.code == "CAP-T201"


def test_a_worker_answers_its_own_actors_and_counts_every_request():
    settings = settings_of("cartpole", length=9)
    worker = UnrollWorker(settings, [0, 2])
    (made,) = play(worker, [0, 2], [0], settings)
    for played in made:
        requests = played.after.document["requests"]
        assert requests["draws"] == requests["own_stream"] == played.experience.acted.sum() > 0


def test_an_unroll_has_rewards_of_training_and_ends_of_returns():
    settings = settings_of("cartpole", length=9)
    worker = UnrollWorker(settings, [0])
    step, taken = worker._actors[0].environment.step, []

    def altered(action):
        taken.append(step(action))
        terminal = len(taken) == 3 or taken[-1].terminal
        return taken[-1]._replace(reward=7.0, terminal=terminal)

    worker._actors[0].environment.step = altered
    ((played,),) = play(worker, [0], [0], settings)
    assert set(played.experience.rewards.tolist()) == {7.0}
    assert played.experience.terminals[2]
    assert not taken[2].terminal
