"""The greedy policy of a recurrent network, for evaluations."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from capsule.training.evaluation import Seen
from capsule.training.networks import Parameters
from capsule.training.recurrent_networks import RecurrentNetwork


class RecurrentPolicy:
    """The greedy policy of a recurrent network, with what it remembers of each row."""

    recurrent = True

    def __init__(
        self, network: RecurrentNetwork, parameters: Parameters, *, clips_rewards: bool
    ) -> None:
        self._network = network
        self._parameters = parameters
        self._clips_rewards = clips_rewards
        self._states: torch.Tensor | None = None

    def __call__(self, seen: Seen) -> NDArray[np.float32]:
        """Return the Q-values of each row, and remember what the active ones saw."""
        device = self._parameters.flat.device
        earned = np.sign(seen.previous_rewards) if self._clips_rewards else seen.previous_rewards
        observations, actions, rewards, begins, active = (
            torch.from_numpy(array).to(device)
            for array in (
                seen.observations,
                seen.previous_actions,
                earned,
                seen.begins,
                seen.active,
            )
        )
        shape = (len(begins), *self._network.state_shape)
        if self._states is None:
            self._states = torch.zeros(shape, device=device)
        wide = (-1, *[1] * (len(shape) - 1))
        with torch.inference_mode():
            before = self._states.masked_fill(begins.view(wide), 0.0)
            values, after = self._network.unroll(
                self._parameters.views,
                observations.unsqueeze(0),
                actions.unsqueeze(0),
                rewards.unsqueeze(0),
                before,
                torch.ones_like(begins).unsqueeze(0),
            )
            self._states = torch.where(active.view(wide), after, before)
        found: NDArray[np.float32] = values[0].cpu().numpy()
        return found
