"""The policy of a network with a memory, for evaluations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from capsule.experiment.spec import EnvironmentSpec
from capsule.training.acting.batched_actors import Inputs
from capsule.training.evaluation.protocol import ObservationBatch
from capsule.training.networks.language import NO_INSTRUCTIONS, Vocabulary
from capsule.training.networks.recurrent import Architecture

Evaluate = Callable[[Inputs], tuple[torch.Tensor, torch.Tensor]]
"""A function of the inputs of one step, which returns values and the recurrent states after it.

The values are Q-values or logits, float32 ``[rows, actions]``; or state values, ``[rows, 1]``.
"""


class RecurrentPolicy:
    """The policy of a network, with the recurrent state of each row."""

    recurrent = True

    def __init__(
        self,
        network: Architecture,
        environment: EnvironmentSpec,
        device: torch.device,
        evaluate: Evaluate,
        vocabulary: Vocabulary = NO_INSTRUCTIONS,
        value: Evaluate | None = None,
    ) -> None:
        """Begin with recurrent states of zero.

        Args:
            network: The network without its parameters.
            environment: The spec's ``environment`` section. If it clips rewards, the network also
                reads their signs as previous rewards here, as in training.
            device: The device of the parameters.
            evaluate: Returns Q-values or logits.
            vocabulary: The words of instructions.
            value: Returns the values of states; by default, they are the largest Q-values.
        """
        self._state_shape, self._device, self._evaluate = network.state_shape, device, evaluate
        self._value = value or evaluate
        self._vocabulary = vocabulary
        self._clips_rewards = getattr(environment, "clip_rewards", False)
        self._states: torch.Tensor | None = None

    def __call__(self, seen: ObservationBatch) -> NDArray[np.float32]:
        """Return the values of each row, and update the recurrent states of active rows.

        Raises:
            CapsuleError: CAP-T242, as :meth:`Vocabulary.encode`.
        """
        return self._step(seen, self._evaluate)

    def state_values(self, seen: ObservationBatch) -> NDArray[np.float32]:
        """Return the value of the state of each row, and update the states of active rows.

        Raises:
            CapsuleError: CAP-T242, as :meth:`Vocabulary.encode`.
        """
        largest: NDArray[np.float32] = self._step(seen, self._value).max(axis=1)
        return largest

    def _step(self, seen: ObservationBatch, evaluate: Evaluate) -> NDArray[np.float32]:
        told = np.stack([self._vocabulary.encode(text) for text in seen.instructions])
        earned = np.sign(seen.previous_rewards) if self._clips_rewards else seen.previous_rewards
        observations, actions, rewards, instructions, begins, active = (
            torch.from_numpy(array).to(self._device)
            for array in (
                seen.observations,
                seen.previous_actions,
                earned,
                told,
                seen.begins,
                seen.active,
            )
        )
        shape = (len(begins), *self._state_shape)
        if self._states is None:
            self._states = torch.zeros(shape, device=self._device)
        wide = (-1, *[1] * (len(shape) - 1))
        with torch.inference_mode():
            # When starts are generated, a row has several candidates one after the other, each of
            # which begins with a state of zero.
            before = self._states.masked_fill(begins.view(wide), 0.0)
            values, after = evaluate(Inputs(observations, actions, rewards, before, instructions))
            self._states = torch.where(active.view(wide), after, before)
        found: NDArray[np.float32] = values.cpu().numpy()
        return found
