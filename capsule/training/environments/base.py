"""The base of environments: a step function whose state is given by random draws and actions."""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import StreamName
from capsule.training.state.frames import FrameLayout
from capsule.training.state.streams import Stream

Frame = NDArray[Any]


class Transition(NamedTuple):
    """The result of one agent step.

    Attributes:
        frame: Newest frame, ``[*frame_shape]`` of ``frame_dtype``; it is not changed afterwards.
        reward: Training reward: the sign of ``game_reward`` if the spec clips rewards.
        game_reward: The game's own reward.
        terminal: Whether the return ends here, by the end of the game or, in training, a lost life.
            Nothing is bootstrapped from ``frame`` then.
        ended: Whether the episode ends here and ``reset`` must follow. Without ``terminal`` it was
            truncated.
    """

    frame: Frame
    reward: float
    game_reward: float
    terminal: bool
    ended: bool


class Environment(ABC):
    """One environment with one agent.

    All randomness comes from the given streams. An episode is a pure function of the streams'
    positions at its start and of the actions since, each of which is held for an agent step or for
    one emulator frame. A checkpoint contains these, for every suite, and :meth:`restore` plays the
    actions again. An environment that can be copied plays only the last few of them again
    (:class:`capsule.training.environments.atari.AtariGame`).

    Attributes:
        actions: Number of actions; an action is an index below it.
        frame_shape: Shape of one frame.
        frame_dtype: Element type of a frame.
        frame_stack: Number of the newest frames in one observation.
        frame_skip: Emulator frames per agent step; 1 without an emulator.
        lives: Lives left in the current episode; 0 if the game counts none.
        instruction: The agent's current instruction, in words; empty if there is none.
        screen_rate: Frames per second at which a film of the agent's steps has its natural speed.
    """

    actions: int
    frame_shape: tuple[int, ...]
    frame_dtype: np.dtype[Any]
    frame_stack: int = 1
    frame_skip: int = 1
    lives: int = 0
    instruction: str = ""
    screen_rate: float = 10.0

    def __init__(self, streams: Mapping[StreamName, Stream]) -> None:
        self._streams = streams
        self._start: dict[StreamName, Any]  # states of the streams at the beginning of the episode
        self._taken: array[int]
        self._frame: Frame | None
        self._ended: bool
        self._forget()

    @property
    def layout(self) -> FrameLayout:
        """The layout of a frame."""
        return FrameLayout(self.frame_shape)

    @property
    def ended(self) -> bool:
        """Whether ``reset`` must come next: the episode has ended, or none was begun."""
        return self._ended

    def rewire(self, streams: Mapping[StreamName, Stream]) -> None:
        """Drop the current episode, and draw from other streams from now on."""
        self._streams = {name: streams[name] for name in self._streams}
        self._forget()

    def reset(self) -> Frame:
        """Begin an episode and return its first frame, ``[*frame_shape]`` of ``frame_dtype``."""
        # Saved before _begin() draws, because restore() begins the episode again from here.
        self._start = self._stream_states()
        self._taken = self._no_actions()
        self._frame = self._begin()
        self._ended = False
        return self._frame

    def step(self, action: int) -> Transition:
        """Take one agent step.

        Raises:
            RuntimeError: The episode has ended, or none was begun.
            CapsuleError: CAP-T151, the reward is not finite.
        """
        return self._take(action, self._advance)

    def step_frame(self, action: int) -> Transition:
        """Hold an action for one emulator frame; without an emulator, take a step.

        Raises:
            RuntimeError: The episode has ended, or none was begun.
            CapsuleError: CAP-T151, the reward is not finite.
        """
        return self._take(action, self._advance_frame, code=self.actions + action)

    def screen(self) -> NDArray[np.uint8]:
        """Return a picture of the current state: uint8 ``[rows, columns, 3]``, in RGB.

        Raises:
            CapsuleError: CAP-T217, there are no pictures of this environment.
        """
        raise no_pictures(f"{type(self).__name__} draws none")

    def state(self) -> dict[str, Any]:
        """Return a JSON-safe snapshot: the streams, and the actions since the episode's start.

        The actions are in base64, one byte each, or four bytes if the environment has more than 128
        actions. An action that was held for a single emulator frame has the number of actions added
        to it.
        """
        streams = self._stream_states()
        if self._frame is None:
            return {"streams": streams, "episode": None}
        episode = {
            "start": self._start,
            "actions": base64.b64encode(self._taken).decode(),
            "mark": self._last_save_state(),
            "digest": self._digest(self._frame),
        }
        return {"streams": streams, "episode": episode}

    def restore(self, state: Mapping[str, Any]) -> Frame | None:
        """Return to a snapshot by playing its actions again, from its save state if there is one.

        The environment's streams return to their positions in the snapshot as well.

        Returns:
            The newest frame, or None if no episode had begun.

        Raises:
            CapsuleError: CAP-T201, the snapshot belongs to other streams; CAP-T211, it is damaged,
                or the replayed episode does not end as it was recorded.
        """
        self._forget()
        try:
            # Done first, so that a state of another seed is rejected before anything is played.
            # Playing starts from the episode's start and brings the streams to the same positions.
            self._set_streams(state["streams"])
            if state["episode"] is not None:
                self._play_again(state)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # A field is missing or has another type, which can happen because snapshots can come
            # from an untrusted bundle.
            reason = f"cannot be played again ({type(error).__name__}: {error})"
            raise _damaged(reason) from error
        return self._frame

    def _play_again(self, state: Mapping[str, Any]) -> None:
        episode = state["episode"]
        actions = self._no_actions()
        actions.frombytes(base64.b64decode(episode["actions"]))
        # A save state may lack a part of the state, which the comparison detects. Playing the whole
        # episode restores all of it.
        if not (self._play_from_save_state(episode, actions) and self._is_at(state)):
            self._play_from_start(episode, actions)
            if not self._is_at(state):
                raise _damaged(
                    f"of {len(actions)} steps, played again, does not end as it was recorded"
                )

    @abstractmethod
    def _begin(self) -> Frame:
        """Begin an episode, as a pure function of the streams' positions."""

    @abstractmethod
    def _advance(self, action: int) -> Transition:
        """Take one agent step of the current episode."""

    def _advance_frame(self, action: int) -> Transition:
        """Hold an action for one emulator frame of the current episode."""
        return self._advance(action)

    def _last_save_state(self) -> dict[str, Any] | None:
        """Return a JSON-safe state for :meth:`_play_from_save_state`; None if there is none."""
        return None

    def _play_from_save_state(self, episode: Mapping[str, Any], actions: array[int]) -> bool:  # noqa: ARG002
        """Play a saved episode from its save state; return False if that is not possible."""
        return False

    def _play_from_start(self, episode: Mapping[str, Any], actions: array[int]) -> None:
        self._set_streams(episode["start"])
        self.reset()
        self._play(actions)

    def _take(
        self, action: int, advance: Callable[[int], Transition], code: int | None = None
    ) -> Transition:
        """Take an action, and record its ``code``, which is the action itself by default."""
        if self._ended:
            raise RuntimeError("step() needs a running episode: call reset() first")
        transition = advance(action)
        self._taken.append(action if code is None else code)
        self._frame = transition.frame
        self._ended = transition.ended
        return transition

    def _play(self, codes: array[int]) -> None:
        """Take the actions with ``codes``, until the episode ends."""
        # A damaged snapshot may have too many actions, or actions that do not exist. The comparison
        # in _is_at() detects this afterwards.
        for code in codes:
            if self._ended or code >= 2 * self.actions:
                break
            if code < self.actions:
                self.step(code)
            else:
                self.step_frame(code - self.actions)

    def _is_at(self, state: Mapping[str, Any]) -> bool:
        """Return whether the environment is in the state of a snapshot."""
        return self.state() == state

    def _digest(self, frame: Frame) -> str:
        digest = xxhash.xxh3_128(frame.tobytes())
        digest.update(b"%d" % self._ended)
        digest.update(self._fingerprint())
        return digest.hexdigest()

    def _fingerprint(self) -> bytes:
        """Return the known part of the environment's own state, besides the frame."""
        return b""

    def _no_actions(self) -> array[int]:
        # Each action has two codes; that of step_frame() is greater by the number of actions.
        return array("B" if 2 * self.actions <= 256 else "I")

    def _forget(self) -> None:
        self._start, self._taken = {}, array("B")
        self._frame, self._ended = None, True

    def _stream_states(self) -> dict[StreamName, Any]:
        return {name: stream.state() for name, stream in self._streams.items()}

    def _set_streams(self, states: Mapping[StreamName, Any]) -> None:
        for name, saved in states.items():
            self._streams[name].restore(saved)


def _damaged(how: str) -> CapsuleError:
    return CapsuleError(
        "CAP-T211",
        f"the saved episode {how}",
        fix="Resume the run in the image in which it began. If it fails there, report the error.",
    )


def no_pictures(reason: str) -> CapsuleError:
    """Return the error of an environment that has no pictures."""
    return CapsuleError(
        "CAP-T217",
        f"there are no pictures of this environment: {reason}",
        fix="Use an environment that supports Gymnasium's render mode 'rgb_array', and add the "
        "packages that it draws with to image.packages.",
    )
