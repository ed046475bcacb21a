"""Networks and layers for other processes, which find them by the name of this module."""

from dataclasses import dataclass

import torch

from capsule.training.layers.backends import FIXED_ORDER, LIBRARY
from capsule.training.networks.recurrent import RecurrentNetwork

INPUTS = 8


@dataclass(frozen=True)
class CountingNetwork:
    """Remembers the steps since the last reset and the sum of what it saw in them.

    Made of element-wise basic operations alone, so a row never depends on its batch.
    """

    actions: int
    state_shape = (2, 1)
    products = FIXED_ORDER

    @property
    def shapes(self):
        return {"weight": (self.actions, INPUTS + 4)}

    def unroll(self, parameters, seen):
        observations, actions, rewards, states, resets, _ = seen
        assert observations.shape[:2] == actions.shape == rewards.shape == resets.shape
        assert len(actions) == 1
        pixels = observations[0].flatten(1)
        every = max(1, pixels.shape[1] // INPUTS)
        read = [pixels[:, i].float() / 8 for i in range(0, pixels.shape[1], every)][:INPUTS]
        count, total = states[:, 0, 0] + 1, states[:, 1, 0] + read[-1]
        inputs = [*read, total / count, count / 64, actions[0].float(), rewards[0]]
        values = sum(
            torch.outer(column, parameters["weight"][:, i]) for i, column in enumerate(inputs)
        )
        return values[None], torch.stack((count, total), 1)[:, :, None]


@dataclass(frozen=True)
class PlacedNetwork(CountingNetwork):
    """Whose values depend on the size of a batch and on the place in it, as the libraries' may."""

    products = LIBRARY

    def unroll(self, *inputs):
        values, states = super().unroll(*inputs)
        batch = values.shape[1]
        return values * (1 + torch.arange(batch)[:, None] / 64) + batch, states


@dataclass(frozen=True)
class TellingNetwork(RecurrentNetwork):
    """Fails, and tells of the process it is evaluated in."""

    def unroll(self, *_):
        strict = torch.are_deterministic_algorithms_enabled()
        raise ValueError(f"{torch.get_num_threads()} threads, strict: {strict}")


class LeakyProducts(type(LIBRARY)):
    """Layers in which a row knows the others of its batch, as with batch statistics."""

    def dense(self, inputs, weight, bias):
        return super().dense(inputs - inputs.mean(0), weight, bias)


class SizedProducts(type(LIBRARY)):
    """Layers in which a row knows how many there are, as the libraries' do in its last bits."""

    def dense(self, inputs, weight, bias):
        return super().dense(inputs, weight, bias) * (1 + len(inputs) / 64)


class BrokenProducts(type(LIBRARY)):
    """Layers that fail whenever a process has not made them itself."""

    def __init__(self):
        self.here = True

    def __setstate__(self, _state):
        self.here = False

    def dense(self, inputs, weight, bias):
        if not self.here:
            raise ValueError("as asked")
        return super().dense(inputs, weight, bias)
