"""A task to unroll by hand, and to disturb: a module of ``environment.modules`` in tests.

``capsule-tests/Counting-v0`` shows how many steps the episode has had, the last action (-1: none)
and a number of the episode. Of an episode's seed follow its length and whether it is terminated or
truncated at its end. Environment variables disturb it, which no spec knows of:

* ``COUNTING_SLEEP``: sleep a random time, up to so many milliseconds, in every step.
* ``COUNTING_SLOW``: ``REMAINDER``, sleep 10 milliseconds in every step of the episodes whose seed
  leaves it when divided by 3.
* ``COUNTING_LIE``, ``COUNTING_DIE``: ``SEED:STEP``, the step of the episode of this seed in which
  it shows something else, or kills its process.
"""

import os
import random
import signal
import time

import gymnasium
import numpy as np
from gymnasium import spaces

REWARDS = (1.5, -0.0, -3.0, -0.0)
NAME = "capsule-tests/Counting-v0"


def length_of(seed):
    """Return the steps of an episode."""
    return 2 + seed % 4


def is_truncated(seed):
    """Tell whether an episode is truncated at its end."""
    return seed // 4 % 2 == 1


class Counting(gymnasium.Env):
    """See the module."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        del options
        self.seed, self.count = seed, 0
        return self._observation(-1), {}

    def step(self, action):
        self._disturb()
        self.count += 1
        end = self.count == length_of(self.seed)
        truncated = end and is_truncated(self.seed)
        reward = REWARDS[(self.count + action) % 4]
        return self._observation(action), reward, end and not truncated, truncated, {}

    def _observation(self, action):
        lies = self._is("COUNTING_LIE")
        return np.array([self.count + 0.5 * lies, action, self.seed % 97 / 97], np.float32)

    def _disturb(self):
        longest = float(os.environ.get("COUNTING_SLEEP", "0"))
        time.sleep(random.SystemRandom().random() * longest / 1_000)
        if os.environ.get("COUNTING_SLOW") == str(self.seed % 3):
            time.sleep(0.01)
        if self._is("COUNTING_DIE"):
            os.kill(os.getpid(), signal.SIGKILL)

    def _is(self, variable):
        return os.environ.get(variable) == f"{self.seed}:{self.count}"


gymnasium.register(NAME, Counting)
