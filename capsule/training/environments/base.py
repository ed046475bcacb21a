"""What every environment is: a step function whose state is its random draws and its actions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.spec import StreamName
from capsule.training.streams import Stream

Frame = NDArray[Any]


class Transition(NamedTuple):
    """What one agent step led to.

    Attributes:
        frame: Newest frame, ``[*frame_shape]`` of ``frame_dtype``; never written to afterwards.
        reward: Training reward: clipped to -1, 0, 1 where the spec asks for it.
        game_reward: Reward as the game gives it.
        terminal: The return ends here: game over or, in training, a lost life. Nothing is
            bootstrapped from ``frame``.
        ended: The episode is over and ``reset`` must follow. Without ``terminal`` it was truncated.
    """

    frame: Frame
    reward: float
    game_reward: float
    terminal: bool
    ended: bool


class Environment(ABC):
    """One environment, stepped by one agent.

    All randomness comes from the given streams, and an episode is a pure function of the streams'
    positions at its start and of the actions since. That is therefore all a checkpoint holds, for
    every suite alike: ``restore`` plays the actions again.

    Attributes:
        actions: Number of actions; an action is an index below it.
        frame_shape: Shape of one frame.
        frame_dtype: Element type of a frame.
        frame_stack: Most recent frames that make one observation.
        frame_skip: Emulator frames per agent step; 1 where there is no emulator.
    """

    actions: int
    frame_shape: tuple[int, ...]
    frame_dtype: np.dtype[Any]
    frame_stack: int = 1
    frame_skip: int = 1

    def __init__(self, streams: Mapping[StreamName, Stream]) -> None:
        self._streams = streams
        self._start: dict[str, Any] | None = None  # stream states before the reset, if any
        self._taken: list[int] = []
        self._frame: Frame | None = None
        self._ended = True

    def rewire(self, streams: Mapping[StreamName, Stream]) -> None:
        """Drop the running episode and draw from other streams from now on."""
        self._streams = {name: streams[name] for name in self._streams}
        self._forget()

    def reset(self) -> Frame:
        """Begin an episode and return its first frame."""
        self._start = self._stream_states()
        self._taken = []
        self._frame = self._begin()
        self._ended = False
        return self._frame

    def step(self, action: int) -> Transition:
        """Take one agent step.

        Raises:
            RuntimeError: The episode has ended, or none was begun.
        """
        if self._ended:
            raise RuntimeError("step() needs a running episode: call reset() first")
        transition = self._advance(action)
        self._taken.append(action)
        self._frame = transition.frame
        self._ended = transition.ended
        return transition

    def state(self) -> dict[str, Any]:
        """Return a JSON-safe snapshot: streams at the episode's start, and the actions since."""
        return {
            "streams": self._stream_states() if self._start is None else self._start,
            "actions": None if self._start is None else list(self._taken),
            "frame": None if self._frame is None else _digest(self._frame),
        }

    def restore(self, state: Mapping[str, Any]) -> Frame | None:
        """Return to a snapshot by playing its episode again.

        The streams given to this environment end where they were when the snapshot was taken.

        Returns:
            The newest frame, or None where no episode had begun.

        Raises:
            CapsuleError: CAP-T201, the snapshot belongs to other streams; CAP-T211, the replayed
                episode does not end in the recorded frame.
        """
        for name, saved in state["streams"].items():
            self._streams[name].restore(saved)
        self._forget()
        if state["actions"] is None:
            return None
        frame = self.reset()
        for action in state["actions"]:
            if self._ended:
                break
            frame = self.step(action).frame
        if self._taken != state["actions"] or _digest(frame) != state["frame"]:
            raise CapsuleError(
                "CAP-T211",
                f"the saved episode of {len(state['actions'])} steps, played again, ends in "
                "another frame than the one recorded",
                fix="resume inside the image the run was started in; if it is, report a bug",
                exit_code=ExitCode.TRAINING_FAILED,
            )
        return frame

    @abstractmethod
    def _begin(self) -> Frame:
        """Begin an episode, as a pure function of the streams' positions."""

    @abstractmethod
    def _advance(self, action: int) -> Transition:
        """Take one agent step of a running episode."""

    def _forget(self) -> None:
        self._start, self._taken, self._frame, self._ended = None, [], None, True

    def _stream_states(self) -> dict[str, Any]:
        return {name: stream.state() for name, stream in self._streams.items()}


def _digest(frame: Frame) -> str:
    return xxhash.xxh3_128_hexdigest(frame.tobytes())
