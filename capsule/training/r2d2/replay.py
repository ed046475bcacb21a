"""Prioritized replay of overlapping sequences (Kapturowski et al. 2019, sections 2.3 and 3).

Each actor writes *entries*, one per time step: a frame, the action taken on seeing it, its reward,
and whether the return ends there. They are numbered from 0 for ever and lie in a ring of that actor
alone; sequences are ranges of it, so a frame is stored once however many sequences and frame stacks
hold it. Since one actor's ring, sequences and priorities depend on nothing that another actor does,
an actor is the logical shard: however actors are spread over processes, the same sequences lie in
the same places. (The fallback priority "maximum" alone looks at all actors.)

Cutting. Sequence ``k`` of an episode *learns* the ``learned`` steps from step ``k period`` on. The
``burn_in`` steps before them are its prefix, to bring the recurrent state up to date; ``lookahead``
states after them serve for bootstrapping. These are the *rows* of the sequence::

    row   0 ........ burn_in .................. burn_in + learned ........ rows - 1
          prefix     learned steps              states to bootstrap from

Sequences never cross episodes. Where an episode begins, the missing prefix is padding in front, so
that its first steps are learned like any others (dropping a fixed prefix would never learn them).
Where one ends, the last sequence is shorter and padded behind; it is made only if it learns a step
that the sequence before it did not. Padding is zero, and no step is valid in it. Reaching back
to a full last sequence instead would learn the steps before each end more often than others.
The paper's 80 steps "plus a prefix of 40", overlapping by 40, are ``burn_in=40, learned=80,
period=40``; 80 steps whose first 40 are the prefix are ``burn_in=40, learned=40, period=40``.

Memory. An entry of 84x84 takes 7,056 + 17 bytes; a sequence takes 32, its leaf of the sum tree at
most 64, and its recurrent state 4,096 with an LSTM of 512. With a sequence every 40 steps that is
less than 7,180 bytes for each observation, and 29 GB for the paper's 4 million.

Deviations from the paper, which has one first-in-first-out memory: here each actor keeps its own
newest ``capacity / actors`` entries, which is the same where actors step in turn; and of short
episodes at most ``capacity / period`` sequences are kept.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import xxhash
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, DTypeLike, NDArray

from capsule.experiment.canonical import canonical_json
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.training.losses.r2d2 import exponentiate
from capsule.training.r2d2.sum_tree import SumTree
from capsule.training.state.checkpoint import array_document, document_array
from capsule.training.state.memmap import MappedArrays
from capsule.training.state.streams import Stream

InitialPriority = Literal["given", "maximum"]


@dataclass(frozen=True)
class SequenceLayout:
    """How episodes are cut into sequences.

    Attributes:
        burn_in: Steps of the prefix.
        learned: Steps that are learned.
        period: Steps from the start of a sequence to the next.
        lookahead: States after the learned steps; one suffices, ``n`` give every learned step its
            full ``n``-step target.

    Raises:
        ValueError: A number is too small, or ``period`` would leave steps out.
    """

    burn_in: int
    learned: int
    period: int
    lookahead: int = 1

    def __post_init__(self) -> None:
        if self.burn_in < 0 or not 1 <= self.period <= self.learned or self.lookahead < 1:
            raise ValueError(f"impossible {self}")

    @property
    def rows(self) -> int:
        """States of a sequence; it has one step less."""
        return self.burn_in + self.learned + self.lookahead

    def begins(self, step: int) -> bool:
        """Tell whether a sequence begins at a step of an episode, counted from 0."""
        return not step or (step + self.burn_in) % self.period == 0

    @property
    def most_open(self) -> int:
        """A bound of the sequences that an actor is writing at a time."""
        return math.ceil(self.rows / self.period) + 1


class Draw(NamedTuple):
    """Sequences drawn from the memory.

    Attributes:
        indices: int64 ``[batch]``; a sequence keeps its index for ever.
        probabilities: float64 ``[batch]``: the chance of each to be drawn.
    """

    indices: NDArray[np.int64]
    probabilities: NDArray[np.float64]


class SequenceBatch(NamedTuple):
    """Sequences, time-major.

    Attributes:
        frames: ``[frame_stack - 1 + rows, batch, *frame_shape]``: the frames of every row and those
            before that its observation reaches back to; zero where there is none.
        states: float32 ``[batch, *state_shape]``: the recurrent state, as the actor had it, before
            the first row that is not padding.
        resets: bool ``[rows, batch]``: the rows before which the recurrent state is to be set to
            ``states``: padding in front, and the row after it. Row 0 always is one.
        previous_actions: int64 ``[rows, batch]``: the action before each row; -1 if there is none.
        previous_rewards: float32 ``[rows, batch]``: its reward; 0 if there is none.
        actions: int64 ``[rows - 1, batch]``; 0 in the padding.
        rewards: float32 ``[rows - 1, batch]``; 0 in the padding.
        terminals: bool ``[rows - 1, batch]``: whether the return ends after the step.
        valid: bool ``[rows - 1, batch]``: whether there is such a step.
        values: float32 ``[rows, batch, 2]``: Q-value of the action taken and the largest one, as
            the actor had them; 0 in the padding.
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


@dataclass
class _Writer:
    """The running episode of one actor.

    Attributes:
        first: Number of its first entry, or of the next one if no episode runs.
        opened: Sequences begun.
        cut: Sequences finished.
        states: Recurrent states at the start of those begun and not finished.
        checkpoint: Entries at the checkpoint that must stay restorable.
    """

    first: int = 0
    opened: int = 0
    cut: int = 0
    states: deque[NDArray[np.float32]] = field(default_factory=deque)
    checkpoint: int | None = None

    def end(self, count: int) -> None:
        self.first, self.opened, self.cut = count, 0, 0
        self.states.clear()


class SequenceReplay:
    """The sequences within the newest entries of every actor, and their priorities.

    A sequence is evicted as a whole, the oldest first, as soon as its first entry is no longer
    among the newest ``capacity / actors`` of its actor or there are too many of them.

    Attributes:
        layout: How episodes are cut.
        actors: Logical actors.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        layout: SequenceLayout,
        actors: int,
        capacity: int,
        slack: int,
        frame_shape: tuple[int, ...],
        frame_dtype: DTypeLike,
        frame_stack: int,
        state_shape: tuple[int, ...],
        exponent: float,
        floor: float,
        initial_priority: InitialPriority,
    ) -> None:
        """Open the rings in ``directory``, making its files where there are none.

        Args:
            directory: Where the memory-mapped files lie; None keeps everything in memory.
            layout: How episodes are cut.
            actors: Logical actors, numbered from 0.
            capacity: Entries kept, of all actors together.
            slack: Entries that an actor may add after a checkpoint without touching what it needs.
            frame_shape: Shape of one frame.
            frame_dtype: Element type of a frame.
            frame_stack: Frames of one observation.
            state_shape: Shape of a recurrent state; with a 0 in it, none is stored.
            exponent: Priority exponent.
            floor: Lower priorities count as this one, so that each sequence is drawn now and then
                (the small constant of Schaul et al. 2016, section 3.3).
            initial_priority: ``given``: a new sequence is not drawn until ``update_priorities``
                gave it a priority, as R2D2's actors do. ``maximum``: it begins with the highest
                priority given so far, as in Schaul et al. 2016; 1 before there is any.

        Raises:
            ValueError: An actor's share of the capacity is less than one sequence.
            CapsuleError: CAP-T221, there is no room for the files.
        """
        self.layout = layout
        self.actors = actors
        self._entries = capacity // actors
        if self._entries < layout.rows:
            raise ValueError(f"{self._entries} entries an actor hold no sequence of {layout.rows}")
        self._history = frame_stack - 1
        self._reach = max(1, self._history)  # entries before a sequence that it needs, too
        self._slack = slack
        self._exponent = exponent
        self._floor = floor
        self._initial_priority = initial_priority
        self._kept = math.ceil(self._entries / layout.period)  # sequences of an actor
        self._ring = self._entries + self._reach + slack
        # Those kept at a checkpoint outlive all that may be finished before the next one.
        self._table = self._kept + slack + layout.most_open
        entries: dict[str, tuple[DTypeLike, tuple[int, ...]]] = {
            "frames": (frame_dtype, frame_shape),
            "actions": (np.int32, ()),
            "rewards": (np.float32, ()),
            "terminals": (np.bool_, ()),
            "values": (np.float32, (2,)),
        }
        sequences: dict[str, tuple[DTypeLike, tuple[int, ...]]] = {
            "numbers": (np.int64, ()),  # one more than the sequence's, so that 0 is none
            "starts": (np.int64, ()),  # first entry
            "before": (np.int32, ()),  # steps of the episode before it
            "fronts": (np.int32, ()),  # rows of padding in front
            "steps": (np.int32, ()),
            "lengths": (np.int32, ()),  # states: as many as steps, or one more
            "states": (np.float32, state_shape),
        }
        self._files = MappedArrays(directory)
        self._entry_fields = {
            name: self._files.array(name, dtype, (actors * self._ring, *shape))
            for name, (dtype, shape) in entries.items()
        }
        self._sequence_fields = {
            name: self._files.array(name, dtype, (actors * self._table, *shape))
            for name, (dtype, shape) in sequences.items()
        }
        self._frames = self._entry_fields["frames"]
        self._actions = self._entry_fields["actions"]
        self._rewards = self._entry_fields["rewards"]
        self._terminals = self._entry_fields["terminals"]
        self._values = self._entry_fields["values"]
        self._block = 1 << (self._kept - 1).bit_length()  # an actor's leaves: a subtree of its own
        self._tree = SumTree(actors * self._block)
        self._maximum = 1.0
        self._writers = [_Writer() for _ in range(actors)]
        self._counts = np.zeros(actors, np.int64)  # entries ever added
        self._finished = np.zeros(actors, np.int64)  # sequences ever finished
        self._oldest = np.zeros(actors, np.int64)  # number of the oldest sequence kept

    @property
    def sequences(self) -> int:
        """Sequences kept, with or without a priority."""
        return int((self._finished - self._oldest).sum())

    @property
    def entries(self) -> int:
        """Entries ever added, closing ones included."""
        return int(self._counts.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of all that grows with the capacity."""
        fields = (*self._entry_fields.values(), *self._sequence_fields.values())
        return sum(array.nbytes for array in fields) + self._tree.nbytes

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
            actor: Who acted.
            frame: What it saw last, ``frame_shape``.
            action: What it did.
            reward: What that gave.
            terminal: Whether the return ends here: nothing is bootstrapped from what follows.
            ended: Whether the episode ends here, too, so that recurrent states and frame stacks
                begin anew; always with ``terminal``. A truncation is told by ``end_episode``.
            state: Recurrent state before it saw the frame, ``state_shape``; needed where a sequence
                begins (:meth:`SequenceLayout.begins`).
            values: Its Q-value of the action, and its largest one.

        Returns:
            The indices of the sequences that this step finished, in order.

        Raises:
            ValueError: The episode ends but the return does not, or a state is missing.
        """
        if ended and not terminal:
            raise ValueError("end_episode() ends an episode that is truncated")
        writer = self._writers[actor]
        step = int(self._counts[actor]) - writer.first
        if self.layout.begins(step) and state is None:
            raise ValueError(f"a sequence begins at step {step} and needs the recurrent state")
        while writer.opened * self.layout.period - self.layout.burn_in <= step:
            writer.states.append(np.array(state, np.float32))
            writer.opened += 1
        self._put(actor, frame, action, reward, terminal, values)
        return self._cut(actor, step + 1, step + 1, ended=ended)

    def end_episode(
        self, actor: int, last_frame: NDArray[Any], last_value: float = 0.0
    ) -> list[int]:
        """Close a truncated episode with its last frame, which nobody acted on.

        ``last_value`` is the actor's largest Q-value of it.

        Its last steps then bootstrap from the state that really followed.

        Returns:
            The indices of the sequences that this finished, in order.

        Raises:
            ValueError: There is no running episode.
        """
        steps = int(self._counts[actor]) - self._writers[actor].first
        if not steps:
            raise ValueError("end_episode() follows a truncation, not the end of an episode")
        self._put(actor, last_frame, 0, 0.0, terminal=False, values=(0.0, last_value))
        return self._cut(actor, steps, steps + 1, ended=True)

    def update_priorities(
        self, indices: NDArray[np.int64], priorities: NDArray[np.float64]
    ) -> None:
        """Give sequences priorities, the first ones or new ones; the last of equal indices counts.

        Sequences that are no longer kept are passed over.

        Args:
            indices: int64 ``[count]``.
            priorities: float64 ``[count]``, before the exponent.

        Raises:
            ValueError: An index was never given out, or a priority is negative or not finite;
                nothing is changed.
        """
        numbers, actors = np.divmod(indices, self.actors)
        if not ((numbers >= 0) & (numbers < self._finished[actors])).all():
            raise ValueError("an index of no sequence")
        if not (np.isfinite(priorities) & (priorities >= 0)).all():
            raise ValueError("a priority is negative or not finite")
        kept = numbers >= self._oldest[actors]
        weights = exponentiate(np.maximum(priorities[kept], self._floor), self._exponent)
        self._tree.set(self._leaves(actors[kept], numbers[kept]), weights)
        self._maximum = float(weights.max(initial=self._maximum))

    # Reading

    def sample(self, stream: Stream, batch: int, *, stratified: bool) -> Draw:
        """Draw sequences in proportion to their priorities to the exponent; one uniform for each.

        Args:
            stream: Where the uniforms come from.
            batch: Sequences to draw.
            stratified: As for :meth:`SumTree.sample`.

        Raises:
            CapsuleError: CAP-T222, no sequence has a priority yet.
        """
        total = self._tree.total
        if not total:
            raise CapsuleError(
                "CAP-T222",
                f"none of the {self.sequences} sequences in the replay memory has a priority",
                fix="raise trainer.replay_start",
                exit_code=ExitCode.TRAINING_FAILED,
            )
        leaves = self._tree.sample(stream.uniforms(batch), stratified=stratified)
        actors, places = np.divmod(leaves, self._block)
        newest = self._finished[actors] - 1
        numbers = newest - (newest - places) % self._kept
        return Draw(numbers * self.actors + actors, self._tree.get(leaves) / total)

    def gather(
        self,
        indices: NDArray[np.int64],
        *,
        frames: bool = True,
        out: NDArray[Any] | None = None,
    ) -> SequenceBatch:
        """Assemble sequences.

        Entries added in the meantime change nothing, up to ``slack`` of each actor, so this may run
        beside the thread that adds them.

        Args:
            indices: int64 ``[batch]``, from ``sample`` or of finished sequences.
            frames: With their frames; otherwise there are none in the batch.
            out: Buffer ``[frame_stack - 1 + rows, batch, *frame_shape]`` for the frames; a new one
                if absent.

        Raises:
            ValueError: A sequence is overwritten, or there is no such one.
        """
        numbers, actors = np.divmod(indices, self.actors)
        of = {
            name: array[actors * self._table + numbers % self._table]
            for name, array in self._sequence_fields.items()
        }
        known = (numbers >= 0) & (numbers < self._finished[actors]) & (of["numbers"] == numbers + 1)
        whole = of["starts"] - self._reach >= self._counts[actors] - self._ring
        if not (known & whole).all():
            raise ValueError("a sequence that is not, or no longer, in the memory")
        # Everything below is [reach + rows, batch]: where in the sequence, and where in the ring.
        places = np.arange(-self._reach, self.layout.rows)[:, None] - of["fronts"]
        slots = actors * self._ring + (of["starts"] + places) % self._ring
        begun = places >= -of["before"]
        taken = begun & (places < of["steps"])
        past = self._reach - 1  # the step before row 0
        taken, slots_taken = taken[past:-1], slots[past:-1]
        actions = np.where(taken, self._actions[slots_taken], -1).astype(np.int64)
        rewards = np.where(taken, self._rewards[slots_taken], np.float32(0))
        seen = begun & (places < of["lengths"])
        rows = slice(self._reach, None)
        shown = slice(self._reach - self._history if frames else len(slots), None)
        images = np.take(self._frames, slots[shown], axis=0, out=out, mode="clip")
        images[~seen[shown]] = 0
        return SequenceBatch(
            frames=images,
            states=of["states"],
            resets=places[rows] <= 0,
            previous_actions=actions,
            previous_rewards=rewards,
            actions=np.maximum(actions[1:], 0),
            rewards=rewards[1:],
            terminals=(self._terminals[slots_taken] & taken)[1:],
            valid=taken[1:],
            values=np.where(seen[rows, :, None], self._values[slots[rows]], np.float32(0)),
        )

    # Saving

    def flush(self) -> None:
        """Hand every change to the file system; needed against power loss, not against a kill."""
        self._files.flush()

    def digest(self) -> str:
        """Return the XXH3-128 of the entries and sequences kept, by actor, oldest first.

        It says nothing of priorities, nor of the rings' layout.
        """
        result = xxhash.xxh3_128()
        for actor in range(self.actors):
            count, finished = int(self._counts[actor]), int(self._finished[actor])
            oldest = max(0, count - self._entries - self._reach)
            for fields, size, first, end in (
                (self._entry_fields, self._ring, oldest, count),
                (self._sequence_fields, self._table, int(self._oldest[actor]), finished),
            ):
                for name, array in fields.items():
                    header = [actor, name, array.dtype.str, list(array.shape[1:]), first, end]
                    result.update(canonical_json(header))
                    for part in _parts(actor * size, size, first, end):
                        result.update(array[part].data)
        return result.hexdigest()

    def state(self) -> dict[str, Any]:
        """Return a JSON-safe snapshot: every counter and priority, and the digest of the rest.

        From now on what it needs is kept: the rings refuse more than ``slack`` further entries of
        an actor until the next call.
        """
        for writer, count in zip(self._writers, self._counts.tolist(), strict=True):
            writer.checkpoint = count
        return {
            "actors": [
                [count, writer.first, writer.opened, writer.cut, finished, oldest]
                for writer, count, finished, oldest in zip(
                    self._writers,
                    self._counts.tolist(),
                    self._finished.tolist(),
                    self._oldest.tolist(),
                    strict=True,
                )
            ],
            "open_states": [self._open_states(writer) for writer in self._writers],
            "weights": array_document(self._tree.leaves),
            "maximum": self._maximum,
            "digest": self.digest(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Return to a snapshot; entries and sequences are those in the files.

        Raises:
            CapsuleError: CAP-T223, the files do not hold what they held at the checkpoint.
        """
        for actor, (numbers, encoded) in enumerate(
            zip(state["actors"], state["open_states"], strict=True)
        ):
            count, first, opened, cut, finished, oldest = numbers
            states = document_array(encoded)
            self._writers[actor] = _Writer(first, opened, cut, deque(states), count)
            self._counts[actor] = count
            self._finished[actor] = finished
            self._oldest[actor] = oldest
        self._tree.restore(document_array(state["weights"]))
        self._maximum = state["maximum"]
        if self.digest() != state["digest"]:
            raise CapsuleError(
                "CAP-T223",
                f"the replay files do not hold the sequences of the checkpoint at entry "
                f"{self.entries}",
                fix="start a new run directory: this one was changed or is incomplete",
                exit_code=ExitCode.TRAINING_FAILED,
            )

    def _open_states(self, writer: _Writer) -> dict[str, Any]:
        shape = (len(writer.states), *self._sequence_fields["states"].shape[1:])
        return array_document(np.array(writer.states, np.float32).reshape(shape))

    def _put(
        self,
        actor: int,
        frame: NDArray[Any],
        action: int,
        reward: float,
        terminal: bool,
        values: ArrayLike,
    ) -> None:
        """Add an entry and evict the sequences that it leaves no room for."""
        count, checkpoint = int(self._counts[actor]), self._writers[actor].checkpoint
        if checkpoint is not None and count >= checkpoint + self._slack:
            raise RuntimeError(f"more than {self._slack} entries added since the last checkpoint")
        slot = actor * self._ring + count % self._ring
        self._frames[slot] = frame
        self._actions[slot] = action
        self._rewards[slot] = reward
        self._terminals[slot] = terminal
        self._values[slot] = values
        self._counts[actor] = count + 1
        number = oldest = int(self._oldest[actor])
        starts = self._sequence_fields["starts"]
        while (
            number < self._finished[actor]
            and starts[actor * self._table + number % self._table] <= count - self._entries
        ):
            number += 1
        if number > oldest:
            self._evict(actor, number)

    def _cut(self, actor: int, steps: int, states: int, *, ended: bool) -> list[int]:
        """Finish every sequence that is complete, or of which no more will come.

        Args:
            actor: Whose.
            steps: Steps of its episode so far.
            states: Frames of its episode so far.
            ended: Whether there will be no more.

        Returns:
            The indices of the sequences finished.
        """
        writer, layout, indices = self._writers[actor], self.layout, []
        while writer.cut < writer.opened:
            begin = writer.cut * layout.period
            learned_before = begin - layout.period + layout.learned if writer.cut else 0
            complete = states >= begin + layout.learned + layout.lookahead
            if not (complete or (ended and steps > learned_before)):
                break
            indices.append(self._finish(actor, begin - layout.burn_in, steps, states))
        if ended:
            writer.end(int(self._counts[actor]))
        return indices

    def _finish(self, actor: int, row_zero: int, steps: int, states: int) -> int:
        """Enter the oldest open sequence into the table, evicting the one whose place it takes.

        Args:
            actor: Whose.
            row_zero: Step of the episode at row 0; negative where there is padding in front.
            steps: Steps of the episode so far.
            states: Frames of the episode so far.

        Returns:
            Its index.
        """
        writer, number = self._writers[actor], int(self._finished[actor])
        before = max(0, row_zero)
        front = before - row_zero
        values = {
            "numbers": number + 1,
            "starts": writer.first + before,
            "before": before,
            "fronts": front,
            "steps": min(steps - before, self.layout.rows - 1 - front),
            "lengths": min(states - before, self.layout.rows - front),
            "states": writer.states.popleft(),
        }
        slot = actor * self._table + number % self._table
        for name, value in values.items():
            self._sequence_fields[name][slot] = value
        writer.cut += 1
        self._finished[actor] = number + 1
        if number - self._kept >= self._oldest[actor]:
            self._evict(actor, number - self._kept + 1)
        if self._initial_priority == "maximum":
            leaf = self._leaves(np.array([actor]), np.array([number]))
            self._tree.set(leaf, np.array([self._maximum]))
        return number * self.actors + actor

    def _evict(self, actor: int, oldest: int) -> None:
        """Make number ``oldest`` the oldest sequence of ``actor`` that is kept."""
        numbers = np.arange(self._oldest[actor], oldest)
        self._tree.set(self._leaves(np.full_like(numbers, actor), numbers), np.zeros(len(numbers)))
        self._oldest[actor] = oldest

    def _leaves(self, actors: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return actors * self._block + numbers % self._kept


def _parts(base: int, size: int, first: int, end: int) -> list[slice]:
    """Return where numbers ``first`` to ``end`` of the ring at ``base`` lie, in order."""
    start, length = first % size, end - first
    wrapped = max(0, start + length - size)
    return [slice(base + start, base + start + length - wrapped), slice(base, base + wrapped)]
