"""Logical actors: what they report, alone and together, in one process and in several."""

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import DeterminismSpec, SeedsSpec
from capsule.training.acting.actor_worker import ActorRequest, actor_streams
from capsule.training.acting.transports import local_transport
from capsule.training.environments import make_environment
from capsule.training.layers.backends import FIXED_ORDER, LIBRARY
from capsule.training.networks.feedforward import Parameters, initialize
from capsule.training.networks.recurrent import make_recurrent_network
from capsule.training.r2d2.actor_worker import (
    ActorSettings,
    EpsilonGreedyActor,
    exploration_ladder,
)
from capsule.training.r2d2.actors import Actors, ActorsState
from capsule.training.r2d2.cutting import SequenceLayout
from capsule.training.r2d2.priorities import PriorityRule
from capsule.training.r2d2.replay import Frames, SequenceReplay
from capsule.training.state.streams import Stream
from tests.conftest import wait_until
from tests.training.acting.actor_networks import CountingNetwork, PlacedNetwork
from tests.training.conftest import BREAKOUT, CARTPOLE, ROOT, make_spec, start_variables

pytestmark = pytest.mark.usefixtures("one_thread", "importable")

CPU = torch.device("cpu")
SEEDS = SeedsSpec(root=3, streams={"no-op": 5})
LAYOUT = SequenceLayout(burn_in=4, trained=6, period=3)
ENVIRONMENTS = {
    "cartpole": make_spec(CARTPOLE, environment={"max_episode_steps": 12}).environment,
    "breakout": make_spec(BREAKOUT).environment,
    "sticky": make_spec(
        BREAKOUT,
        environment={
            "sticky_action_probability": 0.25,
            "clip_rewards": False,
            "max_episode_frames": 300,
            "frame_stack": 2,
        },
    ).environment,
}


@pytest.fixture
def start():
    """A function that starts actors."""
    started = []

    def begin(settings, processes, **options):
        started.append(make_actors(settings, processes, **options))
        return started[-1]

    yield begin
    for actors in started:
        actors.close()


def make_actors(settings, processes, numerics="native"):
    """Start actors in this process or in several others."""
    others = 0 if processes == 1 else processes
    transport = local_transport(
        settings, settings.actors, processes=others, lag=0, numerics=numerics
    )
    return Actors(settings, transport)


def settings_of(name="cartpole", actors=5, network=None, **changes):
    """Return settings of actors that play in an environment."""
    environment = ENVIRONMENTS[name]
    example = make_environment(environment, streams_of(0), training=True)
    network = network or CountingNetwork(example.actions)
    settings = ActorSettings(
        tasks=(environment,),
        seeds=SEEDS,
        network=network,
        steps=10,
        layout=LAYOUT,
        actors=actors,
        life_loss="roll",
        exploration_base=0.6,
        exploration_exponent=4.0,
    )
    return replace(settings, **changes)


def recurrent(name, units=20, products=FIXED_ORDER):
    """Return a small network as it is trained; its rows do not fill vector registers evenly."""
    example = make_environment(ENVIRONMENTS[name], streams_of(0), training=True)
    return make_recurrent_network(
        "mlp" if name == "cartpole" else "nature",
        frame_stack=example.frame_stack,
        layout=example.layout,
        actions=example.actions,
        recurrent_units=units,
        hidden_units=12,
        products=products,
    )


def parameters_of(settings, seed=1):
    parameters = Parameters(settings.network.shapes, CPU)
    initialize(parameters, Stream("initialization", seed))
    return parameters


def streams_of(actor):
    return actor_streams(SEEDS, actor, EpsilonGreedyActor.drawn)


def act(actors, parameters=None):
    actors.begin(None if parameters is None else parameters.flat)
    return actors.finish()


def play(settings, steps, parameters, played=None):
    """Return what actors do that one worker plays in this process."""
    played = range(settings.actors) if played is None else played
    worker = replace(settings, steps=steps).make_worker(played)
    requests = [ActorRequest(actor, 0) for actor in played]
    return [each.made for each in worker.play(requests, {0: parameters.flat.numpy()}, 0)]


def bits(value):
    """Return nested tuples that are equal where two experiences are, bit for bit."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return tuple((key, bits(part)) for key, part in value.items())
    if isinstance(value, list | tuple):
        return tuple(bits(part) for part in value)
    return value


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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "numbers"), [("cartpole", (1, 2, 4)), ("breakout", (1, 2))])
@pytest.mark.usefixtures("warm_workers")
def test_any_number_of_processes_gives_the_same_bits(name, numbers, start):
    settings = settings_of(name, actors=5, network=recurrent(name), steps=15)
    first, second = (parameters_of(settings, seed) for seed in (1, 2))
    made = []
    for processes in numbers:
        actors = start(settings, processes)
        assert len(multiprocessing.active_children()) == (processes if processes > 1 else 0)
        experiences = [act(actors, first), act(actors), act(actors, second)]
        state = actors.state()
        made.append((bits(experiences), bits(state), actors.profiles()))
        actors.close()
        assert not multiprocessing.active_children()
    assert all(each == made[0] for each in made)
    actors = [bits(experience) for experience in experiences[0]]
    assert len(set(actors)) == len(actors)


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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "processes"), [("cartpole", 2), ("breakout", 1)])
@pytest.mark.usefixtures("warm_workers")
def test_restored_actors_go_on_as_if_nothing_had_happened(name, processes, start):
    settings = settings_of(name, actors=3, steps=33)
    parameters = parameters_of(settings)
    whole = start(settings, 1)
    act(whole, parameters)
    documents, arrays = whole.state()
    saved = ActorsState(json.loads(json.dumps(documents)), arrays)
    expected = act(whole)
    restored = start(settings, processes)
    act(restored, parameters)
    act(restored)
    restored.restore(saved)
    assert bits(restored.state()) == bits(saved)
    assert bits(act(restored)) == bits(expected)
    assert restored.profiles() == whole.profiles()


def test_a_state_of_other_seeds_is_refused(start):
    settings = settings_of(actors=2)
    first = start(settings, 1)
    act(first, parameters_of(settings))
    saved = first.state()
    other = start(settings_of(actors=2, seeds=SeedsSpec(root=4)), 1)
    with pytest.raises(CapsuleError) as refusal:
        other.restore(saved)
    assert refusal.value.code == "CAP-T201"


@pytest.mark.slow
def test_streams_belong_to_one_actor_each(start):
    settings = settings_of("sticky", actors=3)
    actors = start(settings, 1)
    act(actors, parameters_of(settings))
    profiles = actors.profiles()
    assert len({profile.key for profile in profiles}) == 9
    assert [(profile.name, profile.seed) for profile in profiles] == [
        (f"{name}/{actor}", seed)
        for actor in range(3)
        for name, seed in (("environment", 3), ("exploration", 3), ("no-op", 5))
    ]


def test_each_step_draws_twice_whichever_draw_is_used(start):
    for base in (0.0, 0.5, 1.0):
        settings = settings_of(actors=2, exploration_base=base, steps=30)
        actors = start(settings, 1)
        act(actors, parameters_of(settings))
        draws = {profile.name: profile.draws for profile in actors.profiles()}
        assert (draws["exploration/0"], draws["exploration/1"]) == (60, 60)


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


def test_parameters_are_taken_as_they_are_when_the_actors_begin(start):
    settings = settings_of(exploration_base=0.0, steps=30)
    parameters, copy = parameters_of(settings), parameters_of(settings)
    expected = act(start(settings, 1), copy)
    actors = start(settings, 1)
    actors.begin(parameters.flat)
    parameters.flat.mul_(-1)
    assert bits(actors.finish()) == bits(expected)


def test_calls_out_of_order_are_refused(start):
    settings = settings_of()
    actors = start(settings, 1)
    with pytest.raises(RuntimeError, match="needs parameters"):
        actors.begin(None)
    for call in (actors.state, actors.profiles):
        with pytest.raises(RuntimeError, match="have not acted yet"):
            call()
    with pytest.raises(RuntimeError, match="follows begin"):
        actors.finish()
    actors.begin(parameters_of(settings).flat)
    for call in (actors.state, actors.profiles, lambda: actors.begin(None)):
        with pytest.raises(RuntimeError, match="the actors act"):
            call()


# Processes that end with the trainer, or are killed with it


SCRIPT = """
import hashlib, multiprocessing, os, signal, sys
from capsule.experiment.spec import Spec
from tests.training.r2d2.test_actors import (
    act, bits, make_actors, parameters_of, recurrent, settings_of
)

def main(end):
    spec = Spec.model_validate_json(os.environ["SPEC"])
    settings = settings_of(
        actors=3,
        network=recurrent("cartpole"),
        determinism=spec.determinism,
        steps=1_000 if end == "kill" else 30,
    )
    for processes in (1, 2):
        actors = make_actors(settings, processes, spec.accelerator.numerics)
        made = act(actors, parameters_of(settings))
        print(hashlib.sha256(repr(bits(made)).encode()).hexdigest(), flush=True)
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)
    if end == "kill":
        actors.begin(None)
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("end", "status"), [("leave", 0), ("kill", -signal.SIGKILL)])
def test_no_process_outlives_the_trainer(end, status, tmp_path):
    """Under a portable profile, with all that a run's processes are given."""
    script = tmp_path / "trainer.py"
    script.write_text(SCRIPT)
    spec = make_spec(CARTPOLE)
    variables = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "SPEC": spec.model_dump_json(by_alias=True),
        **start_variables(spec),
    }
    done = subprocess.run(
        [sys.executable, script, end], env=variables, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == status, done.stderr
    one, two, processes = done.stdout.splitlines()
    assert one == two
    wait_for_end([int(number) for number in processes.split()])
    assert done.stderr == ""


def wait_for_end(processes):
    assert len(processes) == 2
    wait_until(lambda: not any(running(process) for process in processes), seconds=600)


def running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
