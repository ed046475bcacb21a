"""The trained state: names of its tensors, what is digested, taking over what was saved."""

import numpy as np
import pytest
import torch
import xxhash

from capsule.training.networks.feedforward import Parameters
from capsule.training.train_state import TrainState

CPU = torch.device("cpu")
SHAPES = {"dense.weight": (2, 3), "dense.bias": (2,)}


def parameters(first=0, shapes=SHAPES):
    """Return parameters that count from a number on."""
    made = Parameters(shapes, CPU)
    made.flat.copy_(torch.arange(first, first + made.flat.numel(), dtype=torch.float32))
    return made


def whole(first=0):
    return TrainState(
        parameters(first),
        {"mean": parameters(first + 10), "square": parameters(first + 20)},
        target=parameters(first + 30),
        others={"best": parameters(first + 40)},
    )


def counted(first, shape=(2, 3)):
    return np.arange(first, first + np.prod(shape), dtype=np.float32).reshape(shape)


def test_tensors_are_named_by_their_group():
    found = whole().tensors()
    groups = ["parameters", "target", "optimizer/mean", "optimizer/square", "best"]
    assert list(found) == [f"{group}/{name}" for group in groups for name in SHAPES]
    assert whole().names() == list(found)
    firsts = dict(zip(groups, (0, 30, 10, 20, 40), strict=True))
    for group, first in firsts.items():
        np.testing.assert_array_equal(found[f"{group}/dense.weight"], counted(first))
        np.testing.assert_array_equal(found[f"{group}/dense.bias"], counted(first + 6, (2,)))


def test_without_a_target_and_others_there_are_none():
    found = TrainState(parameters(), {}).tensors()
    assert list(found) == ["parameters/dense.weight", "parameters/dense.bias"]


def test_tensors_are_copies():
    online = parameters()
    found = TrainState(online, {}).tensors()
    online.flat.fill_(7)
    np.testing.assert_array_equal(found["parameters/dense.weight"], counted(0))


def test_a_state_takes_over_what_another_one_returned():
    one, other = whole(), whole(first=500)
    other.load(one.tensors())
    assert [array.tobytes() for array in other.tensors().values()] == [
        array.tobytes() for array in one.tensors().values()
    ]
    assert other.digests(None) == one.digests(None)


def test_a_tensor_that_was_not_saved_is_missed():
    tensors = whole().tensors()
    del tensors["optimizer/square/dense.bias"]
    with pytest.raises(KeyError, match=r"optimizer/square/dense\.bias"):
        whole().load(tensors)


def digest(first, count):
    return xxhash.xxh3_128_hexdigest(np.arange(first, first + count, dtype="<f4").tobytes())


def test_digests_are_of_each_tensors_bytes():
    found = whole().digests([torch.full((6,), 0.5), torch.tensor([1.0, 2.0])])
    named = lambda first: {"dense.weight": digest(first, 6), "dense.bias": digest(first + 6, 2)}  # noqa: E731
    halves = xxhash.xxh3_128_hexdigest(np.full(6, 0.5, "<f4").tobytes())
    assert found == {
        "gradient": {"dense.weight": halves, "dense.bias": digest(1, 2)},
        "parameters": named(0),
        "target": named(30),
        "optimizer": {
            f"{kind}/{name}": value
            for kind, first in (("mean", 10), ("square", 20))
            for name, value in named(first).items()
        },
    }


def test_others_are_saved_but_not_digested():
    one = TrainState(parameters(), {}, others={"best": parameters(40)})
    other = TrainState(parameters(), {}, others={"best": parameters(50)})
    assert one.digests(None) == other.digests(None)
    assert "best" not in one.digests(None)
    found = [state.tensors()["best/dense.bias"].tolist() for state in (one, other)]
    assert found == [[46.0, 47.0], [56.0, 57.0]]


def test_before_the_first_update_there_is_no_gradient():
    assert "gradient" not in whole().digests(None)


def test_a_gradient_without_a_tensor_for_each_parameter_is_an_error():
    with pytest.raises(ValueError, match="shorter"):
        whole().digests([torch.zeros(6)])


def test_filters_are_saved_in_the_order_of_their_shape_and_digested_in_that_of_memory():
    """Filters are channels-last in memory, and load from any layout."""
    shapes = {"conv.weight": (2, 3, 4, 5)}
    state = TrainState(parameters(shapes=shapes), {})
    array = state.tensors()["parameters/conv.weight"]
    assert array.shape == (2, 3, 4, 5)
    other = TrainState(parameters(900, shapes), {})
    other.load({"parameters/conv.weight": np.asfortranarray(array)})
    assert other.digests(None) == state.digests(None)
    memory = digest(0, 120)
    assert state.digests(None)["parameters"]["conv.weight"] == memory
