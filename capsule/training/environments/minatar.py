"""MinAtar games: 10x10 boolean channels (Young and Tian 2019, arXiv:1903.03176)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import MinAtarEnvironment, StreamName
from capsule.training.environments.base import Environment, Frame, Transition
from capsule.training.state.streams import Stream

# Colours of the channels: those of Okabe and Ito (Color Universal Design, 2008), white and greys.
_COLOURS = (
    *((0, 158, 115), (213, 94, 0), (86, 180, 233), (230, 159, 0), (240, 228, 66)),
    *((0, 114, 178), (204, 121, 167), (255, 255, 255), (170, 170, 170), (110, 110, 110)),
)
ACTIONS = 6  # every game accepts all six, also those without effect (Young and Tian, section 2)


class MinAtarGame(Environment):
    """One MinAtar game, with difficulty ramping; a frame is uint8 ``[channels, 10, 10]``, 0 or 1.

    Streams:
        environment: one 32-bit seed per episode, for the game's own generator, then one uniform per
            step if ``sticky_action_probability`` is not 0. Before the first step, the action to
            repeat is 0.

    Raises:
        CapsuleError: CAP-T215, the package ``minatar`` is not in the image.
    """

    def __init__(self, spec: MinAtarEnvironment, streams: Mapping[StreamName, Stream]) -> None:
        super().__init__({"environment": streams["environment"]})
        self._sticky = spec.sticky_action_probability
        self._max_steps = spec.max_episode_steps
        self._game = _game_module(spec.game).Env(ramping=True)
        self.actions = ACTIONS
        height, width, channels = self._game.state_shape()
        self.frame_shape = (channels, height, width)
        self.frame_dtype = np.dtype(np.uint8)

    def screen(self) -> NDArray[np.uint8]:
        """Return the grid in colour. In a cell with several objects, the first channel is shown."""
        frame = self._newest_frame()
        screen = np.zeros((*frame.shape[1:], 3), np.uint8)
        for channel, colour in reversed([*zip(frame, _COLOURS, strict=False)]):
            screen[channel > 0] = colour
        return screen

    def _begin(self) -> Frame:
        # This replaces the game's own generator, which is seeded by the operating system.
        # RandomState accepts seeds of 32 bits.
        self._game.random = np.random.RandomState(self._streams["environment"].integer(2**32))
        self._game.reset()
        self._held = 0
        self._steps = 0
        return self._newest_frame()

    def _advance(self, action: int) -> Transition:
        if not self._sticky or self._streams["environment"].uniform() >= self._sticky:
            self._held = action
        reward, terminal = self._game.act(self._held)
        self._steps += 1
        return Transition(
            frame=self._newest_frame(),
            reward=float(reward),
            game_reward=float(reward),
            terminal=bool(terminal),
            ended=bool(terminal) or self._steps >= self._max_steps,
        )

    def _newest_frame(self) -> Frame:
        return np.ascontiguousarray(self._game.state().transpose(2, 0, 1), np.uint8)


def _game_module(game: str) -> Any:
    """Load the module of one game by its file, as the package would import plotting libraries."""
    package = importlib.util.find_spec("minatar")
    if package is None or package.origin is None:
        raise CapsuleError(
            "CAP-T215",
            "environment.suite 'minatar' needs the package minatar, which is not installed",
            fix="Add 'minatar' to image.packages and lock again.",
        )
    path = Path(package.origin).parent / "environments" / f"{game}.py"
    loader = SourceFileLoader(f"minatar_{game}", str(path))
    module = ModuleType(loader.name)
    loader.exec_module(module)
    return module
