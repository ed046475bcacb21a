"""Cutting episodes into sequences: cases by hand. The naive reference is that of the replay."""

import numpy as np
import pytest

from capsule.training.r2d2.cutting import EpisodeCutter, SequenceLayout

SMALL = SequenceLayout(burn_in=2, trained=4, period=2)


@pytest.mark.parametrize(
    "numbers", [(-1, 4, 2, 1), (2, 0, 0, 1), (2, 4, 5, 1), (2, 4, 0, 1), (2, 4, 2, 0)]
)
def test_impossible_layouts_are_refused(numbers):
    with pytest.raises(ValueError, match="do not fit one another: SequenceLayout"):
        SequenceLayout(*numbers)


def test_sequences_begin_with_the_episode_and_every_period_with_their_prefix():
    assert SMALL.rows == 7
    assert [step for step in range(9) if SMALL.begins(step)] == [0, 2, 4, 6, 8]
    longer = SequenceLayout(burn_in=3, trained=4, period=4)
    assert [step for step in range(12) if longer.begins(step)] == [0, 1, 5, 9]


def play(cutter, first, steps, *, ended=False, closed=False):
    """Take steps from entry ``first`` on, with the entry as state; return what each finished."""
    found = []
    for number in range(first, first + steps):
        last = number == first + steps - 1 and not closed
        cutter.begin(number, np.full(1, number, np.float32))
        found.append(cutter.finish(number + 1, ended=ended and last))
    if closed:
        found.append(cutter.finish(first + steps + 1, ended=True, closed=True))
    return found


def ranges(sequences):
    """Everything but the state, whose place is that of the first entry."""
    assert all(each.states.tolist() == [each.starts] for each in sequences)
    return [tuple(each[:5]) for each in sequences]


def test_a_sequence_is_finished_when_the_state_after_it_is_known():
    cutter = EpisodeCutter(SMALL)
    found = play(cutter, 0, 8)
    assert [len(each) for each in found] == [0, 0, 0, 0, 1, 0, 1, 0]
    assert ranges(found[4]) == [(0, 0, 2, 4, 5)]  # starts, before, fronts, steps, lengths
    assert ranges(found[6]) == [(0, 0, 0, 6, 7)]
    assert (cutter.opened, cutter.cut, len(cutter.states)) == (5, 2, 3)


@pytest.mark.parametrize(("closed", "length"), [(False, 5), (True, 6)])
def test_the_last_sequences_are_shorter_and_the_next_episode_begins_anew(closed, length):
    cutter = EpisodeCutter(SMALL)
    play(cutter, 0, 3, ended=True)
    assert (cutter.first, cutter.opened, cutter.cut, len(cutter.states)) == (3, 0, 0, 0)
    found = play(cutter, 3, 5, ended=not closed, closed=closed)
    assert ranges(found[-1])[-1] == (3, 0, 0, 5, length)
    assert cutter.first == 8 + closed


def test_the_least_layout_is_possible():
    least = SequenceLayout(burn_in=0, trained=1, period=1, lookahead=1)
    assert (least.rows, [step for step in range(4) if least.begins(step)]) == (2, [0, 1, 2, 3])


@pytest.mark.parametrize("numbers", [(2, 4, 2, 1), (0, 1, 1, 1), (5, 4, 1, 3), (0, 4, 4, 1)])
def test_no_more_sequences_are_open_than_there_is_room_for(numbers):
    layout, most = SequenceLayout(*numbers), 0
    cutter = EpisodeCutter(layout)
    for number in range(50):
        cutter.begin(number, np.zeros(1, np.float32))
        most = max(most, len(cutter.states))
        cutter.finish(number + 1, ended=number == 30)
    assert layout.most_open - 1 <= most <= layout.most_open


@pytest.mark.parametrize(("closed", "length"), [(False, 5), (True, 6)])
def test_every_sequence_of_a_later_episode_is_counted_from_where_it_begins(closed, length):
    cutter = EpisodeCutter(SMALL)
    play(cutter, 0, 3, ended=True)
    found = play(cutter, 3, 9, ended=not closed, closed=closed)
    assert [ranges(each) for each in found if each] == [
        [(3, 0, 2, 4, 5)],  # starts, before, fronts, steps, lengths
        [(3, 0, 0, 6, 7)],
        *([[(5, 2, 0, 6, 7)], [(7, 4, 0, 5, length)]] if closed else []),
        *([] if closed else [[(5, 2, 0, 6, 7), (7, 4, 0, 5, length)]]),
    ]
    assert [len(each) for each in found].index(1) == 4
    assert (cutter.first, cutter.opened, cutter.cut) == (12 + closed, 0, 0)


def test_a_sequence_that_would_learn_nothing_new_is_not_made():
    for steps, sequences in ((1, 1), (4, 1), (5, 2), (6, 2), (7, 3)):
        found = play(EpisodeCutter(SMALL), 0, steps, ended=True)
        assert sum(map(len, found)) == sequences, steps


def test_states_are_copied_and_needed_where_a_sequence_begins():
    cutter, state = EpisodeCutter(SMALL), np.zeros(1, np.float32)
    cutter.begin(0, state)
    state[:] = 7
    assert [each.tolist() for each in cutter.states] == [[0.0], [0.0]]
    cutter.finish(1, ended=False)
    cutter.begin(1, None)
    cutter.finish(2, ended=False)
    with pytest.raises(ValueError, match="begins at step 2 and needs the recurrent state"):
        cutter.begin(2, None)


@pytest.mark.parametrize(
    "layout",
    [
        SequenceLayout(burn_in=0, trained=1, period=1, lookahead=1),
        SequenceLayout(burn_in=4, trained=8, period=4, lookahead=2),
        SequenceLayout(burn_in=3, trained=3, period=1, lookahead=3),
        SequenceLayout(burn_in=2, trained=6, period=3, lookahead=1),
    ],
)
def test_how_many_entries_always_contain_a_sequence(layout):
    """The number on which capsule.host.spec_checks insists for trainer.replay_capacity."""
    cutter, newest, needed, count = EpisodeCutter(layout), None, 0, 0
    for length in [*range(1, 3 * layout.rows), *range(3 * layout.rows, 0, -1)] * 2:
        for _ in range(length):
            cutter.begin(count, np.zeros(1, np.float32))
            count += 1
            for sequence in cutter.finish(count, ended=False):
                newest = sequence.starts
            needed = max(needed, count - newest if newest is not None else 0)
        # The last frame of a truncated episode is an entry, too.
        count += 1
        for sequence in cutter.finish(count, ended=True, closed=True):
            newest = sequence.starts
        needed = max(needed, count - newest)
    assert needed == layout.burn_in + 2 * layout.trained + layout.lookahead
