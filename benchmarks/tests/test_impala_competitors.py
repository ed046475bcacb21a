"""IMPALA's competitors and the parts of its ceiling: what is learned, counted and compared."""

import argparse
import statistics
import threading
from itertools import islice

import competitors
import impala
import impala_parts
import numpy as np
import plain_impala
import pytest
import torch
from plain_impala import BATCH, FRAMES, UNROLL, WARM_UP

UPDATE = BATCH * UNROLL


class Games:
    """Games whose observations name the game and count its steps; ``ready`` of them are at hand."""

    def __init__(self, num_envs, ready):
        self.ready, self.steps = ready, np.zeros(num_envs, np.int64)
        self.actions = [[] for _ in range(num_envs)]

    def async_reset(self):
        self.waiting = list(range(len(self.steps)))

    def recv(self):
        envs, self.waiting = np.array(self.waiting[: self.ready]), self.waiting[self.ready :]
        steps = self.steps[envs]
        observations = np.zeros((len(envs), 4, 84, 84), np.uint8)
        observations[:, 0, 0, 0], observations[:, 1, 0, 0] = envs, steps
        never = np.zeros(len(envs), np.bool_)
        return observations, steps.astype(np.float32), steps % 7 == 6, never, {"env_id": envs}

    def send(self, actions, envs):
        for env, action in zip(envs, actions, strict=True):
            self.actions[env].append(int(action))
        self.steps[envs] += 1
        self.waiting += envs.tolist()


class Network:
    """Chooses by chance, with equal probabilities."""

    def __call__(self, observations):
        return torch.zeros(len(observations), 4), torch.zeros(len(observations))


@pytest.mark.parametrize("ready", [32, 12], ids=["together", "as they are ready"])
def test_unrolls_of_pooled_games_follow_each_other(ready):
    games = Games(32, ready)
    batches = list(islice(competitors.play(Network(), games, 32), 6))
    begun = dict.fromkeys(range(32), 0)
    for batch in batches:
        assert batch["observations"].shape == (UNROLL + 1, BATCH, 4, 84, 84)
        for column in range(BATCH):
            env = int(batch["observations"][0, column, 0, 0, 0])
            steps = torch.arange(begun[env], begun[env] + UNROLL + 1)
            assert torch.equal(batch["observations"][:, column, 1, 0, 0].long(), steps)
            assert torch.equal(batch["rewards"][:, column].long(), steps)
            assert torch.equal(batch["ended"][:, column], steps % 7 == 6)
            played = games.actions[env][begun[env] : begun[env] + UNROLL]
            assert batch["actions"][:-1, column].tolist() == played
            assert batch["log_behaviour"][:-1, column] == pytest.approx(np.log(0.25))
            begun[env] += UNROLL
    assert sum(begun.values()) == 6 * UPDATE


@pytest.mark.slow
@pytest.mark.parametrize("overlapped", [True, False])
def test_the_pool_s_learner_makes_an_update_for_every_batch(monkeypatch, overlapped):
    learned = []

    def make_learner(network):
        def learn(batch):
            learned.append(batch["observations"][0, :, 1, 0, 0].tolist())
            with torch.no_grad():
                network.policy.bias.add_(1.0)

        return learn

    monkeypatch.setattr(competitors, "make_pool", Games)
    monkeypatch.setattr(competitors, "make_torch_learner", make_learner)
    settings = {"num_envs": 32, "batch_size": 32, "learner_threads": 1, "overlapped": overlapped}
    taken = competitors.envpool(2 * UPDATE, **settings)
    assert [next(taken), next(taken)] == [WARM_UP * UPDATE, 2 * UPDATE]
    begun = [n // 2 * UNROLL for n in range(WARM_UP + 2)]
    assert learned == [[start] * BATCH for start in begun]


def test_every_setting_fills_a_batch_and_synchronous_ones_exactly():
    for settings in competitors.SAMPLE_FACTORY_SETTINGS:
        per_worker = settings.get("num_envs_per_worker", 1) * settings.get("env_agents", 1)
        games = settings["num_workers"] * per_worker
        assert games >= BATCH
        assert settings.get("async_rl", True) or games == BATCH
    assert all(settings["num_envs"] >= BATCH for settings in competitors.ENVPOOL_SETTINGS)


# Parts of the ceiling


class Asked:
    """A queue with some requests, at whose end the process ends."""

    def __init__(self, *requests):
        self.requests = list(requests)

    def get(self):
        if not self.requests:
            raise EOFError
        return self.requests.pop(0)


def small_contender(**changes):
    return impala.Contender("", "asynchronous", actors=16, workers=1, **changes)


def test_an_emulator_process_steps_its_games_in_turn_as_often_as_asked(monkeypatch):
    stepped, done = [], []
    make = impala_parts.make_environment

    def make_watched(*arguments, **options):
        game = make(*arguments, **options)
        step, number = game.step, len(made)
        made.append(game)
        game.step = lambda action: (stepped.append(number), step(action))[1]
        return game

    made = []
    monkeypatch.setattr(impala_parts, "make_environment", make_watched)
    queue = argparse.Namespace(put=done.append)
    with pytest.raises(EOFError):
        impala_parts.emulate(impala.spec_of(small_contender()), [1, 3], Asked(5, 2, 300), queue)
    assert done == [5, 2, 300]
    assert stepped == [0] * 5 + [1] * 2 + [0] * 300


def test_a_process_of_ale_steps_its_games_in_turn_as_often_as_asked(monkeypatch):
    made, done, make = [], [], impala_parts.ale_of

    def make_kept(environment):
        made.append(make(environment))
        return made[-1]

    monkeypatch.setattr(impala_parts, "ale_of", make_kept)
    queue = argparse.Namespace(put=done.append)
    with pytest.raises(EOFError):
        impala_parts.emulate_bare(impala.spec_of(small_contender()), [1, 3], Asked(5, 2, 9), queue)
    assert done == [5, 2, 9]
    assert [game.getFrameNumber() for game in made] == [FRAMES * (5 + 9), FRAMES * 2]


@pytest.fixture
def watched(monkeypatch):
    """The batches that were collected from actors, and the losses of the updates made."""
    played, losses, contexts = [], [], []
    collect, update = impala_parts.Executor.collect, impala_parts.Impala._update
    make = impala_parts.make_context

    def make_context(*arguments, **options):
        contexts.append(make(*arguments, **options))
        return contexts[-1]

    def watched_collect(executor, number):
        played.append(collect(executor, number))
        return played[-1]

    def watched_update(impala, batch):
        update(impala, batch)
        losses.append(impala.loss)

    monkeypatch.setattr(impala_parts, "make_context", make_context)
    monkeypatch.setattr(impala_parts.Executor, "collect", watched_collect)
    monkeypatch.setattr(impala_parts.Impala, "_update", watched_update)
    yield played, losses
    for context in contexts:
        context.trace.close()


@pytest.mark.slow
def test_actors_play_without_a_learner(watched):
    played, losses = watched
    spec = impala.spec_of(small_contender())
    assert next(impala_parts.actors(2 * UPDATE, spec, 1)) == 2 * UPDATE
    first, second = ([(item.actor, item.number) for item in items] for items in played)
    assert first == [(actor, 0) for actor in range(BATCH)]
    assert second == [(actor, 1) for actor in range(BATCH)]
    assert not losses


@pytest.mark.slow
def test_the_learner_learns_without_actors(watched):
    played, losses = watched
    spec = impala.spec_of(small_contender())
    assert next(impala_parts.learner(2 * UPDATE, spec, 1)) == 2 * UPDATE
    assert not played
    assert len(set(losses)) == 2


def test_the_ceiling_by_hand():
    speeds = {
        impala.ACTING.name: [300.0, 600.0, 300.0],
        impala.LEARNING.name: [600.0, 300.0, 600.0],
        impala.ASYNCHRONOUS.name: [150.0, 160.0, 170.0],
        impala.EMULATORS.name: [600.0, 640.0, 680.0],
        impala.ALE.name: [300.0, 320.0, 340.0],
    }
    text = impala.ceiling(speeds)
    assert ": 200, of which the trainer reaches 80.0%" in text
    assert "50.0% of ALE's own speed" in text
    assert "25.0% of the emulators' speed, of which its actors reach 50.0%" in text


# The comparison


def test_the_fastest_setting_of_a_competitor_takes_part(monkeypatch, capsys):
    speeds = dict(
        zip([each.name for each in impala.POOLS], [[1, 1], [3, 4], [9, 1]] * 2, strict=True)
    )
    monkeypatch.setattr(impala, "start_contender", lambda contender, _: contender)
    monkeypatch.setattr(
        impala, "take_turns", lambda processes, _: {n: speeds[n] for n in processes}
    )
    chosen = impala.fastest(impala.POOLS, argparse.Namespace())
    assert statistics.median(speeds[chosen.name]) == 5
    assert len(capsys.readouterr().out.splitlines()) == len(impala.POOLS)


def test_speeds_are_compared_with_the_fastest_competitor():
    first, second = (each.name for each in impala.QUEUES)
    speeds = {
        impala.ASYNCHRONOUS.name: [400.0, 800.0],
        first: [100.0, 200.0],
        second: [50.0, 60.0],
        "pool": [200.0, 400.0],
    }
    lines = impala.speed_table(speeds, [first, second, "pool"]).splitlines()
    assert lines[2] == "| capsule, asynchronous | 600 | 800 | 1.00 | 4.00 | 2.00 |"
    assert lines[3] == f"| {first} | 150 | 200 | 0.25 | 1.00 | 0.50 |"


def test_competitors_run_in_their_own_environments(monkeypatch):
    started = []
    monkeypatch.setattr(impala, "start", lambda command, _: started.append(command))
    options = argparse.Namespace(baseline="sb3", competitors="others", segment=12, clock="wall")
    contenders = (impala.A2C, impala.POOLS[0], impala.FACTORIES[0], impala.POOL_ALONE)
    for contender in (*contenders, impala.QUEUES[0]):
        impala.start_contender(contender, options)
    pythons = [command[0] for command in started]
    assert pythons == ["sb3", "others", "others", "others", impala.sys.executable]


def test_every_role_has_its_function():
    for role in impala.COMPETITORS:
        assert callable(getattr(competitors, role))
    for role in impala.PARTS:
        assert callable(getattr(impala_parts, role))


# Turns of a library


def test_a_library_s_loop_stands_still_between_its_segments():
    pauses, made = plain_impala.Pauses(2 * UPDATE), []

    def learn():
        for step in range(UPDATE, 100 * UPDATE, UPDATE):
            made.append(step)
            pauses.reached(step)

    taken = pauses.segments(learn)
    assert [next(taken) for _ in range(3)] == [WARM_UP * UPDATE, 2 * UPDATE, 2 * UPDATE]
    assert made[-1] == (WARM_UP + 4) * UPDATE


def test_a_loop_that_ends_or_fails_ends_the_benchmark():
    with pytest.raises(RuntimeError, match="has stopped"):
        next(plain_impala.Pauses(UPDATE).segments(lambda: None))
    forever = threading.Event()
    with pytest.raises(RuntimeError, match="has stopped"):
        next(plain_impala.Pauses(UPDATE).segments(forever.wait, lambda: True))
    forever.set()
