"""Replay memory: hand-computed cases, a naive reference, and a process that is really killed."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError
from capsule.training.dqn.replay import ReplayMemory
from capsule.training.state.streams import Stream

ROOT = Path(__file__).parents[3]


def memory(directory=None, *, capacity=8, slack=4, stack=3, shape=(2,), dtype=np.uint8):
    return ReplayMemory(
        directory,
        capacity=capacity,
        slack=slack,
        frame_shape=shape,
        frame_dtype=dtype,
        frame_stack=stack,
    )


def frame(value):
    return np.array([value, 100 + value], np.uint8)


def add(replay, text, first=1):
    """Add one entry per letter: ``.`` goes on, ``T`` is terminal, ``C`` closes a truncation."""
    for value, letter in enumerate(text, first):
        if letter == "C":
            replay.end_episode(frame(value))
        else:
            replay.append(frame(value), value, value / 2, letter == "T")


def firsts(frames):
    """Return the first element of every frame, which is the entry's value."""
    return frames[..., 0].tolist()


def observations(batch):
    return batch.frames[:, :-1]


def gather(replay, *indices):
    return replay.gather(np.array(indices, np.int64))


def test_a_batch_holds_what_was_added():
    replay = memory()
    add(replay, "......")
    batch = gather(replay, 3, 2)
    assert firsts(observations(batch)) == [[2, 3, 4], [1, 2, 3]]
    assert firsts(batch.frames[:, 1:]) == [[3, 4, 5], [2, 3, 4]]
    assert observations(batch)[0].tolist() == [[2, 102], [3, 103], [4, 104]]
    assert batch.actions.tolist() == [4, 3]
    assert batch.rewards.tolist() == [2.0, 1.5]
    assert batch.terminals.tolist() == [False, False]
    assert [array.dtype for array in batch] == [np.uint8, np.int64, np.float32, np.bool_]


def test_nothing_precedes_the_first_entry():
    replay = memory()
    add(replay, "...")
    batch = gather(replay, 0, 1)
    assert firsts(observations(batch)) == [[0, 0, 1], [0, 1, 2]]
    assert firsts(batch.frames[:, 1:]) == [[0, 1, 2], [1, 2, 3]]


def test_a_terminal_hides_what_lies_before_and_after():
    replay = memory()
    add(replay, "..T..")
    batch = gather(replay, 2, 3)
    assert firsts(observations(batch)) == [[1, 2, 3], [0, 0, 4]]
    assert firsts(batch.frames[:, 1:]) == [[2, 3, 0], [0, 4, 5]]
    assert batch.terminals.tolist() == [True, False]


def test_an_episode_of_one_step_stands_alone():
    replay = memory()
    add(replay, ".TT..")
    batch = gather(replay, 1, 2, 3)
    assert firsts(observations(batch)) == [[0, 1, 2], [0, 0, 3], [0, 0, 4]]
    assert firsts(batch.frames[:, 1:]) == [[1, 2, 0], [0, 3, 0], [0, 4, 5]]


def test_a_truncated_transition_is_followed_by_its_true_last_frame():
    replay = memory()
    add(replay, "..C..")
    batch = gather(replay, 1, 3)
    assert firsts(batch.frames[:, 1:]) == [[1, 2, 3], [0, 4, 5]]
    assert firsts(observations(batch)) == [[0, 1, 2], [0, 0, 4]]
    assert batch.terminals.tolist() == [False, False]


@pytest.mark.parametrize("text", ["", "..T", "..C"])
def test_only_a_running_episode_can_be_truncated(text):
    replay = memory()
    add(replay, text)
    with pytest.raises(ValueError, match="end_episode"):
        replay.end_episode(frame(9))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [0, 0, 9]),
        (".", [0, 1, 9]),
        ("....", [3, 4, 9]),
        (".T", [0, 0, 9]),
        (".C", [0, 0, 9]),
        (".T.", [0, 3, 9]),
        (".C..", [3, 4, 9]),
        ("T.", [0, 2, 9]),
    ],
)
def test_the_observation_to_act_on(text, expected):
    replay = memory()
    add(replay, text)
    assert firsts(replay.stack(frame(9))) == expected


def test_closing_and_unfinished_entries_are_never_drawn():
    replay = memory(capacity=6)
    add(replay, "..C.T..C.")  # entries 3 to 8 are in reach; 7 closes, 8 has no successor yet
    drawn = replay.sample_indices(Stream("minibatch", 0), 400)
    assert drawn.dtype == np.int64
    assert sorted(set(drawn.tolist())) == [3, 4, 5, 6]
    add(replay, "T", first=10)
    drawn = replay.sample_indices(Stream("minibatch", 0), 400)
    assert sorted(set(drawn.tolist())) == [4, 5, 6, 8, 9]


def test_invalid_rows_are_drawn_again_in_row_order():
    replay = memory(capacity=6)
    add(replay, ".C.C.C.")
    words = Stream("minibatch", 3)
    rows = (1 + words.integers(6, 16)).tolist()
    invalid = [row for row, entry in enumerate(rows) if entry not in {2, 4}]
    while invalid:
        for row, entry in zip(invalid, words.integers(6, len(invalid)).tolist(), strict=True):
            rows[row] = 1 + entry
        invalid = [row for row in invalid if rows[row] not in {2, 4}]
    stream = Stream("minibatch", 3)
    assert replay.sample_indices(stream, 16).tolist() == rows
    assert stream.draws == words.draws > 16


def test_indices_are_uniform_over_the_transitions():
    replay = memory(capacity=8)
    add(replay, "..........")
    drawn = replay.sample_indices(Stream("minibatch", 1), 7000)
    counts = np.bincount(drawn - 2, minlength=7)
    assert len(counts) == 7
    assert counts.min() > 900
    assert counts.max() < 1100


@pytest.mark.parametrize("text", ["", ".", "T.", ".C"])
def test_too_few_entries_are_refused(text):
    replay = memory()
    add(replay, text)
    with pytest.raises(CapsuleError, match="CAP-T222"):
        replay.sample_indices(Stream("minibatch", 0), 1)


def test_three_entries_are_enough_to_draw_from():
    replay = memory()
    add(replay, "...")
    assert set(replay.sample_indices(Stream("minibatch", 0), 50).tolist()) == {0, 1}


class Naive:
    """The same memory as plain lists: nothing is ever forgotten, everything is looked up."""

    def __init__(self, capacity, stack):
        self.capacity, self.stack_size, self.entries = capacity, stack, []

    def episode_start(self, entry):
        while entry > 0 and self.entries[entry - 1]["mark"] == ".":
            entry -= 1
        return entry

    def observation(self, entry):
        start = self.episode_start(entry)
        numbers = range(entry - self.stack_size + 1, entry + 1)
        return [self.entries[n]["value"] if n >= start else 0 for n in numbers]

    def next_observation(self, entry):
        if self.entries[entry]["mark"] == "T":
            return [*self.observation(entry)[1:], 0]
        return self.observation(entry + 1)

    def transitions(self):
        newest = len(self.entries) - 1
        return [
            entry
            for entry in range(max(0, newest + 1 - self.capacity), newest + 1)
            if self.entries[entry]["mark"] == "T"
            or (self.entries[entry]["mark"] == "." and entry < newest)
        ]


@st.composite
def histories(draw):
    letters, running = [], False
    for letter in draw(st.lists(st.sampled_from("....TC"), max_size=60)):
        if letter != "C" or running:
            letters.append(letter)
            running = letter == "."
    return "".join(letters)


@pytest.mark.slow
@given(
    text=histories(),
    capacity=st.integers(3, 12),
    slack=st.integers(0, 5),
    stack=st.integers(1, 4),
)
@settings(deadline=None, max_examples=200)
def test_every_transition_agrees_with_the_naive_reference(text, capacity, slack, stack):
    replay, naive = memory(capacity=capacity, slack=slack, stack=stack), Naive(capacity, stack)
    for value, letter in enumerate(text, 1):
        add(replay, letter, first=value)
        naive.entries.append({"value": value, "mark": letter})
        expected = naive.transitions()
        batch = gather(replay, *expected)
        assert firsts(observations(batch)) == [naive.observation(entry) for entry in expected]
        assert firsts(batch.frames[:, 1:]) == [naive.next_observation(entry) for entry in expected]
        assert batch.actions.tolist() == [entry + 1 for entry in expected]
        assert batch.rewards.tolist() == [(entry + 1) / 2 for entry in expected]
        assert batch.terminals.tolist() == [text[entry] == "T" for entry in expected]
    if min(len(text), capacity) >= 3:
        drawn = replay.sample_indices(Stream("minibatch", 0), 50).tolist()
        assert set(drawn) <= set(naive.transitions())


def test_a_given_buffer_is_filled():
    replay = memory()
    add(replay, ".T...")
    buffer = np.full((2, 4, 2), 77, np.uint8)
    indices = np.array([2, 1], np.int64)
    batch = replay.gather(indices, out=buffer)
    for ours, fresh in zip(batch, replay.gather(indices), strict=True):
        np.testing.assert_array_equal(ours, fresh)
    assert np.shares_memory(batch.frames, buffer)


def test_a_batch_drawn_earlier_outlives_slack_further_entries():
    replay = memory(capacity=8, slack=4)
    add(replay, "." * 30)
    indices = replay.sample_indices(Stream("minibatch", 2), 64)
    before = replay.gather(indices)
    add(replay, "T.C.", first=50)
    after = replay.gather(indices)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


def test_float_frames_without_a_stack():
    replay = memory(stack=1, shape=(4,), dtype=np.float32)
    for value in range(4):
        replay.append(np.full(4, value / 3, np.float32), value, -1.0, value == 1)
    batch = gather(replay, 0, 1, 2)
    assert observations(batch).dtype == np.float32
    assert observations(batch).shape == (3, 1, 4)
    np.testing.assert_array_equal(observations(batch)[:, 0, 0], np.float32([0, 1 / 3, 2 / 3]))
    np.testing.assert_array_equal(batch.frames[:, 1, 0], np.float32([1 / 3, 0, 1]))


def test_a_million_atari_transitions_take_less_than_eight_gigabytes():
    replay = memory(capacity=96, slack=1, stack=4, shape=(84, 84))
    allocated = sum(field.nbytes for field in replay._ring.fields.values())
    assert allocated == 7065 * (96 + 3 + 1)
    assert 7065 * 1_000_000 < 8e9


def test_the_digest_covers_the_shape_of_frames():
    row, column = memory(shape=(2,)), memory(shape=(2, 1))
    for replay, shape in ((row, (2,)), (column, (2, 1))):
        for value in range(4):
            replay.append(np.full(shape, value, np.uint8), 0, 0.0, terminal=False)
    assert row.digest() != column.digest()


@pytest.mark.parametrize("entry", range(4))
def test_the_digest_covers_every_entry_of_a_memory_that_is_not_full(entry):
    one, other = memory(), memory()
    for replay in (one, other):
        add(replay, "....")
    other._frames[other._ring.at(entry)] ^= 1
    assert one.digest() != other.digest()


def test_the_digest_covers_live_entries_wherever_they_lie():
    digests = set()
    for slack in (0, 1, 7):
        replay = memory(slack=slack)
        add(replay, "..T....C..T......")
        digests.add(replay.digest())
    assert len(digests) == 1
    other = memory()
    add(other, "..T....C..T......")
    other._frames[other._ring.at(other.count - 9)] ^= 1
    assert other.digest() not in digests
    oldest_needed = memory(slack=1)
    add(oldest_needed, "..T....C..T......")
    oldest_needed._frames[oldest_needed._ring.at(oldest_needed.count - 11)] ^= 1
    assert oldest_needed.digest() in digests  # entry no observation reaches


@pytest.mark.parametrize("field", ["frames", "actions", "rewards", "marks"])
def test_changed_files_are_refused(tmp_path, field):
    replay = memory(tmp_path)
    add(replay, "..T......T..")
    state = json.loads(json.dumps(replay.state()))
    memory(tmp_path).restore(state)
    path = tmp_path / f"{field}.bin"
    data = bytearray(path.read_bytes())
    data[replay._ring.at(replay.count - 1) * (len(data) // replay._ring.slots)] ^= 1
    path.write_bytes(data)
    with pytest.raises(CapsuleError, match="CAP-T223"):
        memory(tmp_path).restore(state)


def test_missing_files_are_refused(tmp_path):
    replay = memory(tmp_path / "one")
    add(replay, "....")
    with pytest.raises(CapsuleError, match="CAP-T223"):
        memory(tmp_path / "two").restore(replay.state())


def test_more_than_slack_entries_after_a_checkpoint_are_a_bug():
    replay = memory(slack=2)
    add(replay, "." * 20)
    replay.state()
    add(replay, "..")
    with pytest.raises(RuntimeError, match="more than 2 entries"):
        replay.append(frame(1), 0, 0.0, terminal=False)
    replay.state()
    add(replay, "..")


def test_files_that_cannot_be_made_are_refused(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(CapsuleError, match=r"CAP-T221 replay file frames.bin of 28 bytes"):
        memory(blocked)


def test_a_full_disk_is_noticed_at_the_start(tmp_path):
    with pytest.raises(CapsuleError, match="CAP-T221"):
        memory(tmp_path, capacity=2**60)


HISTORY = "..T....C......T....C.....T......C....T.......T...C......"

KILLED = """
import json, os, signal, sys
from pathlib import Path
from tests.training.dqn.test_replay import HISTORY, add, memory
directory, at, more = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
replay = memory(directory, slack=12)
add(replay, HISTORY[:at])
print(json.dumps(replay.state()), flush=True)
add(replay, HISTORY[at:at + more], first=at + 1)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("at", "more"), [(5, 3), (24, 0), (24, 12), (37, 7), (41, 12)])
def test_a_killed_process_resumes_from_its_last_checkpoint(tmp_path, at, more):
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(at), str(more)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    resumed = memory(tmp_path, slack=12)
    resumed.restore(json.loads(done.stdout))
    whole = memory(slack=12)
    add(whole, HISTORY[:at])
    for replay in (resumed, whole):
        add(replay, HISTORY[at : at + 12], first=at + 1)
    assert resumed.digest() == whole.digest()
    stream, same = Stream("minibatch", 0), Stream("minibatch", 0)
    indices = resumed.sample_indices(stream, 40)
    np.testing.assert_array_equal(indices, whole.sample_indices(same, 40))
    for ours, theirs in zip(resumed.gather(indices), whole.gather(indices), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_files_are_reserved_in_full(tmp_path):
    replay = memory(tmp_path, capacity=5000, shape=(64,))
    for path in tmp_path.iterdir():
        status = path.stat()
        assert status.st_blocks * 512 >= status.st_size
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "actions.bin",
        "frames.bin",
        "marks.bin",
        "rewards.bin",
    ]
    assert replay.count == 0
    assert (tmp_path / "frames.bin").stat().st_size == 64 * replay._ring.slots
