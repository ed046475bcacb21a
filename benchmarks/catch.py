"""Catch as a Gymnasium task: a ball falls down a board, and a paddle in the last row catches it.

It is the smallest task with a delayed reward, after bsuite's (Osband et al. 2020, "Behaviour Suite
for Reinforcement Learning", appendix A). An episode has one ball, lasts ``ROWS - 1`` steps and ends
with a reward of 1 or -1. A spec uses it with ``modules: [catch]`` if this folder is on the path.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

ROWS, COLUMNS = 10, 5
ID = "capsule/Catch-v0"
MOVES = (-1, 0, 1)


class Catch(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Catch. Observation: float32 ``[10, 5]``, 1 at ball and paddle. Actions: left, stay, right."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012
    observation_space = spaces.Box(0.0, 1.0, (ROWS, COLUMNS), np.float32)
    action_space = spaces.Discrete(len(MOVES))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Place the ball in the first row, in a random column, and the paddle in the middle."""
        super().reset(seed=seed, options=options)
        self._row, self._ball = 0, int(self.np_random.integers(COLUMNS))
        self._paddle = COLUMNS // 2
        return self._board(), {}

    def step(
        self, action: np.int64
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Move the paddle, and then the ball down by one row."""
        self._paddle = min(max(self._paddle + MOVES[int(action)], 0), COLUMNS - 1)
        self._row += 1
        landed = self._row == ROWS - 1
        reward = (1.0 if self._paddle == self._ball else -1.0) if landed else 0.0
        return self._board(), reward, landed, False, {}

    def render(self) -> NDArray[np.uint8] | None:
        """Return the board as an image, a pixel per field, in the mode ``rgb_array``; else None."""
        if self.render_mode != "rgb_array":
            return None
        screen = np.full((ROWS, COLUMNS, 3), 32, np.uint8)
        screen[ROWS - 1, self._paddle] = 0, 114, 178
        screen[self._row, self._ball] = 240, 228, 66
        return screen

    def _board(self) -> NDArray[np.float32]:
        board = np.zeros((ROWS, COLUMNS), np.float32)
        board[self._row, self._ball] = board[ROWS - 1, self._paddle] = 1.0
        return board


gymnasium.register(ID, entry_point=Catch)  # type: ignore[arg-type]
