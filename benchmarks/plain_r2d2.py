"""A plain R2D2 in torch's own modules, with which ``r2d2.py`` compares Capsule's.

It has the same network, update and acting, without optimisations: ``nn.LSTM``, a sum tree of Python
lists, frame stacks by ``np.stack``, one environment at a time. Sequences never reach the end of an
episode here, so nothing is padded or reset.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

STACK = 4
EXPLORATION = 0.1
_random = random.Random(0)  # noqa: S311 - as one would


@dataclass(frozen=True)
class Sizes:
    """Hyper-parameters, with their names in a spec."""

    actions: int
    recurrent_units: int
    hidden_units: int
    burn_in: int
    sequence_length: int
    n_step: int
    batch_size: int
    discount: float
    rescaling_epsilon: float
    priority_exponent: float
    priority_maximum_share: float
    importance_exponent: float
    learning_rate: float
    adam_epsilon: float
    max_gradient_norm: float

    @property
    def rows(self) -> int:
        """Number of states in a sequence."""
        return self.burn_in + self.sequence_length + self.n_step


class Network(nn.Module):
    """Convolutions, LSTM and dueling heads."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.actions = sizes.actions
        self.convolutions = nn.Sequential(
            *(nn.Conv2d(STACK, 32, 8, 4), nn.ReLU()),
            *(nn.Conv2d(32, 64, 4, 2), nn.ReLU()),
            *(nn.Conv2d(64, 64, 3, 1), nn.ReLU()),
            nn.Flatten(),
        )
        self.lstm = nn.LSTM(3136 + 1 + sizes.actions, sizes.recurrent_units)
        self.advantage, self.value = (
            nn.Sequential(
                nn.Linear(sizes.recurrent_units, sizes.hidden_units),
                nn.ReLU(),
                nn.Linear(sizes.hidden_units, outputs),
            )
            for outputs in (sizes.actions, 1)
        )

    def forward(
        self,
        observations: torch.Tensor,
        actions: torch.Tensor,
        rewards: torch.Tensor,
        state: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return Q-values ``[time, batch, actions]`` and the state after.

        Args:
            observations: uint8 ``[time, batch, 4, 84, 84]``.
            actions: int64 ``[time, batch]``, the previous actions.
            rewards: float32 ``[time, batch]``, the previous rewards.
            state: Hidden state and cell state, each ``[1, batch, units]``.
        """
        features = self.convolutions(observations.flatten(0, 1).float() / 255)
        features = features.view(*actions.shape, -1)
        action = nn.functional.one_hot(actions, self.actions).float()
        inputs = torch.cat((features, rewards.unsqueeze(2), action), 2)
        hidden, state = self.lstm(inputs, state)
        advantage = self.advantage(hidden)
        return self.value(hidden) + advantage - advantage.mean(2, keepdim=True), state


class SumTree:
    """Priorities in a list; leaf ``i`` is node ``size + i``."""

    def __init__(self, size: int) -> None:
        self.size = 1 << (size - 1).bit_length()
        self.nodes = [0.0] * (2 * self.size)

    def set(self, leaf: int, priority: float) -> None:
        """Give a leaf a priority."""
        node = leaf + self.size
        self.nodes[node] = priority
        while node > 1:
            node //= 2
            self.nodes[node] = self.nodes[2 * node] + self.nodes[2 * node + 1]

    def find(self, number: float) -> int:
        """Return the leaf whose share of the total contains a number."""
        node = 1
        while node < self.size:
            node *= 2
            if number >= self.nodes[node]:
                number -= self.nodes[node]
                node += 1
        return node - self.size


class Replay:
    """A list of sequences."""

    def __init__(self, sizes: Sizes, sequences: Sequence[Mapping[str, Any]]) -> None:
        self.sizes, self.sequences = sizes, sequences
        self.tree = SumTree(len(sequences))
        for index in range(len(sequences)):
            self.tree.set(index, 1.0)

    def sample(self) -> tuple[list[int], NDArray[np.float32], dict[str, NDArray[Any]]]:
        """Return indices, importance weights, and the sequences, time-major."""
        nodes, batch = self.tree.nodes, self.sizes.batch_size
        indices = [self.tree.find(_random.random() * nodes[1]) for _ in range(batch)]
        chances = np.array([nodes[self.tree.size + index] / nodes[1] for index in indices])
        weights = (len(self.sequences) * chances) ** -self.sizes.importance_exponent
        drawn = [self.sequences[index] for index in indices]
        fields = {
            name: np.stack([sequence[name] for sequence in drawn], 1)
            for name in ("actions", "rewards", "terminals", "hidden", "cell")
        }
        fields["observations"] = np.stack(
            [
                np.stack([sequence["frames"][t : t + STACK] for t in range(self.sizes.rows)])
                for sequence in drawn
            ],
            1,
        )
        return indices, (weights / weights.max()).astype(np.float32), fields

    def update(self, indices: Sequence[int], priorities: Sequence[float]) -> None:
        """Give sequences new priorities."""
        for index, priority in zip(indices, priorities, strict=True):
            self.tree.set(index, (priority + 1e-6) ** self.sizes.priority_exponent)


class Learner:
    """Online and target network, Adam and a replay memory."""

    def __init__(self, sizes: Sizes, replay: Replay) -> None:
        self.sizes, self.replay = sizes, replay
        self.online, self.target = Network(sizes), Network(sizes)
        self.target.load_state_dict(self.online.state_dict())
        self.optimizer = torch.optim.Adam(
            self.online.parameters(), sizes.learning_rate, eps=sizes.adam_epsilon
        )

    def update(self) -> None:
        """Make one update."""
        sizes = self.sizes
        indices, weights, fields = self.replay.sample()
        batch = {name: torch.from_numpy(array) for name, array in fields.items()}
        with torch.no_grad():
            target_values = self._values(self.target, batch)
        values = self._values(self.online, batch)
        targets = self._targets(batch, values.detach(), target_values)
        taken = batch["actions"][sizes.burn_in + 1 :][: sizes.sequence_length]
        chosen = values[: sizes.sequence_length].gather(2, taken.unsqueeze(2)).squeeze(2)
        errors = targets - chosen
        loss = (torch.from_numpy(weights) * 0.5 * errors.square().sum(0)).mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.online.parameters(), sizes.max_gradient_norm)
        self.optimizer.step()
        sizes_of_errors, share = errors.detach().abs(), sizes.priority_maximum_share
        priorities = share * sizes_of_errors.max(0).values + (1 - share) * sizes_of_errors.mean(0)
        self.replay.update(indices, priorities.tolist())

    def _values(self, network: Network, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return Q-values from the end of the burn-in on."""
        inputs = [batch[name] for name in ("observations", "actions", "rewards")]
        inputs[1], inputs[2] = inputs[1][:-1], inputs[2][:-1]  # the ones before each state
        state = batch["hidden"], batch["cell"]
        burn_in = self.sizes.burn_in
        if burn_in:
            with torch.no_grad():
                _, state = network(*(each[:burn_in] for each in inputs), state)
        values: torch.Tensor = network(*(each[burn_in:] for each in inputs), state)[0]
        return values

    def _targets(
        self, batch: Mapping[str, torch.Tensor], online: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        """Return n-step double-Q targets ``[trained, batch]``, rescaled."""
        sizes, epsilon = self.sizes, self.sizes.rescaling_epsilon
        best = online.argmax(2, keepdim=True)
        values = target.gather(2, best).squeeze(2)
        root = ((1 + 4 * epsilon * (values.abs() + 1 + epsilon)).sqrt() - 1) / (2 * epsilon)
        values = values.sign() * (root.square() - 1)
        rewards = batch["rewards"][sizes.burn_in + 1 :]
        running = 1 - batch["terminals"][sizes.burn_in + 1 :].float()
        returns = values[sizes.n_step :]
        for ahead in reversed(range(sizes.n_step)):
            steps = slice(ahead, ahead + sizes.sequence_length)
            returns = rewards[steps] + sizes.discount * running[steps] * returns
        return returns.sign() * ((returns.abs() + 1).sqrt() - 1) + epsilon * returns


def synthetic_sequences(sizes: Sizes, count: int) -> list[dict[str, Any]]:
    """Return sequences of noise; ``actions`` and ``rewards`` begin with those before the first."""
    noise = np.random.default_rng(0)
    shape = sizes.rows + 1
    return [
        {
            "frames": noise.integers(0, 256, (sizes.rows + STACK - 1, 84, 84), np.uint8),
            "actions": noise.integers(0, sizes.actions, shape),
            "rewards": noise.standard_normal(shape).astype(np.float32),
            "terminals": np.zeros(shape, np.bool_),
            "hidden": np.zeros((1, sizes.recurrent_units), np.float32),
            "cell": np.zeros((1, sizes.recurrent_units), np.float32),
        }
        for _ in range(count)
    ]


def act(sizes: Sizes, environments: Sequence[Any], steps: int) -> Iterator[int]:
    """Play ``steps`` steps of each environment at a time, one after the other; yield their number.

    Args:
        sizes: Sizes of the network.
        environments: Environments with ``reset`` and ``step`` as in Capsule.
        steps: Number of steps of each environment between two yields.
    """
    network = Network(sizes)
    players = [_play(sizes, network, environment) for environment in environments]
    while True:
        for _ in range(steps):
            for player in players:
                next(player)
        yield steps * len(players)


def _play(sizes: Sizes, network: Network, environment: Any) -> Iterator[None]:
    memory: list[tuple[Any, ...]] = []
    while True:
        frame = environment.reset()
        frames = deque([np.zeros_like(frame)] * (STACK - 1) + [frame], STACK)
        state = (torch.zeros(1, 1, sizes.recurrent_units), torch.zeros(1, 1, sizes.recurrent_units))
        action, reward, ended = 0, 0.0, False
        while not ended:
            before = state
            with torch.no_grad():
                values, state = network(
                    torch.from_numpy(np.stack(frames)).view(1, 1, STACK, *frame.shape),
                    torch.tensor([[action]]),
                    torch.tensor([[reward]]),
                    state,
                )
            action = int(values.argmax())
            if _random.random() < EXPLORATION:
                action = _random.randrange(sizes.actions)
            transition = environment.step(action)
            reward, ended = float(transition.reward), transition.ended
            memory.append((frames[-1], action, reward, transition.terminal, before))
            del memory[: -sizes.rows]  # what a sequence is made of
            frames.append(transition.frame)
            yield
