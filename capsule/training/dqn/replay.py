"""Replay memory that stores every frame once.

This is the experience replay of Mnih et al. 2015, doi:10.1038/nature14236, Methods.

An *entry* is one time step: a frame, the action taken on seeing it, its reward and whether it ended
the return. Entries are numbered from 0 and stored in a ring
(:mod:`capsule.training.state.rings`). An observation is a window of ``frame_stack`` frames,
assembled when it is needed, with zeros before the first frame of its episode. A terminal entry ends
an episode; so does the *closing* entry that ``end_episode`` adds, which contains only the last
frame of a truncated episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from capsule.experiment.canonical import canonical_json
from capsule.experiment.errors import CapsuleError
from capsule.training.state.rings import Rings, require_checkpoint
from capsule.training.state.streams import Stream

_FIRST, _TERMINAL, _CLOSING = 1, 2, 4  # bits of an entry's marks
# Of two entries, neither need be a transition: a closing one, and the first one of an episode whose
# next frame is not known yet. Of three, one always is.
_MIN_ENTRIES = 3


class Batch(NamedTuple):
    """Transitions, one per row.

    Attributes:
        frames: ``[batch, frame_stack + 1, *frame_shape]``, oldest first: the first ``frame_stack``
            are the observation, the last ``frame_stack`` the next one. The newest frame is zero
            after a terminal entry.
        actions: int64 ``[batch]``.
        rewards: float32 ``[batch]``.
        terminals: bool ``[batch]``.
    """

    frames: NDArray[Any]
    actions: NDArray[np.int64]
    rewards: NDArray[np.float32]
    terminals: NDArray[np.bool_]


class ReplayMemory:
    """The newest ``capacity`` entries, and the earlier frames that their observations contain.

    Attributes:
        capacity: Entries that can be sampled.
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
            directory: The folder of the memory-mapped files; None keeps the ring in memory.
            capacity: Entries that can be sampled.
            slack: Entries that can be added after a checkpoint without overwriting any that it
                needs.
            frame_shape: Shape of one frame.
            frame_dtype: Element type of a frame.
            frame_stack: Frames of one observation.

        Raises:
            CapsuleError: CAP-T221, there is no room for the files.
        """
        self.capacity = capacity
        self._history = frame_stack - 1
        self._ring = Rings(
            directory,
            {
                "frames": (frame_dtype, frame_shape),
                "actions": (np.int32, ()),
                "rewards": (np.float32, ()),
                "marks": (np.uint8, ()),
            },
            slots=capacity + self._history + slack,
            slack=slack,
        )
        self._frames = self._ring.fields["frames"]
        self._marks = self._ring.fields["marks"]
        self._window = np.arange(-self._history, 2)  # from an observation's oldest frame to s'

    @property
    def count(self) -> int:
        """The number of entries ever added, which is also the number of the next one."""
        return int(self._ring.counts[0])

    def append(self, frame: NDArray[Any], action: int, reward: float, terminal: bool) -> None:
        """Add an entry.

        Args:
            frame: ``[*frame_shape]``, the newest frame before the action.
            action: The action taken.
            reward: Training reward of the action.
            terminal: Whether the return ends with it.

        Raises:
            RuntimeError: More than ``slack`` entries were added since the last checkpoint.
        """
        self._put(frame, action, reward, _TERMINAL if terminal else 0)

    def end_episode(self, last_frame: NDArray[Any]) -> None:
        """Close a truncated episode with its last frame, after which no action was taken.

        The last transition of the episode then bootstraps from the frame that followed it.

        Args:
            last_frame: ``[*frame_shape]``.

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
        # The frame is not an entry yet. Whether it begins an episode follows from the newest entry.
        first = self._begins()
        for back in range(1, self._history + 1):
            if first:
                break
            slot = self._ring.at(self.count - back)
            observation[-1 - back] = self._frames[slot]
            first = bool(self._marks[slot] & _FIRST)
        return observation

    def sample_indices(self, stream: Stream, batch: int) -> NDArray[np.int64]:
        """Draw ``batch`` entry numbers, uniform over the transitions of the newest entries.

        One uniform is drawn per row; then one for each row with a closing entry or the newest
        entry of a running episode, in row order, and again until every row has a transition.

        Returns:
            int64 ``[batch]``.

        Raises:
            CapsuleError: CAP-T222, there may be no transition among so few entries.
        """
        size = min(self.count, self.capacity)
        if size < _MIN_ENTRIES:
            raise CapsuleError(
                "CAP-T222",
                f"the replay memory can sample {size} entries; it needs {_MIN_ENTRIES}",
                fix="Raise trainer.replay_start and trainer.replay_capacity.",
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

        Up to ``slack`` entries added in the meantime do not change the result, so another thread
        may add them at the same time.

        Args:
            indices: int64 ``[batch]``.
            out: Buffer for the frames; a new one by default.
        """
        slots = self._ring.at(indices[:, None] + self._window)
        # With mode="raise" numpy would fill a buffer of its own and then copy it into ``out``.
        frames = np.take(self._frames, slots, axis=0, out=out, mode="clip")
        # The last column is left out: its marks are those of the next transition, or of an entry
        # that is not written yet.
        marks = self._marks[slots[:, :-1]]
        terminals = (marks[:, -1] & _TERMINAL) != 0
        for row, column in np.argwhere(_before_episode(marks)):
            frames[row, column] = 0
        # The entry that follows a terminal entry in the ring belongs to another episode.
        frames[terminals, -1] = 0
        newest = slots[:, self._history]
        actions = self._ring.fields["actions"][newest].astype(np.int64)
        return Batch(frames, actions, self._ring.fields["rewards"][newest], terminals)

    def digest(self) -> str:
        """Return the XXH3-128 of the live entries, oldest first, hexadecimal.

        The live entries are the newest ``capacity`` and the ``frame_stack - 1`` before them. Their
        slots in the ring do not affect the digest.
        """
        oldest = max(0, self.count - self.capacity - self._history)
        state = xxhash.xxh3_128()
        for name, field in self._ring.fields.items():
            # Without these delimiters, bytes that move from one field into the next could keep the
            # digest.
            header = [name, field.dtype.str, list(field.shape[1:]), self.count, oldest]
            state.update(canonical_json(header))
            for part in self._ring.parts(oldest, self.count):
                state.update(field[part].data)
        return state.hexdigest()

    def state(self) -> dict[str, Any]:
        """Return a JSON-safe cursor: the number of entries, and the digest of the live ones.

        The live entries are kept from now on: the ring rejects more than ``slack`` further ones
        until the next call.
        """
        self._ring.keep()
        return {"count": self.count, "digest": self.digest()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Return to a cursor. The entries themselves are those in the files.

        Raises:
            CapsuleError: CAP-T223, the files do not contain the entries of the checkpoint.
        """
        self._ring.resume([state["count"]])
        what = f"entries of the checkpoint at entry {self.count}"
        require_checkpoint(self.digest(), state["digest"], what)

    def _put(self, frame: NDArray[Any], action: int, reward: float, mark: int) -> None:
        marks = mark | (_FIRST if self._begins() else 0)
        entry = {"frames": frame, "actions": action, "rewards": reward, "marks": marks}
        self._ring.append(entry)

    def _begins(self) -> bool:
        """Return whether the next entry is the first of an episode."""
        newest = self._ring.at(self.count - 1)
        return not self.count or bool(self._marks[newest] & (_TERMINAL | _CLOSING))

    def _invalid(self, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        marks = self._marks[self._ring.at(indices)]
        # The next frame of the newest entry has not been added yet.
        unfinished = (indices == self.count - 1) & ((marks & _TERMINAL) == 0)
        invalid: NDArray[np.bool_] = ((marks & _CLOSING) != 0) | unfinished
        return invalid


def _before_episode(marks: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Mark the frames of each window that precede its episode.

    Args:
        marks: ``[batch, frame_stack]``, oldest first.

    Returns:
        bool ``[batch, frame_stack - 1]``: whether an episode begins after that frame.
    """
    # The accumulation runs from the newest frame back, so that a beginning marks all older frames.
    # The first column is not needed: no frame of the window precedes it.
    first = (marks[:, :0:-1] & _FIRST) != 0
    before: NDArray[np.bool_] = np.logical_or.accumulate(first, axis=1)[:, ::-1]
    return before
