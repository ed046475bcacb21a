"""Centred RMSProp: one step by hand, many against float64, pieces and shards bit for bit."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from capsule.training.networks.feedforward import Parameters, flatten
from capsule.training.optimizers.centred_rmsprop import CentredRmsProp, Piece

CPU = torch.device("cpu")
SETTINGS = {
    "learning_rate": 0.00025,
    "gradient_momentum": 0.95,
    "squared_gradient_momentum": 0.9,
    "min_squared_gradient": 0.01,
}
SHAPES = {
    "conv1.weight": (5, 3, 2, 2),
    "conv1.bias": (5,),
    "dense1.weight": (3, 5_000),
    "last": (7,),
}


def make(seed=0):
    parameters = Parameters(SHAPES, CPU)
    generator = np.random.default_rng(seed)
    parameters.load({n: generator.normal(size=s).astype(np.float32) for n, s in SHAPES.items()})
    return parameters, CentredRmsProp(parameters, **SETTINGS)


def gradient(seed):
    generator = np.random.default_rng(seed)
    arrays = {name: generator.normal(0, 3, shape) for name, shape in SHAPES.items()}
    return {name: torch.tensor(array, dtype=torch.float32) for name, array in arrays.items()}


def pieces(*shards, size=1_000_000):
    parts = [torch.cat([flatten(tensor) for tensor in shard.values()]) for shard in shards]
    for start in range(0, len(parts[0]), size):
        values = [part[start : start + size] for part in parts]
        yield Piece(start, start + len(values[0]), values)


def step(optimizer, *shards):
    for piece in pieces(*shards):
        optimizer.update(piece)


def test_two_steps_by_hand():
    parameters = Parameters({"w": (1,)}, CPU)
    parameters.flat.fill_(1.0)
    optimizer = CentredRmsProp(
        parameters,
        learning_rate=0.5,
        gradient_momentum=0.75,
        squared_gradient_momentum=0.5,
        min_squared_gradient=0.25,
    )
    optimizer.update(Piece(0, 1, [torch.tensor([2.0])]))
    # m = 0.25 * 2 = 0.5; v = 0.5 * 4 = 2; w = 1 - 0.5 * 2 / sqrt(2 - 0.25 + 0.25)
    first = 1 - 1 / math.sqrt(2)
    assert parameters.flat.item() == pytest.approx(first, rel=1e-6)
    optimizer.update(Piece(0, 1, [torch.tensor([-1.0])]))
    # m = 0.375 - 0.25 = 0.125; v = 1 + 0.5 = 1.5; w = w + 0.5 / sqrt(1.5 - 1/64 + 0.25)
    second = first + 0.5 / math.sqrt(1.5 - 1 / 64 + 0.25)
    assert parameters.flat.item() == pytest.approx(second, rel=1e-6)
    assert (optimizer.mean.flat.item(), optimizer.square.flat.item()) == (0.125, 1.5)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.95])
def test_a_mean_that_follows_faster_than_the_mean_square_gives_no_nan(momentum):
    parameters = Parameters({"w": (2,)}, CPU)
    settings = SETTINGS | {"squared_gradient_momentum": 0.95, "gradient_momentum": momentum}
    optimizer = CentredRmsProp(parameters, **settings)
    for gradients in ([0.01, 1.0], [0.01, 1.0], [1.0, 50.0]):
        optimizer.update(Piece(0, 2, [torch.tensor(gradients)]))
    mean, square = optimizer.mean.flat, optimizer.square.flat
    assert bool((square - mean * mean < -SETTINGS["min_squared_gradient"]).any()) == (
        momentum < 0.9
    )
    assert torch.isfinite(parameters.flat).all()


def test_many_steps_against_float64():
    parameters, optimizer = make()
    expected = {name: array.astype(np.float64) for name, array in parameters.arrays().items()}
    mean = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    square = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for number in range(20):
        shards = gradient(2 * number), gradient(2 * number + 1)
        step(optimizer, *shards)
        for name in SHAPES:
            g = sum(shard[name].double().numpy() for shard in shards)
            mean[name] = 0.95 * mean[name] + 0.05 * g
            square[name] = 0.9 * square[name] + 0.1 * g * g
            root = np.sqrt(square[name] - mean[name] ** 2 + 0.01)
            expected[name] -= 0.00025 * g / root
    for name, array in parameters.arrays().items():
        np.testing.assert_allclose(array, expected[name], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(
        optimizer.mean.arrays()["dense1.weight"], mean["dense1.weight"], atol=1e-5
    )


def test_the_fused_loop_gives_the_bits_of_one_operation_after_the_other():
    parameters, optimizer = make()
    f = np.float32
    w, m, v = (x.flat.numpy().copy() for x in (parameters, optimizer.mean, optimizer.square))
    for number in range(5):
        shards = gradient(2 * number), gradient(2 * number + 1)
        step(optimizer, *shards)
        flat = [np.concatenate([flatten(t).numpy() for t in shard.values()]) for shard in shards]
        g = flat[0] + flat[1]
        m = m * f(0.95) + g * f(1 - 0.95)
        v = v * f(0.9) + (g * g) * f(1 - 0.9)
        w = w - (g / np.sqrt(v - m * m + f(0.01))) * f(0.00025)
    for ours, expected in ((parameters, w), (optimizer.mean, m), (optimizer.square, v)):
        assert np.array_equal(ours.flat.numpy().view(np.int32), expected.view(np.int32))


def test_pieces_may_be_small_and_run_in_two_threads():
    alone, reference = make()
    shared, optimizer = make()
    for number in range(10):
        step(reference, gradient(number))
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(optimizer.update, pieces(gradient(number), size=777)))
    assert torch.equal(alone.flat, shared.flat)
    assert torch.equal(reference.square.flat, optimizer.square.flat)


def test_shards_are_summed_in_order_before_anything_else():
    sharded, first = make()
    whole, second = make()
    parts = [gradient(number) for number in range(3)]
    step(first, *parts)
    step(second, {name: (parts[0][name] + parts[1][name]) + parts[2][name] for name in SHAPES})
    assert torch.equal(sharded.flat, whole.flat)


def test_gradients_are_left_as_they_are():
    _, optimizer = make()
    shards = gradient(0), gradient(1)
    step(optimizer, *shards)
    for seed, shard in enumerate(shards):
        assert all(torch.equal(shard[name], gradient(seed)[name]) for name in SHAPES)


def test_the_root_is_correctly_rounded():
    """numpy's float32 root equals the float64 root rounded, as IEEE 754 demands."""
    numbers = np.random.default_rng(3).random(1_000_000, np.float32) * 10
    exact = np.sqrt(numbers.astype(np.float64)).astype(np.float32)
    assert np.array_equal(np.sqrt(numbers), exact)


def test_it_is_not_torchs_rmsprop():
    """The difference the module names: the same settings give another step."""
    ours, optimizer = make()
    step(optimizer, gradient(0))
    theirs = torch.nn.Parameter(make()[0].views["last"].clone())
    theirs.grad = gradient(0)["last"]
    torch.optim.RMSprop([theirs], lr=0.00025, alpha=0.95, eps=0.01, centered=True).step()
    assert not torch.allclose(ours.views["last"], theirs.detach(), atol=1e-5)


def test_means_that_nothing_is_added_to_end_at_zero_not_at_subnormal_numbers():
    tiny = torch.finfo(torch.float32).tiny
    _, optimizer = make()
    nothing = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    optimizer.mean.flat.fill_(1.01 * tiny)
    optimizer.square.flat.fill_(-1.01 * tiny)
    step(optimizer, nothing)
    assert not optimizer.mean.flat.any()
    assert not optimizer.square.flat.any()
