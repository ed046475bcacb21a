"""Prioritized replay of overlapping sequences.

The source is Kapturowski et al. 2019, OpenReview r1lyTjAqYX, sections 2.3 and 3.

Each actor writes *entries*, one per time step: a frame, the action taken on seeing it, its reward,
and whether the return ends there. They are numbered from 0 and stored in a ring of that actor
alone (:mod:`capsule.training.state.rings`). Sequences are ranges of the ring
(:mod:`capsule.training.r2d2.cutting`), so a frame is stored once however many sequences and frame
stacks contain it. They are drawn by their priorities (:mod:`capsule.training.r2d2.priorities`). The
ring, the sequences and the priorities of one actor do not depend on other actors. The memory is
therefore the same however the actors are distributed over processes.

Size. An entry of 84x84 takes 7,056 + 17 bytes; a sequence takes 32, its leaf of the sum tree at
most 64, and its recurrent state 4,096 with an LSTM of 512 units. With a sequence every 40 steps
that is less than 7,180 bytes for each observation, and 29 GB for the paper's 4 million.

Deviations from the paper, which has one first-in-first-out memory: here each actor keeps its own
newest ``capacity / actors`` entries, which is the same if actors step in turn; and if episodes are
short, at most ``capacity / period`` sequences are kept.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, DTypeLike, NDArray

from capsule.experiment.canonical import canonical_json
from capsule.experiment.errors import CapsuleError
from capsule.training.r2d2.cutting import CutSequence, EpisodeCutter, SequenceLayout
from capsule.training.r2d2.priorities import Priorities
from capsule.training.state.checkpoint import array_document, document_array
from capsule.training.state.rings import Field, Rings, require_checkpoint
from capsule.training.state.streams import Stream

_ENTRY: dict[str, Field] = {  # fields of an entry, beside its frame
    "actions": (np.int32, ()),
    "rewards": (np.float32, ()),
    "terminals": (np.bool_, ()),
    "values": (np.float32, (2,)),
}
_SEQUENCE: dict[str, Field] = {  # fields of a CutSequence, beside its state
    "numbers": (np.int64, ()),  # the sequence's number plus 1, so that 0 marks an unused slot
    "starts": (np.int64, ()),
    "before": (np.int32, ()),
    "fronts": (np.int32, ()),
    "steps": (np.int32, ()),
    "lengths": (np.int32, ()),
}


class Frames(NamedTuple):
    """The shape and type of frames.

    Attributes:
        shape: Shape of one frame.
        dtype: Element type.
        stack: Frames of one observation.
    """

    shape: tuple[int, ...]
    dtype: DTypeLike
    stack: int


class Draw(NamedTuple):
    """Sequences drawn from the memory.

    Attributes:
        indices: int64 ``[batch]``; the index of a sequence never changes.
        probabilities: float64 ``[batch]``: the probability with which each was drawn.
    """

    indices: NDArray[np.int64]
    probabilities: NDArray[np.float64]


class SequenceBatch(NamedTuple):
    """Sequences, time-major.

    Attributes:
        frames: ``[frame_stack - 1 + rows, batch, *frame_shape]``: the frames of every row, preceded
            by those that the first rows' observations also contain; zero where there is none.
        states: float32 ``[batch, *state_shape]``: the recurrent state, as the actor had it, before
            the first row that is not padding.
        resets: bool ``[rows, batch]``: the rows before which the recurrent state is set to
            ``states``: padding in front, and the row after it. Row 0 is always one of them.
        previous_actions: int64 ``[rows, batch]``: the action before each row; -1 if there is none.
        previous_rewards: float32 ``[rows, batch]``: its reward; 0 if there is none.
        actions: int64 ``[rows - 1, batch]``; 0 in the padding.
        rewards: float32 ``[rows - 1, batch]``; 0 in the padding.
        terminals: bool ``[rows - 1, batch]``: whether the return ends after the step.
        valid: bool ``[rows - 1, batch]``: False in the padding.
        values: float32 ``[rows, batch, 2]``: the Q-value of the action taken and the largest
            Q-value, as the actor had them; 0 in the padding.
    """

    frames: NDArray[Any]
    states: NDArray[np.float32]
    resets: NDArray[np.bool_]
    previous_actions: NDArray[np.int64]
    previous_rewards: NDArray[np.float32]
    actions: NDArray[np.int64]
    rewards: NDArray[np.float32]
    terminals: NDArray[np.bool_]
    valid: NDArray[np.bool_]
    values: NDArray[np.float32]

    @property
    def observations(self) -> NDArray[Any]:
        """A view of ``frames``: ``[rows, batch, frame_stack, *frame_shape]``, oldest first."""
        stack = len(self.frames) - len(self.resets) + 1
        return np.moveaxis(sliding_window_view(self.frames, stack, axis=0, writeable=True), -1, 2)


class SequenceReplay:
    """The sequences within the newest entries of every actor, and their priorities.

    Sequences are evicted as a whole, the oldest first: as soon as the first entry of one is no
    longer among the newest ``capacity / actors`` of its actor, or if the actor has more than
    ``capacity / actors / period`` of them.

    Attributes:
        layout: The lengths by which episodes are cut.
        actors: Number of logical actors.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        layout: SequenceLayout,
        actors: int,
        capacity: int,
        slack: int,
        frames: Frames,
        state_shape: tuple[int, ...],
        priority_exponent: float,
    ) -> None:
        """Open the rings in ``directory``, making its files where there are none.

        Args:
            directory: The folder of the memory-mapped files; None keeps everything in memory.
            layout: The lengths by which episodes are cut.
            actors: Number of logical actors.
            capacity: Entries kept, of all actors together.
            slack: Entries that an actor can add after a checkpoint without overwriting any that it
                needs.
            frames: Shape, type and stack of the frames.
            state_shape: Shape of a recurrent state; if it contains a 0, none is stored.
            priority_exponent: Exponent ``alpha`` of the priorities.

        Raises:
            ValueError: An actor's share of the capacity is less than one sequence.
            CapsuleError: CAP-T221, there is no room for the files.
        """
        self.layout, self.actors = layout, actors
        self._capacity = capacity // actors  # entries of an actor
        if self._capacity < layout.rows:
            raise ValueError(
                f"{self._capacity} entries of an actor are too few for a sequence of {layout.rows}"
            )
        self._history = frames.stack - 1
        # Entries needed before a sequence. At least one, because the entry before a sequence has
        # the previous action and reward of its first row.
        self._reach = max(1, self._history)
        self._kept = math.ceil(self._capacity / layout.period)  # sequences of an actor
        self._entries = Rings(
            directory,
            {"frames": (frames.dtype, frames.shape), **_ENTRY},
            slots=self._capacity + self._reach + slack,
            slack=slack,
            writers=actors,
        )
        # The most sequences that the entries in the slack can finish after a checkpoint.
        more = slack + layout.most_open
        self._sequences = Rings(
            directory,
            {**_SEQUENCE, "states": (np.float32, state_shape)},
            slots=self._kept + more,
            slack=more,
            writers=actors,
        )
        self._state_shape = state_shape
        self._priorities = Priorities(priority_exponent, actors=actors, kept=self._kept)
        self._cutters = [EpisodeCutter(layout) for _ in range(actors)]
        self._oldest = np.zeros(actors, np.int64)  # number of the oldest sequence kept

    @property
    def sequences(self) -> int:
        """The number of sequences kept, with or without a priority."""
        return int((self._sequences.counts - self._oldest).sum())

    @property
    def entries(self) -> int:
        """The number of entries ever added, closing ones included."""
        return int(self._entries.counts.sum())

    # Writing

    def append(
        self,
        actor: int,
        frame: NDArray[Any],
        action: int,
        reward: float,
        terminal: bool,
        *,
        ended: bool,
        state: NDArray[np.float32] | None,
        values: ArrayLike = (0.0, 0.0),
    ) -> list[int]:
        """Add one step of ``actor``.

        Args:
            actor: The actor that took the step.
            frame: The newest frame before the action, ``[*frame_shape]``.
            action: The action taken.
            reward: Training reward of the action.
            terminal: Whether the return ends here: nothing is bootstrapped from what follows.
            ended: Whether the episode also ends here, so that recurrent states and frame stacks
                begin anew; only together with ``terminal``. After a truncation,
                :meth:`end_episode` follows instead.
            state: Recurrent state before the frame was seen, ``[*state_shape]``; required where a
                sequence begins (:meth:`SequenceLayout.begins`).
            values: The actor's Q-value of the action, and its largest Q-value.

        Returns:
            The indices of the sequences that this step finished, in order.

        Raises:
            ValueError: The episode ends but the return does not, or a state is missing.
            RuntimeError: More than ``slack`` entries were added since the last checkpoint.
        """
        if ended and not terminal:
            raise ValueError("end_episode() ends an episode that is truncated")
        cutter = self._cutters[actor]
        cutter.begin(int(self._entries.counts[actor]), state)
        count = self._put(actor, frame, action, reward, terminal, values)
        return self._enter(actor, cutter.finish(count, ended=ended))

    def end_episode(
        self, actor: int, last_frame: NDArray[Any], last_value: float = 0.0
    ) -> list[int]:
        """Close a truncated episode with its last frame, after which no action was taken.

        The last steps of the episode then bootstrap from the state that followed them.

        Args:
            actor: The actor whose episode it is.
            last_frame: ``[*frame_shape]``.
            last_value: The actor's largest Q-value of ``last_frame``.

        Returns:
            The indices of the sequences that the frame finished, in order.

        Raises:
            ValueError: There is no running episode.
            RuntimeError: More than ``slack`` entries were added since the last checkpoint.
        """
        cutter = self._cutters[actor]
        if self._entries.counts[actor] == cutter.first:
            raise ValueError("end_episode() follows a truncation, not the end of an episode")
        count = self._put(actor, last_frame, 0, 0.0, False, (0.0, last_value))
        return self._enter(actor, cutter.finish(count, ended=True, closed=True))

    def _put(
        self,
        actor: int,
        frame: NDArray[Any],
        action: int,
        reward: float,
        terminal: bool,
        values: ArrayLike,
    ) -> int:
        """Add an entry, evict sequences whose first entry is too old now, and return the count."""
        entry = {
            "frames": frame,
            "actions": action,
            "rewards": reward,
            "terminals": terminal,
            "values": values,
        }
        last = self._entries.append(entry, actor)
        # Sequences are numbered in the order in which they begin, so the first one that is kept
        # ends the search.
        starts, number = self._sequences.fields["starts"], int(self._oldest[actor])
        while (
            number < self._sequences.counts[actor]
            and starts[self._sequences.at(number, actor)] <= last - self._capacity
        ):
            number += 1
        self._evict(actor, number)
        return last + 1

    def _enter(self, actor: int, finished: list[CutSequence]) -> list[int]:
        """Add sequences, evict the oldest if there are too many, and return the new indices."""
        indices = []
        for sequence in finished:
            number = int(self._sequences.counts[actor])
            self._sequences.append({"numbers": number + 1, **sequence._asdict()}, actor)
            self._evict(actor, number - self._kept + 1)
            indices.append(number * self.actors + actor)
        return indices

    def _evict(self, actor: int, oldest: int) -> None:
        """Evict the sequences of ``actor`` that are older than number ``oldest``."""
        if oldest > self._oldest[actor]:
            self._priorities.clear(actor, np.arange(self._oldest[actor], oldest))
            self._oldest[actor] = oldest

    def update_priorities(
        self, indices: NDArray[np.int64], priorities: NDArray[np.float64]
    ) -> None:
        """Set the priorities of sequences; of equal indices, the last one counts.

        Sequences that have been evicted are ignored.

        Args:
            indices: int64 ``[count]``.
            priorities: float64 ``[count]``, before the exponent.

        Raises:
            ValueError: There never was a sequence with an index, or a priority is negative or not
                finite; nothing is changed.
        """
        numbers, actors = np.divmod(indices, self.actors)
        if not ((numbers >= 0) & (numbers < self._sequences.counts[actors])).all():
            raise ValueError("an index does not belong to a sequence")
        if not (np.isfinite(priorities) & (priorities >= 0)).all():
            raise ValueError("a priority is negative or not finite")
        # The leaf of an evicted sequence may belong to a newer one.
        kept = numbers >= self._oldest[actors]
        self._priorities.update(actors[kept], numbers[kept], priorities[kept])

    # Reading

    def sample(self, stream: Stream, batch: int) -> Draw:
        """Draw sequences, with replacement, in proportion to ``priority^alpha``.

        Args:
            stream: The stream from which one uniform per sequence is drawn.
            batch: Number of sequences to draw.

        Raises:
            CapsuleError: CAP-T222, no sequence has a priority yet.
        """
        if not self._priorities.tree.total:
            raise CapsuleError(
                "CAP-T222",
                f"none of the {self.sequences} sequences in the replay memory has a priority",
                fix="Raise trainer.replay_start and trainer.replay_capacity.",
            )
        actors, numbers, probabilities = self._priorities.sample(
            stream.uniforms(batch), self._sequences.counts - 1
        )
        return Draw(numbers * self.actors + actors, probabilities)

    def gather(self, indices: NDArray[np.int64], *, frames: bool = True) -> SequenceBatch:
        """Assemble sequences.

        Up to ``slack`` entries of each actor that are added in the meantime do not change the
        result, so another thread may add them at the same time.

        Args:
            indices: int64 ``[batch]``, of :meth:`sample` or of finished sequences.
            frames: Whether to gather frames; if not, the batch has none.

        Raises:
            ValueError: A sequence is overwritten, or does not exist.
        """
        numbers, actors = np.divmod(indices, self.actors)
        of = self._table(numbers, actors)
        # Everything below is [reach + rows, batch]: where in the sequence, and where in the ring.
        places = np.arange(-self._reach, self.layout.rows)[:, None] - of["fronts"]
        slots = self._entries.at(of["starts"] + places, actors)
        entries = self._entries.fields
        # Slots outside an episode contain entries of another one, so everything that is read below
        # is masked by these arrays.
        begun = places >= -of["before"]
        taken = begun & (places < of["steps"])
        past = self._reach - 1  # the step before row 0
        taken, slots_taken = taken[past:-1], slots[past:-1]
        actions = np.where(taken, entries["actions"][slots_taken], -1).astype(np.int64)
        rewards = np.where(taken, entries["rewards"][slots_taken], np.float32(0))
        seen = begun & (places < of["lengths"])
        rows = slice(self._reach, None)
        shown = slice(self._reach - self._history if frames else len(slots), None)
        images = np.take(entries["frames"], slots[shown], axis=0)
        images[~seen[shown]] = 0
        return SequenceBatch(
            frames=images,
            states=of["states"],
            resets=places[rows] <= 0,
            previous_actions=actions,
            previous_rewards=rewards,
            actions=np.maximum(actions[1:], 0),
            rewards=rewards[1:],
            terminals=(entries["terminals"][slots_taken] & taken)[1:],
            valid=taken[1:],
            values=np.where(seen[rows, :, None], entries["values"][slots[rows]], np.float32(0)),
        )

    def _table(
        self, numbers: NDArray[np.int64], actors: NDArray[np.int64]
    ) -> dict[str, NDArray[Any]]:
        """Return the fields of sequences by name, ``[batch, ...]``; see :meth:`gather`."""
        slots = self._sequences.at(numbers, actors)
        of = {name: array[slots] for name, array in self._sequences.fields.items()}
        finished, count = self._sequences.counts[actors], self._entries.counts[actors]
        # The table is a ring as well: a later sequence may have taken the slot of this one.
        known = (numbers >= 0) & (numbers < finished) & (of["numbers"] == numbers + 1)
        # A ring overwrites its oldest entry first: if the earliest entry of a sequence is intact,
        # all of them are.
        whole = of["starts"] - self._reach >= count - self._entries.slots
        if not (known & whole).all():
            raise ValueError("a sequence is not in the memory, or has been overwritten")
        return of

    # Saving

    def digest(self) -> str:
        """Return the XXH3-128 of the entries and sequences kept, by actor, oldest first.

        Neither priorities nor the slots in the rings affect it.
        """
        result = xxhash.xxh3_128()
        for actor in range(self.actors):
            count, finished = int(self._entries.counts[actor]), int(self._sequences.counts[actor])
            oldest = max(0, count - self._capacity - self._reach)
            for rings, first, end in (
                (self._entries, oldest, count),
                (self._sequences, int(self._oldest[actor]), finished),
            ):
                for name, array in rings.fields.items():
                    # Without these delimiters, bytes that move from one array into the next could
                    # keep the digest.
                    header = [actor, name, array.dtype.str, list(array.shape[1:]), first, end]
                    result.update(canonical_json(header))
                    for part in rings.parts(first, end, actor):
                        result.update(array[part].data)
        return result.hexdigest()

    def state(self) -> dict[str, Any]:
        """Return a JSON-safe snapshot: every counter and priority, and the digest of the rest.

        What the snapshot needs is kept from now on: the rings reject more than ``slack`` further
        entries of an actor until the next call.
        """
        self._entries.keep()
        self._sequences.keep()
        counts = zip(
            self._entries.counts.tolist(),
            self._cutters,
            self._sequences.counts.tolist(),
            self._oldest.tolist(),
            strict=True,
        )
        return {
            "actors": [
                [count, cutter.first, cutter.opened, cutter.cut, finished, oldest]
                for count, cutter, finished, oldest in counts
            ],
            "open_states": [self._open_states(cutter) for cutter in self._cutters],
            **self._priorities.state(),
            "digest": self.digest(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Return to a snapshot. The entries and sequences themselves are those in the files.

        Raises:
            CapsuleError: CAP-T223, the files do not contain the entries of the checkpoint.
        """
        counts, firsts, opened, cuts, finished, oldest = zip(*state["actors"], strict=True)
        self._entries.resume(counts)
        self._sequences.resume(finished)
        self._oldest[:] = oldest
        for cutter, first, begun, cut, states in zip(
            self._cutters, firsts, opened, cuts, state["open_states"], strict=True
        ):
            cutter.first, cutter.opened, cutter.cut = first, begun, cut
            cutter.states = deque(document_array(states))
        self._priorities.restore(state)
        # Counters and priorities come with the state. Only the files can have changed.
        what = f"sequences of the checkpoint at entry {self.entries}"
        require_checkpoint(self.digest(), state["digest"], what)

    def _open_states(self, cutter: EpisodeCutter) -> dict[str, Any]:
        shape = (len(cutter.states), *self._state_shape)
        return array_document(np.array(cutter.states, np.float32).reshape(shape))
