"""The observations and memories of the actors of one process, as inputs of a network."""

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
    """The inputs of a network for one step of some actors.

    Attributes:
        observations: ``[rows, frame_stack, *frame_shape]``.
        previous_actions: int64 ``[rows]``; :data:`NO_ACTION` for none.
        previous_rewards: float32 ``[rows]``.
        states: Recurrent states, float32 ``[rows, *state_shape]``.
        instructions: int64 ``[rows, words]``, as :meth:`Vocabulary.encode` numbers words; with 0
            words if the network reads no instructions.
    """

    observations: torch.Tensor
    previous_actions: torch.Tensor
    previous_rewards: torch.Tensor
    states: torch.Tensor
    instructions: torch.Tensor

    def step(self, *, reset: bool) -> Sequences:
        """Return the inputs as sequences of one step, with or without a reset before it."""
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
        """Make rows of zeros, without instructions."""
        stack: Shape = (example.frame_stack, *example.frame_shape)
        self.stacks = np.zeros((count, *stack), example.frame_dtype)
        self.previous_actions = np.zeros(count, np.int64)
        self.previous_rewards = np.zeros(count, np.float32)
        self.states = np.zeros((count, *network.state_shape), np.float32)
        self.instructions = np.full((count, vocabulary.longest), NO_WORD)
        self._texts, self._vocabulary = [""] * count, vocabulary

    def begin(self, row: int, frame: Frame) -> None:
        """Begin an episode with ``frame``, ``[*frame_shape]``, without anything before it."""
        self.stacks[row] = 0
        self.stacks[row, -1] = frame
        self.previous_actions[row] = NO_ACTION
        self.previous_rewards[row] = 0
        self.states[row] = 0

    def advance(self, row: int, action: int, reward: float, frame: Frame) -> None:
        """Enter an action, its reward and the next frame, ``[*frame_shape]``.

        The caller sets the recurrent state.
        """
        self.previous_actions[row] = action
        self.previous_rewards[row] = reward
        self.stacks[row, :-1] = self.stacks[row, 1:]
        self.stacks[row, -1] = frame

    def instruct(self, row: int, instruction: str) -> None:
        """Enter the instruction of an actor.

        Raises:
            CapsuleError: CAP-T242, as :meth:`Vocabulary.encode`.
        """
        # At most steps the instruction is the same as before, and is not encoded again.
        if instruction != self._texts[row]:
            self._texts[row] = instruction
            self.instructions[row] = self._vocabulary.encode(instruction)

    def inputs(self, rows: Sequence[int]) -> Arrays:
        """Return copies of the network's inputs for ``rows``, in the order of :class:`Inputs`."""
        arrays = (
            self.stacks,
            self.previous_actions,
            self.previous_rewards,
            self.states,
            self.instructions,
        )
        # Indexing by a list copies; a slice would be a view, which the next steps would change.
        return tuple(array[list(rows)] for array in arrays)
