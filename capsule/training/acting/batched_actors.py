"""What the actors of one process see and remember, a row each, as networks take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from capsule.training.acting.batching import Arrays
from capsule.training.environments import Environment, Frame
from capsule.training.networks.feedforward import Shape
from capsule.training.networks.language import NO_INSTRUCTIONS, NO_WORD, Vocabulary
from capsule.training.networks.recurrent import Architecture, Sequences

NO_ACTION = -1


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

    def step(self, *, reset: bool) -> Sequences:
        """Return them as sequences of one step, with or without a reset before it."""
        resets = torch.full_like(self.previous_actions, reset, dtype=torch.bool)
        return Sequences(
            self.observations.unsqueeze(0),
            self.previous_actions.unsqueeze(0),
            self.previous_rewards.unsqueeze(0),
            self.states,
            resets.unsqueeze(0),
            self.instructions.unsqueeze(0),
        )


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
        count: int,
        example: Environment,
        network: Architecture,
        vocabulary: Vocabulary = NO_INSTRUCTIONS,
    ) -> None:
        """Make rows of zeros, with nothing told."""
        stack: Shape = (example.frame_stack, *example.frame_shape)
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
        # At most steps it is the same as before, and nothing has to be encoded.
        if instruction != self._told[row]:
            self._told[row] = instruction
            self.instructions[row] = self._vocabulary.encode(instruction)

    def inputs(self, rows: Sequence[int]) -> Arrays:
        """Return what a network takes of ``rows``, as :class:`Inputs` has it: copies."""
        arrays = (
            self.stacks,
            self.previous_actions,
            self.previous_rewards,
            self.states,
            self.instructions,
        )
        # Indexing by a list copies. A slice would be a view, which the next steps would change.
        return tuple(array[list(rows)] for array in arrays)
