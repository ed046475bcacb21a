"""Cutting episodes into overlapping sequences.

The source is Kapturowski et al. 2019, OpenReview r1lyTjAqYX, sections 2.3 and 3.

Sequence ``k`` of an episode trains on the ``trained`` steps that begin with step ``k period``. The
``burn_in`` steps before them are its prefix, which brings the recurrent state up to date; the
``lookahead`` states after them serve for bootstrapping. These are the *rows* of the sequence::

    row   0 ........ burn_in .................. burn_in + trained ........ rows - 1
          prefix     trained steps              states to bootstrap from

Sequences never cross the border of an episode. At its beginning, the missing prefix is replaced by
padding in front. Without padding, the first steps of an episode would never be trained on; with it,
fewer sequences train on them than on later ones. At its end, the last sequence is shorter and
padded behind; it is made only if it has a step that the sequence before it does not train on. (A
last sequence that reaches back to its full length would train more often on the steps before each
end.) Padding is zero, and its steps are not valid.

The paper's sequences of 80 steps, with a prefix of 40 and an overlap of 40, are ``burn_in=40,
trained=80, period=40``. Sequences of 80 steps whose first 40 are the prefix would be ``burn_in=40,
trained=40, period=40``.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SequenceLayout:
    """The lengths by which episodes are cut into sequences.

    Attributes:
        burn_in: Steps of the prefix.
        trained: Steps that are trained on.
        period: Steps from the start of one sequence to the start of the next.
        lookahead: States after the trained steps, at least one; with ``n``, every trained step has
            its full ``n``-step target.

    Raises:
        ValueError: A number is too small, or some steps would be in no sequence.
    """

    burn_in: int
    trained: int
    period: int
    lookahead: int = 1

    def __post_init__(self) -> None:
        if self.burn_in < 0 or not 1 <= self.period <= self.trained or self.lookahead < 1:
            raise ValueError(f"these lengths do not fit one another: {self}")

    @property
    def rows(self) -> int:
        """The number of states of a sequence, which has one step less."""
        return self.burn_in + self.trained + self.lookahead

    def begins(self, step: int) -> bool:
        """Return whether a sequence begins at a step of an episode, counted from 0."""
        return not step or (step + self.burn_in) % self.period == 0

    @property
    def most_open(self) -> int:
        """An upper bound of the sequences that an actor is writing at a time."""
        return math.ceil(self.rows / self.period) + 1


class CutSequence(NamedTuple):
    """A finished sequence, as a range of entries.

    Attributes:
        starts: Number of its first entry.
        before: Number of steps of the episode before it.
        fronts: Number of rows of padding in front.
        steps: Number of its steps, without padding.
        lengths: Number of its states, without padding: as many as steps, or one more.
        states: Recurrent state before its first entry, float32 ``[*state_shape]``.
    """

    starts: int
    before: int
    fronts: int
    steps: int
    lengths: int
    states: NDArray[np.float32]


class EpisodeCutter:
    """Cuts the episodes of one actor, whose entries are numbered from 0.

    Attributes:
        first: Number of the first entry of the running episode, or of the next entry if there is
            no running episode.
        opened: Number of its sequences that have begun.
        cut: Number of its sequences that are finished.
        states: Recurrent states at the start of those that have begun and are not finished, oldest
            first.
    """

    def __init__(self, layout: SequenceLayout) -> None:
        self._layout = layout
        self.first = self.opened = self.cut = 0
        self.states: deque[NDArray[np.float32]] = deque()

    def begin(self, number: int, state: NDArray[np.float32] | None) -> None:
        """Begin the sequences that begin with a step.

        Args:
            number: Number of the step's entry, which is the next one.
            state: Recurrent state before the step; copied. None if no sequence begins.

        Raises:
            ValueError: A sequence begins, and ``state`` is None.
        """
        layout, step = self._layout, number - self.first
        if layout.begins(step) and state is None:
            raise ValueError(f"a sequence begins at step {step} and needs the recurrent state")
        # Step 0 begins several sequences: those whose prefix would reach back before the episode.
        while self.opened * layout.period - layout.burn_in <= step:
            self.states.append(np.array(state, np.float32))
            self.opened += 1

    def finish(self, count: int, *, ended: bool, closed: bool = False) -> list[CutSequence]:
        """Return the sequences that the newest entry finished, in order.

        Args:
            count: Entries so far, the newest included.
            ended: Whether it ends the episode.
            closed: Whether it is not a step, but the last frame of a truncated episode.
        """
        layout, found = self._layout, []
        states = count - self.first
        steps = states - closed  # no action follows the last frame of a truncated episode
        while self.cut < self.opened:
            begin = self.cut * layout.period
            # The previous sequence trained on the steps before this one.
            trained_before = begin - layout.period + layout.trained if self.cut else 0
            complete = states >= begin + layout.trained + layout.lookahead
            if not (complete or (ended and steps > trained_before)):
                break
            before = max(0, begin - layout.burn_in)
            # The missing part of a prefix at the beginning of an episode becomes padding, so that
            # the trained rows of all sequences begin at the same row.
            front = before - (begin - layout.burn_in)
            found.append(
                CutSequence(
                    starts=self.first + before,
                    before=before,
                    fronts=front,
                    steps=min(steps - before, layout.rows - 1 - front),
                    lengths=min(states - before, layout.rows - front),
                    states=self.states.popleft(),
                )
            )
            self.cut += 1
        if ended:
            self.first, self.opened, self.cut = count, 0, 0
            self.states.clear()
        return found
