"""The arithmetic of benchmarks/r2d2.py, and that its plain R2D2 is the same algorithm."""

import numpy as np
import plain_r2d2
import pytest
import r2d2
import torch

from capsule.training.losses.r2d2 import double_q_targets


def test_an_update_of_the_papers_size():
    # Multiply-adds of a row: convolutions 7,737,344, LSTM (3136 + 19 + 512) x 2048, heads.
    heads = 2 * 512 * 512 + 512 * 19
    row = 7_737_344 + 3_667 * 2_048 + heads
    rows = 2 * 64 * (40 * (row - heads) + 85 * row) + 64 * 80 * (2 * row - 3_276_800)
    assert r2d2.update_operations() == 2 * rows


def test_the_better_contender_is_the_baseline():
    speeds = {
        r2d2.Contender("a", 1): [1.0, 5.0, 1.0],
        r2d2.Contender("a", 2): [2.0, 2.0, 2.0],
        r2d2.Contender("b", 1): [9.0, 9.0, 9.0],
    }
    assert r2d2.best(speeds, ("a",)) == [2.0, 2.0, 2.0]


def small_sizes(**changes):
    options = dict.fromkeys(plain_r2d2.Sizes.__dataclass_fields__, 0.9)
    options |= {"actions": 5, "recurrent_units": 8, "hidden_units": 8}
    options |= {"burn_in": 2, "sequence_length": 4, "n_step": 3, "batch_size": 3}
    options |= {"rescaling_epsilon": 1e-3, "discount": 0.97}
    return plain_r2d2.Sizes(**(options | changes))


@pytest.mark.slow
def test_the_plain_targets_are_ours():
    sizes = small_sizes()
    noise = torch.Generator().manual_seed(0)
    online, target = torch.randn(2, 7, 3, 5, generator=noise, dtype=torch.float64)
    rewards = torch.randn(10, 3, generator=noise, dtype=torch.float64)
    terminals = torch.rand(10, 3, generator=noise) < 0.2
    learner = plain_r2d2.Learner(sizes, plain_r2d2.Replay(sizes, []))
    found = learner._targets({"rewards": rewards, "terminals": terminals}, online, target)
    ours = double_q_targets(
        rewards[3:9],
        sizes.discount * (~terminals[3:9]).double(),
        online,
        target,
        torch.full((3,), 6),
        steps=3,
        epsilon=1e-3,
    )
    torch.testing.assert_close(found, ours[:4], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_plain_learner_learns_and_gives_new_priorities():
    sizes = small_sizes(learning_rate=1e-3)
    replay = plain_r2d2.Replay(sizes, plain_r2d2.synthetic_sequences(sizes, 4))
    learner = plain_r2d2.Learner(sizes, replay)
    before = {name: tensor.clone() for name, tensor in learner.online.state_dict().items()}
    learner.update()
    after = learner.online.state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert any(leaf != 1.0 for leaf in replay.tree.nodes[4:])
    assert replay.tree.nodes[1] == pytest.approx(sum(replay.tree.nodes[4:]))


def test_the_plain_sum_tree_finds_shares():
    tree = plain_r2d2.SumTree(5)
    for leaf, priority in enumerate((1.0, 0.0, 2.0, 0.5, 1.5)):
        tree.set(leaf, priority)
    found = [tree.find(number) for number in (0.0, 0.9, 1.0, 2.9, 3.0, 3.5, 4.9)]
    assert np.array_equal(found, [0, 0, 2, 2, 3, 4, 4])
