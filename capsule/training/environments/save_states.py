"""Environments that can be copied: restoring takes milliseconds, however long the episode.

Copies of an emulator are not quite complete. Those of ALE 0.12 lack the screen, whether a frame is
half drawn, and where on a line the objects are; what a game does in the frames after sets each of
them anew. So a snapshot holds no copy of its own moment but a *mark*: a copy made some steps
before. The actions since are played again, which makes good what the copy lacks, and the end is
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

MARK_STEPS = 16  # steps between marks; a snapshot's is at least so old, and at most twice


class EpisodeMark(NamedTuple):
    """A moment of an episode.

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


class MarkedEnvironment(Environment):
    """An environment that can be copied, and so restored from marks; but for some tasks of it."""

    _copyable = True

    def __init__(self, streams: Mapping[StreamName, Stream]) -> None:
        self._marks: deque[EpisodeMark] = deque(maxlen=2)
        super().__init__(streams)

    def reset(self) -> Frame:
        """Begin an episode and return its first frame."""
        self._marks.clear()
        return super().reset()

    def step(self, action: int) -> Transition:
        """Take one agent step, as :meth:`Environment.step` says."""
        transition = super().step(action)
        steps = len(self._taken)
        if self._copyable and steps % MARK_STEPS == 0:
            mark = EpisodeMark(steps, self._stream_states(), self._counters(), self._emulator())
            self._marks.append(mark)
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

    def _last_mark(self) -> dict[str, Any] | None:
        if len(self._marks) < 2:
            return None
        mark = self._marks[0]
        return {**mark._asdict(), "emulator": base64.b64encode(mark.emulator).decode()}

    def _play_from_mark(self, episode: Mapping[str, Any], actions: array[int]) -> bool:
        saved = episode["mark"]
        if saved is None:
            return False
        mark = EpisodeMark(**{**saved, "emulator": base64.b64decode(saved["emulator"])})
        if not self._return_to(mark.counters, mark.emulator):
            return False
        self._set_streams(mark.streams)
        self._start, self._taken, self._ended = episode["start"], actions[: mark.steps], False
        self._marks.append(mark)
        self._play(actions[mark.steps :])
        return True

    def _fingerprint(self) -> bytes:
        return repr(self._counters()).encode() + self._emulator()

    def _forget(self) -> None:
        super()._forget()
        self._marks.clear()
