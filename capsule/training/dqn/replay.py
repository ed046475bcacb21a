"""Replay memory that stores every frame once (Mnih et al. 2015, Methods: experience replay).

An *entry* is one time step: a frame, the action taken on seeing it, its reward and whether it ended
the return. Entries are numbered from 0 for ever; entry ``n`` lives in slot ``n mod slots`` of a
ring. An observation is a window of the newest ``frame_stack`` frames, assembled when it is asked
for, with zeros before the first frame of its episode. A terminal entry ends an episode; so does the
*closing* entry that ``end_episode`` adds, which holds nothing but the last frame of a truncation.

With a directory the ring lies in memory-mapped files, so that entries outlive the process. It has
``slack`` slots more than it needs: that many entries can follow a checkpoint before one that was
live at that checkpoint is overwritten, so a killed process resumes from its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from capsule.experiment.canonical import canonical_json
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.training.state.memmap import MappedArrays
from capsule.training.state.streams import Stream

_FIRST, _TERMINAL, _CLOSING = 1, 2, 4  # bits of an entry's marks
_MIN_ENTRIES = 3  # fewer may hold no transition: the newest entry is one only if terminal


class Batch(NamedTuple):
    """Transitions, one per row.

    Attributes:
        observations: ``[batch, frame_stack, *frame_shape]``, oldest frame first.
        actions: int64 ``[batch]``.
        rewards: float32 ``[batch]``.
        next_observations: As ``observations``; after a terminal its newest frame is zero.
        terminals: bool ``[batch]``.
    """

    observations: NDArray[Any]
    actions: NDArray[np.int64]
    rewards: NDArray[np.float32]
    next_observations: NDArray[Any]
    terminals: NDArray[np.bool_]


class ReplayMemory:
    """The newest ``capacity`` entries, and the frames their observations reach back to.

    Attributes:
        capacity: Entries that can be sampled.
        count: Entries ever added; also the number of the next one.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        capacity: int,
        slack: int,
        frame_shape: tuple[int, ...],
        frame_dtype: DTypeLike,
        frame_stack: int,
    ) -> None:
        """Open the ring in ``directory``, making its files where there are none.

        Args:
            directory: Where the memory-mapped files lie; None keeps the ring in memory.
            capacity: Entries that can be sampled.
            slack: Entries that may follow a checkpoint without touching what it needs.
            frame_shape: Shape of one frame.
            frame_dtype: Element type of a frame.
            frame_stack: Frames of one observation.

        Raises:
            CapsuleError: CAP-T221, there is no room for the files.
        """
        self.capacity = capacity
        self.count = 0
        self._history = frame_stack - 1
        self._slots = capacity + self._history + slack
        self._slack = slack
        self._checkpoint: int | None = None  # count at the checkpoint that must stay restorable
        fields: dict[str, tuple[DTypeLike, tuple[int, ...]]] = {
            "frames": (frame_dtype, frame_shape),
            "actions": (np.int32, ()),
            "rewards": (np.float32, ()),
            "marks": (np.uint8, ()),
        }
        self._files = MappedArrays(directory)
        self._fields = {
            name: self._files.array(name, dtype, (self._slots, *shape))
            for name, (dtype, shape) in fields.items()
        }
        self._frames = self._fields["frames"]
        self._actions = self._fields["actions"]
        self._rewards = self._fields["rewards"]
        self._marks = self._fields["marks"]
        self._window = np.arange(-self._history, 2)  # from an observation's oldest frame to s'

    def append(self, frame: NDArray[Any], action: int, reward: float, terminal: bool) -> None:
        """Add the entry ``(frame, action, reward, terminal)``."""
        self._put(frame, action, reward, _TERMINAL if terminal else 0)

    def end_episode(self, last_frame: NDArray[Any]) -> None:
        """Close a truncated episode with its last frame, which nobody acted on.

        The transition before it then bootstraps from the frame that really followed.

        Raises:
            ValueError: There is no running episode: the newest entry already ended one.
        """
        if self._begins():
            raise ValueError("end_episode() follows a truncation, not a terminal entry")
        self._put(last_frame, 0, 0.0, _CLOSING)

    def stack(self, frame: NDArray[Any]) -> NDArray[Any]:
        """Return the observation to act on, ``[frame_stack, *frame_shape]``, newest frame last.

        Args:
            frame: The newest frame, which follows the newest entry and is not added yet.
        """
        observation = np.zeros((self._history + 1, *self._frames.shape[1:]), self._frames.dtype)
        observation[-1] = frame
        first = self._begins()
        for back in range(1, self._history + 1):
            if first:
                break
            slot = (self.count - back) % self._slots
            observation[-1 - back] = self._frames[slot]
            first = bool(self._marks[slot] & _FIRST)
        return observation

    def sample_indices(self, stream: Stream, batch: int) -> NDArray[np.int64]:
        """Draw ``batch`` entry numbers, uniform over the transitions of the newest entries.

        One uniform is drawn per row; then one for each row that hit a closing entry or the newest
        entry of a running episode, in row order, and again until every row holds a transition.

        Raises:
            CapsuleError: CAP-T222, too few entries to hold a transition.
        """
        size = min(self.count, self.capacity)
        if size < _MIN_ENTRIES:
            raise CapsuleError(
                "CAP-T222",
                f"the replay memory can sample {size} entries; it needs {_MIN_ENTRIES}",
                fix="raise trainer.replay_start and trainer.replay_capacity",
                exit_code=ExitCode.TRAINING_FAILED,
            )
        oldest = self.count - size
        indices = oldest + stream.integers(size, batch)
        invalid = self._invalid(indices)
        while invalid.any():
            indices[invalid] = oldest + stream.integers(size, int(invalid.sum()))
            invalid = self._invalid(indices)
        return indices

    def gather(self, indices: NDArray[np.int64], *, out: NDArray[Any] | None = None) -> Batch:
        """Assemble the transitions of entries drawn by ``sample_indices``.

        Entries added in the meantime change nothing, up to ``slack`` of them, so this may run
        beside the thread that adds them.

        Args:
            indices: int64 ``[batch]``.
            out: Buffer ``[batch, frame_stack + 1, *frame_shape]`` that both observations are views
                of; a new one if absent.
        """
        slots = (indices[:, None] + self._window) % self._slots
        frames = np.take(self._frames, slots, axis=0, out=out, mode="clip")
        marks = self._marks[slots[:, :-1]]
        terminals = (marks[:, -1] & _TERMINAL) != 0
        for row, column in np.argwhere(_before_episode(marks)):
            frames[row, column] = 0
        frames[terminals, -1] = 0
        newest = slots[:, self._history]
        return Batch(
            observations=frames[:, :-1],
            actions=self._actions[newest].astype(np.int64),
            rewards=self._rewards[newest],
            next_observations=frames[:, 1:],
            terminals=terminals,
        )

    def flush(self) -> None:
        """Hand every change to the file system; needed against power loss, not against a kill."""
        self._files.flush()

    def digest(self) -> str:
        """Return the XXH3-128 of the live entries, oldest first; not of the ring's layout.

        Live are the newest ``capacity`` entries and the ``frame_stack - 1`` before them.
        """
        oldest = max(0, self.count - self.capacity - self._history)
        state = xxhash.xxh3_128()
        for name, field in self._fields.items():
            header = [name, field.dtype.str, list(field.shape[1:]), self.count, oldest]
            state.update(canonical_json(header))
            for part in self._ranges(oldest):
                state.update(field[part].data)
        return state.hexdigest()

    def state(self) -> dict[str, Any]:
        """Return a JSON-safe cursor: the entries added, and the digest of those alive.

        From now on these entries are kept: the ring refuses more than ``slack`` further ones until
        the next call.
        """
        self._checkpoint = self.count
        return {"count": self.count, "digest": self.digest()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Return to a cursor; the frames are those in the files.

        Raises:
            CapsuleError: CAP-T223, the files do not hold what they held at the checkpoint.
        """
        self.count = self._checkpoint = state["count"]
        if self.digest() != state["digest"]:
            raise CapsuleError(
                "CAP-T223",
                f"the replay files do not hold the entries of the checkpoint at entry {self.count}",
                fix="start a new run directory: this one was changed or is incomplete",
                exit_code=ExitCode.TRAINING_FAILED,
            )

    def _put(self, frame: NDArray[Any], action: int, reward: float, mark: int) -> None:
        if self._checkpoint is not None and self.count >= self._checkpoint + self._slack:
            raise RuntimeError(f"more than {self._slack} entries added since the last checkpoint")
        first = _FIRST if self._begins() else 0
        slot = self.count % self._slots
        self._frames[slot] = frame
        self._actions[slot] = action
        self._rewards[slot] = reward
        self._marks[slot] = mark | first
        self.count += 1

    def _begins(self) -> bool:
        """Say whether the next entry is the first of an episode."""
        return not self.count or bool(
            self._marks[(self.count - 1) % self._slots] & (_TERMINAL | _CLOSING)
        )

    def _invalid(self, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        marks = self._marks[indices % self._slots]
        unfinished = (indices == self.count - 1) & ((marks & _TERMINAL) == 0)
        invalid: NDArray[np.bool_] = ((marks & _CLOSING) != 0) | unfinished
        return invalid

    def _ranges(self, oldest: int) -> list[slice]:
        """Return the slots of entries ``oldest`` to the newest, in order."""
        start, length = oldest % self._slots, self.count - oldest
        wrapped = max(0, start + length - self._slots)
        return [slice(start, start + length - wrapped), slice(0, wrapped)]


def _before_episode(marks: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Mark the frames of each window that precede its episode.

    Args:
        marks: ``[batch, frame_stack]``, oldest first.

    Returns:
        bool ``[batch, frame_stack - 1]``: whether an episode begins after that frame.
    """
    first = (marks[:, :0:-1] & _FIRST) != 0
    before: NDArray[np.bool_] = np.logical_or.accumulate(first, axis=1)[:, ::-1]
    return before
