"""The arithmetic of benchmarks/ceiling.py."""

import ceiling
import dqn_learner


def test_the_operations_of_an_update_are_counted():
    shapes = {
        "conv1.weight": (2, 3, 2, 2),  # 24 multiply-adds at each of 10 places
        "conv1.bias": (2,),
        "lstm.inputs.weight": (8, 5),  # 40
        "advantage1.weight": (4, 2),  # 8
        "value1.weight": (4, 2),  # 8
    }
    # A row forwards: 2 (240 + 40 + 16) = 592; without heads 560; backwards 2 x 592 - 480 = 704.
    counted = ceiling.operations(shapes, {"conv1": 10}, burn_in=3, trained=6, beyond=1)
    assert counted == 2 * 3 * 560 + 2 * 7 * 592 + 6 * 704


def test_an_update_of_dqn_at_the_papers_size():
    # Multiply-adds of a row: convolutions, 3,136 x 512 and 512 x 4.
    row = 3_276_800 + 2_654_208 + 1_806_336 + 3_136 * 512 + 512 * 4
    assert dqn_learner.update_operations() == 2 * 32 * (2 * row + 2 * row - 3_276_800)
