"""Sequence replay: hand-computed cases, a naive reference, snapshots, and a real kill."""

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError
from capsule.training.losses.r2d2 import n_step_returns
from capsule.training.r2d2.cutting import SequenceLayout
from capsule.training.r2d2.priorities import LOWEST_PRIORITY
from capsule.training.r2d2.replay import Frames, SequenceReplay
from capsule.training.state.streams import Stream

ROOT = Path(__file__).parents[3]
SMALL = SequenceLayout(burn_in=2, trained=4, period=2)


def memory(
    directory=None,
    *,
    layout=SMALL,
    actors=1,
    entries=30,
    slack=20,
    stack=2,
    shape=(2,),
    dtype=np.uint8,
    state_shape=(3,),
    exponent=1.0,
):
    """A memory that keeps ``entries`` of each actor."""
    return SequenceReplay(
        directory,
        layout=layout,
        actors=actors,
        capacity=entries * actors,
        slack=slack,
        frames=Frames(shape, dtype, stack),
        state_shape=state_shape,
        priority_exponent=exponent,
    )


def frame(value):
    return np.array([value % 251, 255 - value % 251], np.uint8)


def put(replay, letter, value, actor=0):
    """Add one step: ``.`` goes on, ``R`` ends the return, ``T`` the episode; ``C`` closes one."""
    if letter == "C":
        return replay.end_episode(actor, frame(value))
    return replay.append(
        actor,
        frame(value),
        value,
        value / 2,
        letter in "RT",
        ended=letter == "T",
        state=np.full(3, value, np.float32),
    )


def add(replay, text, first=1, actor=0):
    """Add one entry per letter; return the sequences finished by each."""
    return [put(replay, letter, value, actor) for value, letter in enumerate(text, first)]


def gather(replay, *indices):
    return replay.gather(np.array(indices, np.int64))


def firsts(array):
    """The first element of every frame of the only column."""
    return array[:, 0, ..., 0].tolist()


# By hand


def test_sequences_are_finished_when_the_state_after_them_is_known():
    replay = memory()
    assert add(replay, "........") == [[], [], [], [], [0], [], [1], []]
    assert add(replay, "T", first=9) == [[2, 3]]
    assert replay.sequences == 4
    assert replay.entries == 9


def test_the_first_sequence_of_an_episode_is_padded_in_front():
    replay = memory()
    add(replay, ".....")
    batch = gather(replay, 0)
    assert firsts(batch.frames) == [0, 0, 0, 1, 2, 3, 4, 5]
    assert firsts(batch.observations) == [*([0, 0], [0, 0], [0, 1], [1, 2], [2, 3], [3, 4], [4, 5])]
    assert batch.observations[2, 0].tolist() == [[0, 0], [1, 254]]
    assert batch.states.tolist() == [[1, 1, 1]]
    assert batch.resets[:, 0].tolist() == [True, True, True, False, False, False, False]
    assert batch.previous_actions[:, 0].tolist() == [-1, -1, -1, 1, 2, 3, 4]
    assert batch.previous_rewards[:, 0].tolist() == [0, 0, 0, 0.5, 1, 1.5, 2]
    assert batch.actions[:, 0].tolist() == [0, 0, 1, 2, 3, 4]
    assert batch.rewards[:, 0].tolist() == [0, 0, 0.5, 1, 1.5, 2]
    assert batch.terminals[:, 0].tolist() == [False] * 6
    assert batch.valid[:, 0].tolist() == [False, False, True, True, True, True]


def test_a_later_sequence_begins_with_its_prefix_and_reaches_back():
    replay = memory()
    add(replay, ".........")
    batch = gather(replay, 2)
    assert firsts(batch.frames) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert batch.states.tolist() == [[3, 3, 3]]
    assert batch.resets[:, 0].tolist() == [True] + [False] * 6
    assert batch.previous_actions[:, 0].tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert batch.valid.all()


def test_the_last_sequence_is_padded_behind():
    """After a terminal nothing follows; after a truncation the state that really did."""
    replay = memory(actors=2)
    assert add(replay, "......T")[-1] == [2, 4]
    batch = gather(replay, 4)
    assert firsts(batch.frames) == [2, 3, 4, 5, 6, 7, 0, 0]
    assert batch.valid[:, 0].tolist() == [True] * 5 + [False]
    assert batch.terminals[:, 0].tolist() == [False] * 4 + [True, False]
    assert add(replay, "......C", actor=1)[-1] == [3]
    batch = gather(replay, 3)
    assert firsts(batch.frames) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert batch.valid.all()
    assert not batch.terminals.any()
    assert batch.previous_actions[:, 0].tolist() == [-1, 1, 2, 3, 4, 5, 6]
    assert batch.actions[:, 0].tolist() == [1, 2, 3, 4, 5, 6]


def test_every_step_is_trained_on_and_no_sequence_repeats_another():
    """The last one is dropped if the one before it learns the same steps."""
    for length, sequences in ((1, 1), (4, 1), (5, 2), (6, 2), (7, 3), (8, 3), (9, 4)):
        finished = add(memory(), "." * (length - 1) + "T")
        assert sum(len(indices) for indices in finished) == sequences


def test_an_episode_of_one_step_is_a_sequence():
    replay = memory()
    assert add(replay, "TT.C") == [[0], [1], [], [2]]
    batch = gather(replay, 1, 2)
    assert batch.valid.sum(0).tolist() == [1, 1]
    assert batch.frames[:, 0, 0].tolist() == [0, 0, 0, 2, 0, 0, 0, 0]
    assert batch.frames[:, 1, 0].tolist() == [0, 0, 0, 3, 4, 0, 0, 0]
    assert batch.states[:, 0].tolist() == [2, 3]


def test_a_return_may_end_within_an_episode():
    """A lost life with ``roll``: nothing is bootstrapped across it, but the sequence goes on."""
    replay = memory()
    add(replay, "..R..")
    batch = gather(replay, 0)
    assert batch.terminals[:, 0].tolist() == [False, False, False, False, True, False]
    assert firsts(batch.frames) == [0, 0, 0, 1, 2, 3, 4, 5]
    assert batch.resets[:, 0].sum() == 3


def test_more_states_to_bootstrap_from():
    replay = memory(layout=SequenceLayout(burn_in=0, trained=2, period=2, lookahead=3))
    assert add(replay, "......") == [[], [], [], [], [0], []]
    assert add(replay, "T", first=7) == [[1, 2, 3]]
    batch = gather(replay, 0, 2, 3)
    assert batch.frames[1:, :, 0].T.tolist() == [[1, 2, 3, 4, 5], [5, 6, 7, 0, 0], [7, 0, 0, 0, 0]]


def test_a_capacity_of_less_than_a_sequence_is_refused():
    with pytest.raises(ValueError, match="6 entries of an actor are too few for a sequence of 7"):
        memory(entries=6)


def test_episodes_end_in_one_of_two_ways():
    replay = memory()
    with pytest.raises(ValueError, match="end_episode"):
        replay.append(0, frame(1), 0, 0.0, terminal=False, ended=True, state=np.zeros(3))
    for text in ("", "..T", "..C"):
        add(replay, text)
        with pytest.raises(ValueError, match="end_episode"):
            replay.end_episode(0, frame(9))


def test_frames_and_states_are_copied():
    replay, image, state = memory(), frame(1), np.ones(3, np.float32)
    replay.append(0, image, 1, 1.0, terminal=False, ended=False, state=state)
    image[:], state[:] = 77, 77
    add(replay, "....")
    batch = gather(replay, 0)
    assert batch.frames[3, 0].tolist() == [1, 254]
    assert batch.states.tolist() == [[1, 1, 1]]


def test_types_and_torch():
    replay = memory(stack=3, shape=(2, 1), dtype=np.float32, state_shape=(0,))
    for value in range(9):
        picture = np.full((2, 1), value / 3, np.float32)
        replay.append(0, picture, value, 0.1, False, ended=False, state=np.zeros(0))
    batch = gather(replay, 0, 1)
    assert [array.dtype.name for array in batch] == [
        *("float32", "float32", "bool", "int64", "float32", "int64", "float32", "bool", "bool"),
        "float32",
    ]
    assert batch.observations.shape == (7, 2, 3, 2, 1)
    observations = torch.from_numpy(batch.observations)  # warns of what it cannot share
    assert observations[3, 1, :, 0, 0].tolist() == pytest.approx([1 / 3, 2 / 3, 1])
    assert batch.states.shape == (2, 0)
    replay.restore(json.loads(json.dumps(replay.state())))


def test_what_the_actor_thought_comes_back():
    replay = memory()
    for step in range(5):
        values = (step / 2, step)
        replay.append(0, frame(0), 0, 0.0, False, ended=False, state=np.zeros(3), values=values)
    (index,) = replay.end_episode(0, frame(0), 9.0)[-1:]
    batch = replay.gather(np.array([index]), frames=False)
    assert batch.frames.shape == (0, 1, 2)
    there = batch.values[:, 0].any(axis=1)
    assert batch.values[there, 0].tolist()[-2:] == [[2.0, 4.0], [0.0, 9.0]]
    assert not batch.values[len(there) - 1 - there[::-1].argmax() + 1 :].any()


def test_a_state_is_needed_where_a_sequence_begins_and_nowhere_else():
    replay = memory()
    arguments = (0, frame(0), 0, 0.0, False)
    with pytest.raises(ValueError, match="begins at step 0"):
        replay.append(*arguments, ended=False, state=None)
    for step in range(20):
        state = np.zeros(3) if replay.layout.begins(step) else None
        replay.append(*arguments, ended=False, state=state)
    assert replay.sequences > 2


# Against the naive reference


class Naive:
    """The same memory as lists: nothing is forgotten, everything is looked up."""

    def __init__(self, layout, actors, entries, stack):
        self.layout, self.entries, self.stack_size = layout, entries, stack
        self.episodes = [[[]] for _ in range(actors)]

    def put(self, letter, value, actor):
        if letter != "C" and self.over(self.episodes[actor][-1]):
            self.episodes[actor].append([])
        self.episodes[actor][-1].append((letter, value))

    @staticmethod
    def over(episode):
        return bool(episode) and episode[-1][0] in "TC"

    def sequences(self, actor):
        """(first trained step, episode, entries before the episode) of all ever finished."""
        trained, period = self.layout.trained, self.layout.period
        found, passed = [], 0
        for episode in self.episodes[actor]:
            steps = [entry for entry in episode if entry[0] != "C"]
            covered = 0
            for begin in range(0, len(steps), period):
                whole = len(episode) >= begin + trained + self.layout.lookahead
                if whole or (self.over(episode) and len(steps) > covered):
                    found.append((begin, episode, passed))
                covered = begin + trained
            passed += len(episode)
        return found

    def kept(self, actor):
        """Numbers of the sequences that are not evicted."""
        found = self.sequences(actor)
        count = sum(len(episode) for episode in self.episodes[actor])
        most = math.ceil(self.entries / self.layout.period)
        starts = [passed + max(0, begin - self.layout.burn_in) for begin, _, passed in found]
        return [
            number
            for number, start in enumerate(starts)
            if start >= count - self.entries and number >= len(found) - most
        ]

    def rows(self, actor, number):
        """One dictionary per row, and the state."""
        begin, episode, _ = self.sequences(actor)[number]
        steps = [entry for entry in episode if entry[0] != "C"]

        def at(entries, place):
            return entries[place] if 0 <= place < len(entries) else None

        rows, start = [], begin - self.layout.burn_in
        for row in range(self.layout.rows):
            now, before = at(steps, start + row), at(steps, start + row - 1)
            window = range(start + row - self.stack_size + 1, start + row + 1)
            shown = [at(episode, place) for place in window]
            rows.append(
                {
                    "observations": [frame(x[1]).tolist() if x else [0, 0] for x in shown],
                    "resets": row == 0 or start + row <= 0,
                    "previous_actions": before[1] if before else -1,
                    "previous_rewards": before[1] / 2 if before else 0,
                    "actions": now[1] if now else 0,
                    "rewards": now[1] / 2 if now else 0,
                    "terminals": bool(now) and now[0] in "RT",
                    "valid": bool(now),
                }
            )
        return rows, [steps[max(0, start)][1]] * 3


@st.composite
def layouts(draw):
    trained = draw(st.integers(1, 5))
    return SequenceLayout(
        burn_in=draw(st.integers(0, 5)),
        trained=trained,
        period=draw(st.integers(1, trained)),
        lookahead=draw(st.integers(1, 3)),
    )


@st.composite
def histories(draw, actors, most=60):
    """Steps of actors in any order: (letter, actor)."""
    running, history = [False] * actors, []
    letters = draw(st.sampled_from(["......RTC", "..........................RTC", "TC."]))
    one = st.tuples(st.sampled_from(letters), st.integers(0, actors - 1))
    for letter, actor in draw(st.lists(one, max_size=most)):
        if letter != "C" or running[actor]:
            history.append((letter, actor))
            running[actor] = letter in ".R"
    return history


def check_rows(replay, naive, pairs):
    """Compare the sequences (actor, number) of ``pairs`` with the naive ones, row by row."""
    batch = gather(replay, *(number * replay.actors + actor for actor, number in pairs))
    for column, (actor, number) in enumerate(pairs):
        rows, state = naive.rows(actor, number)
        assert batch.states[column].tolist() == state
        for name in rows[0]:
            ours = getattr(batch, name)[:, column].tolist()
            assert ours == [row[name] for row in rows][: len(ours)], name


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data(), layouts(), st.integers(1, 3), st.integers(0, 12), st.integers(1, 3))
def test_sequences_agree_with_the_naive_reference(data, layout, actors, more, stack):
    entries = layout.rows + more
    slack = data.draw(st.integers(0, 3))
    replay = memory(layout=layout, actors=actors, entries=entries, stack=stack, slack=slack)
    naive = Naive(layout, actors, entries, stack)
    for value, (letter, actor) in enumerate(data.draw(histories(actors)), 1):
        before = len(naive.sequences(actor))
        naive.put(letter, value, actor)
        found = range(before, len(naive.sequences(actor)))
        assert put(replay, letter, value, actor) == [number * actors + actor for number in found]
        pairs = [(actor, number) for actor in range(actors) for number in naive.kept(actor)]
        assert replay.sequences == len(pairs)
        newest = [pair for pair in pairs if pair[0] == actor]
        check_rows(replay, naive, newest[:1] + newest[-1:])
    if replay.entries:
        check_rows(replay, naive, pairs)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.data(), layouts())
def test_priorities_agree_with_the_naive_reference(data, layout):
    """Weights are multiples of 1/64, so that the naive sums are exact."""
    actors, entries = 2, layout.rows + 4
    replay = memory(layout=layout, actors=actors, entries=entries)
    naive, weights, indices = Naive(layout, actors, entries, 2), {}, []
    for value, (letter, actor) in enumerate(data.draw(histories(actors)), 1):
        naive.put(letter, value, actor)
        found = put(replay, letter, value, actor)
        indices += found
        weights.update(dict.fromkeys(found, 0.0))
        kept = [n * actors + a for a in range(actors) for n in naive.kept(a)]
        if indices:
            pairs = st.tuples(st.sampled_from(indices), st.integers(1, 640))
            changes = [(index, n / 64) for index, n in data.draw(st.lists(pairs, max_size=4))]
            replay.update_priorities(
                np.array([index for index, _ in changes], np.int64),
                np.array([priority for _, priority in changes], np.float64),
            )
            for index, priority in changes:
                if index in kept:
                    weights[index] = priority
        drawn = naive_draw(replay, {index: weights[index] for index in kept}, layout, entries)
        if drawn is not None:
            draw = replay.sample(Stream("minibatch", 5), 9)
            assert (draw.indices.tolist(), draw.probabilities.tolist()) == drawn


def naive_draw(replay, weights, layout, entries):
    """Nine sequences, looking at every place of every actor in order."""
    if not any(weights.values()):
        with pytest.raises(CapsuleError, match="CAP-T222") as caught:
            replay.sample(Stream("minibatch", 5), 9)
        assert "trainer.replay_capacity" in caught.value.fix
        return None
    most = math.ceil(entries / layout.period)
    places = sorted(
        (index % replay.actors, index // replay.actors % most, index) for index in weights
    )
    total = sum(weights.values())
    indices = []
    for uniform in Stream("minibatch", 5).uniforms(9).tolist():
        number = uniform * total
        for _, _, index in places:
            if number < weights[index]:
                break
            number -= weights[index]
        indices.append(index)
    return indices, [weights[index] / total for index in indices]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.data(), layouts())
def test_the_returns_of_a_sequence_are_those_of_its_episode(data, layout):
    """With ``lookahead`` of n, each trained step has all of its n-step return, and no other."""
    steps, discount = layout.lookahead, 0.5
    naive, replay = Naive(layout, 1, 200, 1), memory(layout=layout, entries=200, stack=1)
    for value, (letter, actor) in enumerate(data.draw(histories(1)), 1):
        naive.put(letter, value, actor)
        put(replay, letter, value, actor)
    for index, (begin, episode, _) in enumerate(naive.sequences(0)):
        batch = gather(replay, index)
        trained = slice(layout.burn_in, None)
        valid = torch.from_numpy(batch.valid[trained])
        returns = n_step_returns(
            torch.from_numpy(batch.rewards[trained]),
            torch.from_numpy(discount * ~batch.terminals[trained]).float(),
            torch.from_numpy(batch.observations[trained, :, 0, 0]).float(),  # a frame's value
            valid.sum(0),
            steps,
        )
        expected = []
        for step in range(begin, min(begin + layout.trained, len(episode))):
            total, factor, now = 0.0, 1.0, step
            while now < min(step + steps, len(episode)) and episode[now][0] != "C" and factor:
                total += factor * episode[now][1] / 2
                factor *= 0 if episode[now][0] in "RT" else discount
                now += 1
            expected.append(total + (factor * episode[now][1] if factor else 0))
        expected = expected[: len(expected) - (episode[step][0] == "C")]
        assert returns[valid][: len(expected)].tolist() == pytest.approx(expected, rel=1e-6)
        assert valid[: layout.trained].sum() == len(expected)


# Priorities


def ready(**options):
    """A memory with sequences 0 to 3, of priorities 1, 2, 3 and 4."""
    replay = memory(**options)
    add(replay, "........T")
    replay.update_priorities(np.arange(4), np.array([1.0, 2.0, 3.0, 4.0]))
    return replay


def probabilities(replay):
    draw = replay.sample(Stream("minibatch", 0), 200)
    return dict(sorted(zip(draw.indices.tolist(), draw.probabilities.tolist(), strict=True)))


def test_probabilities_are_priorities_to_the_exponent():
    assert probabilities(ready()) == {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}
    weights = [float(np.float32(n**0.9)) for n in (1, 2, 3, 4)]
    total = (weights[0] + weights[1]) + (weights[2] + weights[3])
    assert probabilities(ready(exponent=0.9)) == {n: w / total for n, w in enumerate(weights)}


def test_low_priorities_count_as_the_lowest():
    replay = ready()
    replay.update_priorities(np.arange(4), np.array([0.0, 0.1, 1.0, 2.0]) * LOWEST_PRIORITY)
    assert probabilities(replay) == {0: 0.2, 1: 0.2, 2: 0.2, 3: 0.4}


def test_a_sequence_without_a_priority_is_not_drawn():
    replay = ready()
    assert add(replay, ".....", first=10)[-1] == [4]
    assert set(probabilities(replay)) == {0, 1, 2, 3}
    replay.update_priorities(np.array([4]), np.array([10.0]))
    assert probabilities(replay)[4] == 0.5


def test_evicted_sequences_are_never_drawn_or_changed():
    """Of 31 entries the first is no longer kept; the place of number 0 is taken by number 15."""
    replay = ready()
    add(replay, "." * 22, first=10)
    assert set(probabilities(replay)) == {2, 3}  # numbers 0 and 1 begin with the same entry
    before = probabilities(replay)
    replay.update_priorities(np.array([0]), np.array([1e6]))
    assert probabilities(replay) == before
    add(replay, "T" * 40, first=60)
    replay.update_priorities(np.array([0, 1, 2, 3]), np.array([1e6] * 4))
    with pytest.raises(CapsuleError, match="none of the 15 sequences"):
        probabilities(replay)
    assert replay.sequences == 15


@pytest.mark.parametrize("index", [-1, 4])
def test_an_index_never_given_out_is_refused(index):
    replay = ready()
    with pytest.raises(ValueError, match="does not belong to a sequence"):
        replay.update_priorities(np.array([0, index]), np.array([7.0, 7.0]))
    with pytest.raises(ValueError, match="is not in the memory"):
        gather(replay, 0, index)
    assert probabilities(replay)[0] == 0.1


@pytest.mark.parametrize("priority", [-1.0, math.nan, math.inf])
def test_an_impossible_priority_is_refused(priority):
    replay = ready()
    with pytest.raises(ValueError, match="negative or not finite"):
        replay.update_priorities(np.array([0, 1]), np.array([7.0, priority]))
    assert probabilities(replay)[0] == 0.1


def test_a_batch_drawn_earlier_outlives_slack_further_entries():
    replay = memory(slack=6)
    add(replay, "." * 61)
    oldest = gather(replay, 17, 20)
    add(replay, "..T.TT", first=62)
    for old, new in zip(oldest, gather(replay, 17, 20), strict=True):
        np.testing.assert_array_equal(old, new)
    add(replay, ".." * 8, first=70)
    with pytest.raises(ValueError, match="is not in the memory"):
        gather(replay, 17)


def test_a_sequence_whose_place_is_taken_is_not_gathered():
    """Its entries are still there, but short episodes have filled the table."""
    replay = memory(slack=0)
    add(replay, "T" * 30)
    with pytest.raises(ValueError, match="is not in the memory"):
        gather(replay, 0)
    assert gather(replay, 29).actions[2].tolist() == [30]


# Actors are the shards


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.data())
def test_an_actor_is_independent_of_the_others(data):
    """Any order between actors, and any split of them over memories, gives the same."""
    history = data.draw(histories(4))
    values = {}
    entries = [
        (letter, actor, values.setdefault(actor, []).append(0) or len(values[actor]))
        for letter, actor in history
    ]
    together, sorted_by_actor = memory(actors=4), memory(actors=4)
    halves = [memory(actors=2), memory(actors=2)]
    for replay, order in (
        (together, entries),
        (sorted_by_actor, sorted(entries, key=lambda e: e[1])),
    ):
        for letter, actor, value in order:
            prioritize(replay, put(replay, letter, value, actor))
    for letter, actor, value in entries:
        half = halves[actor // 2]
        prioritize(half, put(half, letter, value, actor % 2))
    assert together.state() == sorted_by_actor.state()
    for half, replay in enumerate(halves):
        np.testing.assert_array_equal(
            replay._priorities.tree._nodes[1],
            together._priorities.tree._nodes[2 + half],
            strict=True,
        )
        numbers = [
            [a, n] for a in (0, 1) for n in range(replay._oldest[a], replay._sequences.counts[a])
        ]
        ours = gather(replay, *(n * 2 + a for a, n in numbers))
        theirs = gather(together, *(n * 4 + a + 2 * half for a, n in numbers))
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other)


def prioritize(replay, indices):
    """A priority that depends on the actor's own sequence number only."""
    numbers = np.array(indices, np.int64) // replay.actors
    replay.update_priorities(np.array(indices, np.int64), 0.3 + numbers % 7)


# Saving


def perform(replay, history, first):
    """Add a history, with priorities and draws between; return all that came out."""
    log = []
    for value, (letter, actor) in enumerate(history, first):
        indices = put(replay, letter, value, actor)
        log.append(indices)
        changed = [index for index in indices if (index + value) % 3]  # some wait for their first
        replay.update_priorities(
            np.array(changed, np.int64), np.array([0.1 + (7 * i) % 11 for i in changed])
        )
        if replay._priorities.tree.total and value % 3 == 0:
            draw = replay.sample(Stream("minibatch", value), 4)
            batch = replay.gather(draw.indices)
            log += [array.tolist() for array in (*draw, *batch)]
            replay.update_priorities(draw.indices, draw.probabilities * value)
    return log


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.data(), layouts())
def test_a_snapshot_continues_with_the_same_bits(data, layout):
    options = {
        "layout": layout,
        "actors": 2,
        "entries": layout.rows + 3,
        "exponent": 0.9,
    }
    whole, resumed = memory(**options), memory(**options)
    history = data.draw(histories(2, most=80))
    at = data.draw(st.integers(max(0, len(history) - 20), len(history)))
    for replay in (whole, resumed):
        perform(replay, history[:at], 1)
    state = json.loads(json.dumps(resumed.state()))
    lost = [step for step in data.draw(histories(2, most=20)) if step[0] != "C"]
    perform(resumed, lost, 1000)
    resumed.restore(state)
    assert perform(resumed, history[at:], at + 1) == perform(whole, history[at:], at + 1)
    assert resumed.state() == whole.state()


HISTORY = "..T....C..R...T....C..R..C.....T......C....T.......T...C......"

KILLED = """
import json, os, signal, sys
from pathlib import Path
from tests.training.r2d2.test_replay import HISTORY, memory, perform
directory, at, more = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
replay = memory(directory, entries=20, slack=12)
history = [(letter, 0) for letter in HISTORY]
perform(replay, history[:at], 1)
print(json.dumps(replay.state()), flush=True)
perform(replay, history[at:at + more], at + 1)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("at", "more"), [(0, 5), (5, 3), (24, 0), (24, 12), (37, 7), (50, 12)])
def test_a_killed_process_resumes_from_its_last_checkpoint(tmp_path, at, more):
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(at), str(more)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    resumed, whole = memory(tmp_path, entries=20, slack=12), memory(entries=20, slack=12)
    resumed.restore(json.loads(done.stdout))
    history = [(letter, 0) for letter in HISTORY]
    perform(whole, history[:at], 1)
    rest = history[at : at + 12]
    assert perform(resumed, rest, at + 1) == perform(whole, rest, at + 1)
    assert resumed.state() == whole.state()


def test_a_sequence_is_refused_when_the_first_frame_that_it_needs_is_overwritten():
    """Its first observation stacks three frames, of which two lie before the sequence."""
    replay = memory(stack=3)
    add(replay, "." * 10)
    start = int(replay._sequences.fields["starts"][2])
    assert start >= 2
    add(replay, "." * (replay._entries.slots + start - 2 - 10), first=11)
    gather(replay, 2)
    add(replay, ".")
    with pytest.raises(ValueError, match="is not in the memory"):
        gather(replay, 2)


def test_the_digest_covers_the_shape_of_frames():
    digests = set()
    for shape in ((2,), (2, 1)):
        replay = memory(shape=shape)
        replay.append(0, np.zeros(shape, np.uint8), 0, 0.0, False, ended=False, state=np.zeros(3))
        digests.add(replay.digest())
    assert len(digests) == 2


def test_the_digest_does_not_depend_on_the_slack():
    digests = set()
    for slack in (0, 1, 7):
        replay = memory(slack=slack)
        add(replay, HISTORY)
        digests.add(replay.digest())
    assert len(digests) == 1


@pytest.mark.parametrize(("back", "covered"), [(31, True), (32, False)])
def test_the_digest_covers_what_an_observation_can_reach(back, covered):
    """30 entries are kept, and the one before them for frame stacks and previous actions."""
    replay = memory()
    add(replay, "." * 40)
    before = replay.digest()
    replay._entries.fields["frames"][40 - back] ^= 1
    assert (replay.digest() != before) == covered


def test_what_a_checkpoint_needs_outlives_as_many_sequences_as_the_slack_allows():
    replay = memory(slack=20)
    add(replay, "T" * 30)
    state = replay.state()
    lost = add(replay, "T" * 20)
    replay.restore(state)
    assert add(replay, "T" * 20) == lost
    with pytest.raises(RuntimeError, match="more than 20 entries"):
        add(replay, "T")


def test_sequences_finished_by_the_last_entry_of_the_slack_take_no_place_that_is_needed():
    """One entry may finish several sequences, all after a checkpoint that may be gone back to."""
    layout = SequenceLayout(burn_in=0, trained=2, period=2, lookahead=3)
    replay = memory(layout=layout, slack=1)
    add(replay, "T" * 30 + "....")
    state, indices = replay.state(), range(15, 30)
    assert replay.sequences == 15
    before = gather(replay, *indices)
    assert add(replay, "T") == [[30, 31, 32]]
    replay.restore(state)
    for old, new in zip(before, gather(replay, *indices), strict=True):
        np.testing.assert_array_equal(old, new)
    assert add(replay, "T") == [[30, 31, 32]]


FIELDS = [
    *("frames", "actions", "rewards", "terminals", "values"),
    *("numbers", "starts", "before", "fronts", "steps", "lengths", "states"),
]


@pytest.mark.parametrize("name", FIELDS)
def test_changed_files_are_refused(tmp_path, name):
    replay = memory(tmp_path)
    add(replay, "." * 16)
    state = json.loads(json.dumps(replay.state()))
    memory(tmp_path).restore(state)
    path = tmp_path / f"{name}.bin"
    data = bytearray(path.read_bytes())
    entry = name in FIELDS[:4]
    rings, slot = (replay._entries, 15) if entry else (replay._sequences, replay.sequences - 1)
    data[slot * (len(data) // rings.slots)] ^= 1
    path.write_bytes(data)
    with pytest.raises(CapsuleError, match="CAP-T223"):
        memory(tmp_path).restore(state)


def test_missing_files_are_refused(tmp_path):
    replay = memory(tmp_path / "one")
    add(replay, "....")
    with pytest.raises(CapsuleError, match="CAP-T223"):
        memory(tmp_path / "two").restore(replay.state())


def test_more_than_slack_entries_after_a_checkpoint_are_a_bug():
    replay = memory(slack=2, actors=2)
    add(replay, "." * 20)
    replay.state()
    add(replay, "..")
    add(replay, "..", actor=1)
    with pytest.raises(RuntimeError, match="more than 2 entries"):
        add(replay, ".")
    replay.state()
    add(replay, "..")


def test_files_that_cannot_be_made_are_refused(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(CapsuleError, match=r"CAP-T221 replay file frames.bin of 102 bytes"):
        memory(blocked)


def test_files_are_reserved_in_full(tmp_path):
    memory(tmp_path, entries=5000, shape=(64,))
    for path in tmp_path.iterdir():
        status = path.stat()
        assert status.st_blocks * 512 >= status.st_size
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(FIELDS)


# Size


def test_four_million_atari_observations_take_less_than_32_gigabytes():
    """By the growth of what is allocated, and the part that does not grow, for 256 actors."""
    paper = SequenceLayout(burn_in=40, trained=80, period=40, lookahead=5)

    def allocated(entries, slack):
        options = {"layout": paper, "actors": 1, "entries": entries, "slack": slack}
        kept = memory(**options, shape=(84, 84), stack=4, state_shape=(2, 512))
        rings = (kept._entries, kept._sequences)
        arrays = [array for ring in rings for array in ring.fields.values()]
        return sum(array.nbytes for array in (*arrays, kept._priorities.tree._nodes))

    sequences = (2560 - 1280) // 40
    growth = allocated(2560, 0) - allocated(1280, 0)
    entry, sequence, leaves = 84 * 84 + 4 + 4 + 1 + 8, 2 * 512 * 4 + 32, 16 * (64 - 32)
    assert growth == 1280 * entry + sequences * sequence + leaves
    each = growth / 1280
    assert each < 7180
    assert each * 4_000_000 < 29e9
    fixed = allocated(1280, 200) - 1280 * each  # 200 steps of each actor between checkpoints
    assert each * 4_000_000 + 256 * fixed < 32e9
