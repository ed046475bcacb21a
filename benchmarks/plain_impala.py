"""A plain IMPALA in ``torch.nn``: the network, the game and the loss of all competitors.

:class:`Pauses` lets a library with its own training loop take turns.

The shared queue has the design of MonoBeast (Küttler et al. 2019, arXiv:1910.03552): a process for
each actor, which evaluates its own observations one at a time; unrolls in shared memory, whose
numbers are in two queues; and a learner. ``impala.py`` runs it, and ``competitors.py`` uses its
parts. This module and ``competitors.py`` do not import Capsule, because competitors run in an
environment without it.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any

GAME = "breakout"
FRAMES = 4  # a step
UNROLL = 20
BATCH = 16  # unrolls of an update
WARM_UP = 3  # updates


class Pauses:
    """Pauses the training loop of a library, which runs in another thread, after each segment."""

    def __init__(self, segment: int) -> None:
        """Make the first segment the warm-up; each further segment has ``segment`` steps."""
        self._segment, self._until = segment, WARM_UP * BATCH * UNROLL
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)

    def reached(self, steps: int) -> None:
        """Wait at the end of a segment; the loop calls this with its number of steps so far."""
        if steps >= self._until:
            self._until += self._segment
            self._done.release()
            self._go.acquire()

    def segments(
        self, learn: Callable[[], object], failed: Callable[[], bool] = lambda: False
    ) -> Iterator[int]:
        """Run the loop; yield the number of steps of each segment.

        Raises:
            RuntimeError: The loop has ended, or ``failed`` is true.
        """
        thread = threading.Thread(target=learn, daemon=True)
        for steps in chain([WARM_UP * BATCH * UNROLL], repeat(self._segment)):
            if thread.ident is None:
                thread.start()
            else:
                self._go.release()
            while not self._done.acquire(timeout=1.0):
                if failed() or not thread.is_alive():
                    raise RuntimeError("the training loop has stopped")
            yield steps


def shared_queue(segment: int, *, actors: int, threads: int) -> Iterator[int]:
    """Learn from processes that put unrolls into shared memory.

    Args:
        segment: Steps of each segment after the first.
        actors: Number of actors, each of which is a process.
        threads: Number of threads that learn.

    Yields:
        The number of steps of each segment.
    """
    import torch

    context = multiprocessing.get_context("fork")
    torch.set_num_threads(1)
    acting = make_torch_network().share_memory()
    learning = make_torch_network()
    learning.load_state_dict(acting.state_dict())
    learn = make_torch_learner(learning)
    buffers = [make_buffer() for _ in range(2 * actors)]
    free, full = context.SimpleQueue(), context.SimpleQueue()
    for index in range(len(buffers)):
        free.put(index)
    for seed in range(actors):
        arguments = (seed, acting, buffers, free, full)
        context.Process(target=act, args=arguments, daemon=True).start()
    torch.set_num_threads(threads)
    update, until = BATCH * UNROLL, WARM_UP * BATCH * UNROLL
    while True:
        for _ in range(until // update):
            indices = [full.get() for _ in range(BATCH)]
            batch = {
                name: torch.stack([buffers[index][name] for index in indices], 1)
                for name in buffers[0]
            }
            for index in indices:
                free.put(index)
            learn(batch)
            acting.load_state_dict(learning.state_dict())
        yield until
        until = segment


def make_torch_learner(network: Any) -> Callable[[dict[str, Any]], None]:
    """Return the function that updates a network with a batch of unrolls."""
    import torch

    optimizer = torch.optim.RMSprop(network.parameters(), lr=0.0006, alpha=0.99, eps=0.01)

    def learn(batch: dict[str, Any]) -> None:
        optimizer.zero_grad()
        torch_loss(network, batch).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 40.0)
        optimizer.step()

    return learn


def make_buffer() -> dict[str, Any]:
    """Return shared memory for an unroll: a row for each step, and one for the next."""
    import torch

    rows = UNROLL + 1
    buffer = {
        "observations": torch.zeros(rows, 4, 84, 84, dtype=torch.uint8),
        "rewards": torch.zeros(rows),
        "ended": torch.zeros(rows, dtype=torch.bool),
        "actions": torch.zeros(rows, dtype=torch.int64),
        "log_behaviour": torch.zeros(rows),
    }
    return {name: tensor.share_memory_() for name, tensor in buffer.items()}


def shallow_torso() -> Any:
    """Return the shallow network of figure 3 up to its dense layer, in torch's own modules."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(4, 16, 8, 4),
        nn.ReLU(),
        nn.Conv2d(16, 32, 4, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 9 * 9, 256),
        nn.ReLU(),
    )


def make_torch_network() -> Any:
    """Return the shallow network without an LSTM: observations to logits and baselines."""
    from torch import nn

    actions = len(minimal_actions())

    class Shallow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.torso = shallow_torso()
            self.policy = nn.Linear(256, actions)
            self.baseline = nn.Linear(256, 1)

        def forward(self, observations: Any) -> Any:
            hidden = self.torso(observations.flatten(0, -4).float() / 255)
            shape = observations.shape[:-3]
            return self.policy(hidden).view(*shape, -1), self.baseline(hidden).view(shape)

    return Shallow()


def minimal_actions() -> Sequence[Any]:
    import ale_py
    from ale_py import roms

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    emulator = ale_py.ALEInterface()
    if (rom := roms.get_rom_path(GAME)) is None:
        raise FileNotFoundError(f"ale-py has no {GAME}")
    emulator.loadROM(rom)
    return emulator.getMinimalActionSet()


def act(seed: int, network: Any, buffers: Any, free: Any, full: Any) -> None:
    """Run as an actor: fill buffers that are free."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    environment = make_gymnasium_game()
    seen = torch.from_numpy(environment.reset(seed=seed)[0])
    reward, ended = 0.0, True
    while True:
        index = free.get()
        buffer = buffers[index]
        for row in range(UNROLL + 1):
            buffer["observations"][row] = seen
            buffer["rewards"][row], buffer["ended"][row] = reward, ended
            if row == UNROLL:
                break
            with torch.no_grad():
                logits, _ = network(seen.unsqueeze(0))
                policy = torch.distributions.Categorical(logits=logits[0])
                action = policy.sample()
                buffer["log_behaviour"][row] = policy.log_prob(action)
            buffer["actions"][row] = action
            observation, gained, terminated, truncated, _ = environment.step(int(action))
            reward, ended = max(-1.0, min(float(gained), 1.0)), terminated or truncated
            if ended:
                observation, _ = environment.reset()
            seen = torch.from_numpy(observation)
        full.put(index)


def make_gymnasium_game() -> Any:
    """Return the game with Gymnasium's wrappers that give it Capsule's preprocessing."""
    import ale_py
    import gymnasium
    import numpy as np
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TransformObservation

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gymnasium.register_envs(ale_py)
    game = gymnasium.make(f"ALE/{GAME.capitalize()}-v5", frameskip=1, repeat_action_probability=0)
    stacked = FrameStackObservation(AtariPreprocessing(game, terminal_on_life_loss=True), 4)
    return TransformObservation(stacked, np.asarray, stacked.observation_space)


def torch_loss(network: Any, batch: dict[str, Any]) -> Any:
    """Return the loss of unrolls, ``[UNROLL + 1, BATCH]``."""
    import torch

    logits, baselines = network(batch["observations"])
    policy = torch.distributions.Categorical(logits=logits[:-1])
    log_target = policy.log_prob(batch["actions"][:-1])
    rewards, discounts = batch["rewards"][1:], 0.99 * ~batch["ended"][1:]
    with torch.no_grad():
        ratios = (log_target - batch["log_behaviour"][:-1]).exp().clamp(max=1)
        errors = ratios * (rewards + discounts * baselines[1:] - baselines[:-1])
        differences = [torch.zeros(BATCH)]
        for error, ratio, discount in zip(
            reversed(errors), reversed(ratios), reversed(discounts), strict=True
        ):
            differences.append(error + discount * ratio * differences[-1])
        targets = baselines + torch.stack(differences[::-1])
        advantages = ratios * (rewards + discounts * targets[1:] - baselines[:-1])
    missed = targets[:-1] - baselines[:-1]
    return (
        -(log_target * advantages).sum()
        + 0.5 * 0.5 * missed.square().sum()
        - 0.01 * policy.entropy().sum()
    )
