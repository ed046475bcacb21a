"""The separate parts of Capsule's IMPALA, for ``impala.py``: ALE, emulators, actors, learner.

Each yields the number of steps of a segment, as the whole trainer does. Each part has all the
processors, which the trainer divides between actors and learner. So if the actors alone make ``a``
frames per second and the learner alone ``l``, both together make at most ``1 / (1 / a + 1 / l)``.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, cycle
from typing import TYPE_CHECKING, Any

import ale_py
import numpy as np
import torch
from ale_py import roms
from learners import make_context
from plain_impala import BATCH, UNROLL

from capsule.experiment.inference import Inference
from capsule.experiment.trainers.impala import ImpalaTrainer
from capsule.training.acting.actor_worker import ActorRequest, actor_streams
from capsule.training.environments import make_environment
from capsule.training.impala.factory import (
    make_learners,
    make_network,
    make_schedule,
    make_settings,
    make_transport,
)
from capsule.training.impala.learner import Impala
from capsule.training.impala.schedule.executor import Executor, Item
from capsule.training.networks.feedforward import Parameters, initialize
from capsule.training.state.streams import make_streams

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from capsule.experiment.spec import TrainingSpec
    from capsule.training.impala.actors.actor_worker import UnrollSettings
    from capsule.training.trainer import TrainerContext


def ale(segment: int, spec: TrainingSpec, workers: int) -> Iterator[int]:
    """Step the games of ALE at random, without preprocessing, in ``workers`` processes."""
    return in_processes(emulate_bare, segment, spec, workers)


def emulators(segment: int, spec: TrainingSpec, workers: int) -> Iterator[int]:
    """Step the games at random, with their preprocessing, in ``workers`` processes."""
    return in_processes(emulate, segment, spec, workers)


def in_processes(
    play: Callable[..., None], segment: int, spec: TrainingSpec, workers: int
) -> Iterator[int]:
    """Let processes step their games as often as a segment has steps, and yield that number."""
    context = multiprocessing.get_context("fork")
    asked, done = context.SimpleQueue(), context.SimpleQueue()
    for number in range(workers):
        played = range(number, trainer_of(spec).actors, workers)
        context.Process(target=play, args=(spec, played, asked, done), daemon=True).start()
    while True:
        for _ in range(segment // UNROLL):
            asked.put(UNROLL)
        yield sum(done.get() for _ in range(segment // UNROLL))


def emulate_bare(spec: TrainingSpec, played: Sequence[int], asked: Any, done: Any) -> None:
    """Run as a process of :func:`ale`: take the requested number of steps, the games in turns."""
    games = [ale_of(spec.environment) for _ in played]
    noise = np.random.default_rng(played[0])
    for game in cycle(games):
        steps = asked.get()
        codes = game.getMinimalActionSet()
        for action in noise.integers(len(codes), size=steps).tolist():
            game.act(codes[action])
            if game.game_over():
                game.reset_game()
        done.put(steps)


def ale_of(environment: Any) -> Any:
    """Return ALE with a game in which an action lasts as many frames as in the spec."""
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    game: Any = ale_py.ALEInterface()
    game.setFloat("repeat_action_probability", 0.0)
    game.setInt("frame_skip", environment.frame_skip)
    game.loadROM(roms.get_rom_path(environment.game))
    return game


def emulate(spec: TrainingSpec, played: Sequence[int], asked: Any, done: Any) -> None:
    """Run as a process of :func:`emulators`: take the requested steps, the games in turns."""
    games = [
        make_environment(spec.environment, actor_streams(spec.seeds, actor), training=True)
        for actor in played
    ]
    for game in games:
        game.reset()
    noise = np.random.default_rng(played[0])
    for game in cycle(games):
        steps = asked.get()
        for action in noise.integers(game.actions, size=steps).tolist():
            game.step(action)
            if game.ended:
                game.reset()
        done.put(steps)


def actors(segment: int, spec: TrainingSpec, workers: int) -> Iterator[int]:
    """Let the actors play unrolls that no learner learns."""
    context = make_context(spec, workers=workers)
    trainer, (settings, theta) = trainer_of(spec), playing(context)
    schedule = make_schedule(context, trainer)
    transport = make_transport(context, trainer, settings, schedule.lag)
    executor = Executor(schedule, transport, trainer.actors)
    updates = count()
    while True:
        for _ in range(segment // (BATCH * UNROLL)):
            update = next(updates)
            executor.publish(update, theta)
            executor.collect(update)
        yield segment


def learner(segment: int, spec: TrainingSpec, workers: int) -> Iterator[int]:
    """Let the learner learn the same unrolls again and again."""
    context = make_context(spec, workers=workers)
    trainer, (settings, theta) = trainer_of(spec), playing(context)
    requests = [ActorRequest(actor, 0) for actor in range(BATCH)]
    played = settings.make_worker(range(BATCH)).play(requests, {0: theta}, 0)
    items = [Item(each.actor, 0, 0, each.experience) for each in played]
    example = make_environment(spec.environment, make_streams(spec.seeds), training=True)
    network = make_network(trainer, example, spec.accelerator)
    learners = partial(make_learners, context, network, example.frame_stack)
    inference = Inference(rows=settings.rows, independent=True, tested_rows=0, replicas=0)
    impala = Impala(context, trainer, network, learners, Repeated(items), None, None, inference)  # type: ignore[arg-type]
    while True:
        before = impala.step
        while impala.step < before + segment:
            impala.train_step()
        yield impala.step - before


class Repeated:
    """An executor whose actors have always finished the same unrolls."""

    def __init__(self, items: list[Item]) -> None:
        self._items = items

    def publish(self, version: int, parameters: NDArray[np.float32]) -> None:
        """Ignore a version of the policy, because no actor plays."""

    def collect(self, update: int) -> list[Item]:  # noqa: ARG002
        """Return the unrolls of an update."""
        return self._items


def playing(context: TrainerContext) -> tuple[UnrollSettings, NDArray[np.float32]]:
    """Return the function that makes the actors of a run, and the first version of their policy."""
    spec, trainer = context.spec, trainer_of(context.spec)
    example = make_environment(spec.environment, make_streams(spec.seeds), training=True)
    settings = make_settings(context, trainer, example)
    theta = Parameters(settings.network.shapes, torch.device("cpu"))
    initialize(theta, context.streams["initialization"], trainer.initialization)
    return settings, theta.flat.numpy()


def trainer_of(spec: TrainingSpec) -> ImpalaTrainer:
    """Return the trainer of a spec of IMPALA."""
    if not isinstance(spec.trainer, ImpalaTrainer):
        raise TypeError(f"{spec.trainer.algorithm} has no such parts")
    return spec.trainer
