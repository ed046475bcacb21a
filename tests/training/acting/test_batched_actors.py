"""Rows of actors: stacks of frames, previous actions and rewards, and what actors are told."""

from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError
from capsule.training.acting.batched_actors import NO_ACTION, ActorRows
from capsule.training.networks.language import NO_WORD, Vocabulary

VOCABULARY = Vocabulary(("go", "red", "door"), 4)  # their numbers are 1, 2 and 0


def rows_of(count=3, stack=2, shape=(2,), dtype=np.uint8, **options):
    """Return rows of an environment and a network of these shapes, as far as rows look at them."""
    environment = SimpleNamespace(frame_stack=stack, frame_shape=shape, frame_dtype=np.dtype(dtype))
    return ActorRows(count, environment, SimpleNamespace(state_shape=(2, 1)), **options)


def frame(number):
    return np.full(2, number, np.uint8)


def test_new_rows_are_zeros_of_the_shapes_of_their_environment_and_network():
    rows = rows_of(3, stack=4, shape=(1, 5, 6), dtype=np.float32)
    assert (rows.stacks.shape, rows.stacks.dtype) == ((3, 4, 1, 5, 6), np.float32)
    assert (rows.states.shape, rows.states.dtype) == ((3, 2, 1), np.float32)
    assert (rows.previous_actions.shape, rows.previous_actions.dtype) == ((3,), np.int64)
    assert (rows.previous_rewards.shape, rows.previous_rewards.dtype) == ((3,), np.float32)
    assert rows.instructions.shape == (3, 0)
    assert not any(array.any() for array in rows.inputs(range(3)))


def test_an_episode_begins_with_one_frame_and_nothing_before_it():
    rows = rows_of()
    for row in (0, 1):
        rows.begin(row, frame(1))
        rows.advance(row, 3, 0.5, frame(2))
        rows.states[row] = 7
    rows.begin(1, frame(9))
    assert rows.stacks[1].tolist() == [[0, 0], [9, 9]]
    assert (rows.previous_actions[1], rows.previous_rewards[1]) == (NO_ACTION, 0)
    assert not rows.states[1].any()
    assert rows.stacks[0].tolist() == [[1, 1], [2, 2]]
    assert (rows.previous_actions[0], rows.previous_rewards[0]) == (3, 0.5)
    assert rows.states[0].all()


def test_a_step_leaves_the_recurrent_state_to_the_caller():
    rows = rows_of()
    rows.begin(0, frame(1))
    rows.states[0] = 7
    rows.advance(0, 1, 1.0, frame(2))
    assert rows.states[0].tolist() == [[7], [7]]


STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 255)), max_size=20)


@given(st.integers(1, 4), STEPS)
def test_a_stack_is_the_last_frames_of_the_running_episode(length, steps):
    rows = rows_of(3, stack=length)
    stacks = [deque([0] * length, length) for _ in range(3)]
    for begins, row, number in steps:
        if begins:
            stacks[row] = deque([0] * length, length)
            rows.begin(row, frame(number))
        else:
            rows.advance(row, 0, 0.0, frame(number))
        stacks[row].append(number)
    assert rows.stacks[:, :, 0].tolist() == [list(stack) for stack in stacks]
    assert (rows.stacks[:, :, 0] == rows.stacks[:, :, 1]).all()


def test_inputs_are_copies_of_the_rows_that_were_asked_for():
    rows = rows_of(vocabulary=VOCABULARY)
    for row in range(3):
        rows.begin(row, frame(row))
        rows.advance(row, row, row / 2, frame(10 + row))
        rows.instruct(row, "go red")
    stacks, actions, rewards, states, instructions = rows.inputs([2, 0])
    assert stacks[:, 1, 0].tolist() == [12, 10]
    assert (actions.tolist(), rewards.tolist()) == ([2, 0], [1.0, 0.0])
    kept = [each.copy() for each in (stacks, actions, rewards, states, instructions)]
    rows.advance(2, 5, 5.0, frame(99))
    rows.states[:] = 1
    rows.instruct(2, "door")
    for one, other in zip(kept, (stacks, actions, rewards, states, instructions), strict=True):
        np.testing.assert_array_equal(one, other)
    assert rows.inputs(range(3))[0].base is None


def test_an_actor_is_told_its_own_instruction_until_it_changes():
    rows = rows_of(vocabulary=VOCABULARY)
    nothing = [NO_WORD] * 4
    assert rows.instructions.tolist() == [nothing] * 3
    rows.instruct(0, "go red door")
    rows.instruct(1, "Door!")
    assert rows.instructions.tolist() == [[1, 2, 0, NO_WORD], [0, *nothing[1:]], nothing]
    rows.begin(0, frame(1))  # which ends no instruction: what is told next decides
    rows.instruct(0, "go red door")
    assert rows.instructions[0].tolist() == [1, 2, 0, NO_WORD]
    rows.instruct(0, "")
    assert rows.instructions[0].tolist() == nothing


def test_an_instruction_that_the_vocabulary_has_no_numbers_for_is_refused():
    rows = rows_of(vocabulary=VOCABULARY)
    with pytest.raises(CapsuleError, match=r"CAP-T242 .*blue"):
        rows.instruct(0, "go blue door")
