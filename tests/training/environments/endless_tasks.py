"""A task that only its time limit ends: a module of ``environment.modules`` in tests.

``capsule-tests/Endless-v0`` shows the same number, or image, for ever and pays 1 for every step. It
is registered with a limit of 2 steps.
"""

import gymnasium
import numpy as np
from gymnasium import spaces

NAME = "capsule-tests/Endless-v0"
STEPS = 2


class Endless(gymnasium.Env):
    """See the module."""

    observation_space = spaces.Dict(
        {
            "number": spaces.Box(0.0, 1.0, (1,), np.float32),
            "image": spaces.Box(0, 255, (20, 20, 1), np.uint8),
        }
    )
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):  # noqa: ARG002 - the interface's
        super().reset(seed=seed)
        return self._observation(), {}

    def step(self, action):  # noqa: ARG002
        return self._observation(), 1.0, False, False, {}

    def _observation(self):
        return {"number": np.ones(1, np.float32), "image": np.full((20, 20, 1), 1, np.uint8)}


gymnasium.register(NAME, Endless, max_episode_steps=STEPS)
