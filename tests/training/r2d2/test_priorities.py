"""Priorities of sequences: cases by hand. The naive reference is that of the replay."""

import json

import numpy as np
import pytest

from capsule.training.r2d2.priorities import LOWEST_PRIORITY, Priorities


def array(*numbers):
    return np.array(numbers, np.int64)


def give(priorities, **changes):
    """Give sequences, named ``aACTOR_NUMBER``, priorities."""
    pairs = [tuple(map(int, name[1:].split("_"))) for name in changes]
    actors, numbers = (array(*each) for each in zip(*pairs, strict=True))
    priorities.update(actors, numbers, np.array(list(changes.values()), np.float64))


def test_an_actors_leaves_are_a_block_of_a_power_of_two():
    priorities = Priorities(1.0, actors=3, kept=15)
    assert priorities.tree.size == 48
    give(priorities, a0_14=1.0, a2_15=2.0)
    leaves = priorities.tree.leaves
    assert (leaves[14], leaves[32], leaves.sum()) == (1.0, 2.0, 3.0)


def test_sequences_are_found_again_by_actor_and_number():
    priorities = Priorities(1.0, actors=2, kept=3)
    give(priorities, a0_5=1.0, a1_7=1.0, a1_6=2.0)
    found = priorities.sample(np.array([0.0, 0.3, 0.9]), array(6, 8))
    actors, numbers, probabilities = (each.tolist() for each in found)
    assert list(zip(actors, numbers, probabilities, strict=True)) == [
        (0, 5, 0.25),
        (1, 6, 0.5),
        (1, 7, 0.25),
    ]


def test_weights_are_floored_priorities_to_the_exponent():
    priorities = Priorities(0.5, actors=1, kept=4)
    give(priorities, a0_0=4.0, a0_1=0.0)
    floor = pytest.approx(LOWEST_PRIORITY**0.5)
    assert priorities.tree.leaves.tolist() == [2.0, floor, 0.0, 0.0]


def test_cleared_sequences_have_no_weight():
    priorities = Priorities(1.0, actors=2, kept=2)
    give(priorities, a0_0=1.0, a0_1=2.0, a1_0=3.0, a1_1=4.0)
    priorities.clear(1, array(2, 3))
    assert priorities.tree.leaves.tolist() == [1.0, 2.0, 0.0, 0.0]


def test_a_snapshot_restores_weights():
    priorities, other = Priorities(1.0, actors=1, kept=3), Priorities(1.0, actors=1, kept=3)
    give(priorities, a0_0=5.0, a0_1=0.25)
    other.restore(json.loads(json.dumps(priorities.state())))
    assert other.state() == priorities.state()
    assert other.tree.leaves.tolist() == [5.0, 0.25, 0.0, 0.0]
