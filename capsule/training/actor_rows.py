"""What the actors of one process see and remember, a row each, and networks evaluated on it.

How actors are spread over processes, and which of them are evaluated together, changes no bit.
Under ``CHAINED`` of :mod:`capsule.training.products` a row of the results depends on nothing but
its inputs, and any actors are evaluated in one batch. The libraries' products depend on the size of
the batch and on the row's place in it: there each batch has a fixed number of rows, say 16, of
which actor ``i`` always has row ``i mod 16`` among actors of the same ``i // 16``, and rows of all
others are zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from capsule.training.environments import Environment, Frame
from capsule.training.inference import ROWS
from capsule.training.language import NO_INSTRUCTIONS, NO_WORD, Vocabulary
from capsule.training.networks import Shape
from capsule.training.products import CHAINED
from capsule.training.recurrent_networks import Architecture

NO_ACTION = -1

Arrays = tuple[NDArray[Any], ...]


class Inputs(NamedTuple):
    """One step of some actors, as a network takes it.

    Attributes:
        observations: ``[rows, frame_stack, *frame_shape]``.
        previous_actions: int64 ``[rows]``; :data:`NO_ACTION` for none.
        previous_rewards: float32 ``[rows]``.
        states: Recurrent, float32 ``[rows, *state_shape]``.
        instructions: int64 ``[rows, words]``, as :meth:`Vocabulary.encode` numbers them; of no
            words where there are none.
    """

    observations: torch.Tensor
    previous_actions: torch.Tensor
    previous_rewards: torch.Tensor
    states: torch.Tensor
    instructions: torch.Tensor


class Evaluate(Protocol):
    """A network with parameters: inputs to outputs, of which each has a row for each row."""

    def __call__(self, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Evaluate one batch."""


class ActorRows:
    """Frame stacks, recurrent states, previous actions, rewards and instructions of some actors.

    Attributes:
        stacks: ``[rows, frame_stack, *frame_shape]``, the newest frame last.
        previous_actions: int64 ``[rows]``.
        previous_rewards: float32 ``[rows]``.
        states: float32 ``[rows, *state_shape]``.
        instructions: int64 ``[rows, words]``.
    """

    def __init__(
        self,
        actors: Sequence[int],
        example: Environment,
        network: Architecture,
        vocabulary: Vocabulary = NO_INSTRUCTIONS,
        *,
        size: int = ROWS,
    ) -> None:
        """Make rows of zeros, with nothing told.

        Args:
            actors: The actor of each row.
            example: What they all play.
            network: What will be evaluated.
            vocabulary: What instructions are made of.
            size: Rows of a batch, where it matters.
        """
        count = len(actors)
        stack: Shape = (example.frame_stack, *example.frame_shape)
        self._actors, self._size = actors, size
        self._independent = isinstance(network.products, type(CHAINED))
        self.stacks = np.zeros((count, *stack), example.frame_dtype)
        self.previous_actions = np.zeros(count, np.int64)
        self.previous_rewards = np.zeros(count, np.float32)
        self.states = np.zeros((count, *network.state_shape), np.float32)
        self.instructions = np.full((count, vocabulary.longest), NO_WORD)
        self._told, self._vocabulary = [""] * count, vocabulary

    def begin(self, row: int, frame: Frame) -> None:
        """Begin an episode with ``frame``: there is nothing before it."""
        self.stacks[row] = 0
        self.stacks[row, -1] = frame
        self.previous_actions[row] = NO_ACTION
        self.previous_rewards[row] = 0
        self.states[row] = 0

    def advance(self, row: int, action: int, reward: float, frame: Frame) -> None:
        """Enter what was done and what it led to; the recurrent state is the caller's."""
        self.previous_actions[row] = action
        self.previous_rewards[row] = reward
        self.stacks[row, :-1] = self.stacks[row, 1:]
        self.stacks[row, -1] = frame

    def tell(self, row: int, instruction: str) -> None:
        """Enter what an actor is told to do from now on.

        Raises:
            CapsuleError: CAP-T242, the vocabulary has no numbers for it.
        """
        if instruction != self._told[row]:
            self._told[row] = instruction
            self.instructions[row] = self._vocabulary.encode(instruction)

    def evaluate(self, rows: Sequence[int], network: Evaluate) -> tuple[NDArray[np.float32], ...]:
        """Return the outputs of a network for ``rows``, which ascend."""
        parts = [self._evaluate_batch(network, *batch) for batch in self._batches(rows)]
        return tuple(np.concatenate(outputs) for outputs in zip(*parts, strict=True))

    def inputs(self, rows: Sequence[int]) -> Arrays:
        """Return what a network takes of ``rows``, as :class:`Inputs` has it."""
        return tuple(array[rows] for array in self._arrays())

    def _arrays(self) -> Arrays:
        return (
            self.stacks,
            self.previous_actions,
            self.previous_rewards,
            self.states,
            self.instructions,
        )

    def _batches(self, rows: Sequence[int]) -> Iterator[tuple[list[int], list[int], int]]:
        """Yield some of ``rows`` at a time, their places in a batch, and its size."""
        if self._independent:
            yield list(rows), list(range(len(rows))), len(rows)
            return
        for _, group in groupby(rows, lambda row: self._actors[row] // self._size):
            batch = list(group)
            yield batch, [self._actors[row] % self._size for row in batch], self._size

    def _evaluate_batch(
        self, network: Evaluate, rows: list[int], places: list[int], size: int
    ) -> list[NDArray[np.float32]]:
        """Evaluate a batch of ``size`` with zeros where no row has its place."""

        def batch(array: NDArray[Any]) -> torch.Tensor:
            result = np.zeros((size, *array.shape[1:]), array.dtype)
            result[places] = array[rows]
            return torch.from_numpy(result)

        with torch.inference_mode():
            outputs = network(Inputs(*map(batch, self._arrays())))
        return [output.numpy()[places] for output in outputs]
