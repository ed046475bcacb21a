"""Environments that can be copied: restoring takes milliseconds, however long the episode.

Copies of an emulator are not quite complete. Those of ALE 0.12 lack the screen, whether a frame is
half drawn, and where on a line the objects are; what a game does in the frames after sets each of
them anew. So a snapshot contains a *save state* from some steps before it, not one of its own
moment. The actions since are played again, which restores what the copy lacks, and the end is
compared with the recorded one. Where it differs, the whole episode is played instead.
"""

from __future__ import annotations

import base64
from abc import abstractmethod
from array import array
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from capsule.experiment.spec import StreamName
from capsule.training.environments.base import Environment, Frame, Transition
from capsule.training.state.streams import Stream

SAVE_STATE_STEPS = 16  # steps between save states; a snapshot's is at least so old, at most twice


class SaveState(NamedTuple):
    """A copy of the emulator, and what belongs to it, at a moment of an episode.

    Attributes:
        steps: Actions of the episode before it.
        streams: States of the streams.
        counters: Whatever the environment itself counts or holds.
        emulator: The emulator's copy, serialised.
    """

    steps: int
    streams: dict[StreamName, Any]
    counters: dict[str, int]
    emulator: bytes


class SaveStateEnvironment(Environment):
    """An environment that can be copied, for most of its tasks, and restored from save states."""

    _copyable = True

    def __init__(self, streams: Mapping[StreamName, Stream]) -> None:
        self._save_states: deque[SaveState] = deque(maxlen=2)
        super().__init__(streams)

    def reset(self) -> Frame:
        """Begin an episode and return its first frame."""
        self._save_states.clear()
        return super().reset()

    def step(self, action: int) -> Transition:
        """Take one agent step, as :meth:`Environment.step` says."""
        transition = super().step(action)
        steps = len(self._taken)
        if self._copyable and steps % SAVE_STATE_STEPS == 0:
            saved = SaveState(steps, self._stream_states(), self._counters(), self._emulator())
            self._save_states.append(saved)
        return transition

    @abstractmethod
    def _counters(self) -> dict[str, int]:
        """Return whatever the environment counts or holds beside its emulator."""

    @abstractmethod
    def _emulator(self) -> bytes:
        """Return a serialised copy of the emulator."""

    @abstractmethod
    def _return_to(self, counters: Mapping[str, int], emulator: bytes) -> bool:
        """Return to a copy, but for the frame; tell whether the emulator understands it."""

    def _last_save_state(self) -> dict[str, Any] | None:
        if len(self._save_states) < 2:
            return None
        # The older one, of the two that are kept: enough steps follow it to set what the copy
        # lacks.
        saved = self._save_states[0]
        return {**saved._asdict(), "emulator": base64.b64encode(saved.emulator).decode()}

    def _play_from_save_state(self, episode: Mapping[str, Any], actions: array[int]) -> bool:
        document = episode["mark"]
        if document is None:
            return False
        emulator = base64.b64decode(document["emulator"])
        saved = SaveState(**{**document, "emulator": emulator})
        if not self._return_to(saved.counters, saved.emulator):
            return False
        self._set_streams(saved.streams)
        self._start, self._taken, self._ended = episode["start"], actions[: saved.steps], False
        # As if it had been made here: _is_at() compares the save states, too.
        self._save_states.append(saved)
        self._play(actions[saved.steps :])
        return True

    def _fingerprint(self) -> bytes:
        # A frame shows only a part of what the emulator has in its memory.
        return repr(self._counters()).encode() + self._emulator()

    def _forget(self) -> None:
        super()._forget()
        self._save_states.clear()
