"""Adam: by hand, bit for bit against numpy, against torch's; norms and states."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from capsule.training.layers import kernels
from capsule.training.networks.feedforward import Parameters
from capsule.training.optimizers.adam import Adam, clipping_factor

CPU = torch.device("cpu")
SETTINGS = {"learning_rate": 1e-4, "epsilon": 1e-3}
SHAPES = {"conv1.weight": (5, 3, 2, 2), "conv1.bias": (5,), "dense1.weight": (3, 5_000)}
f = np.float32


def make(seed=0, device=CPU, **changes):
    parameters = Parameters(SHAPES, device)
    generator = np.random.default_rng(seed)
    parameters.load({n: generator.normal(size=s).astype(np.float32) for n, s in SHAPES.items()})
    return parameters, Adam(parameters, **(SETTINGS | changes))


def gradient(seed, scale=3.0, device=CPU):
    generator = np.random.default_rng(seed)
    size = sum(math.prod(shape) for shape in SHAPES.values())
    return torch.from_numpy(generator.normal(0, scale, size).astype(np.float32)).to(device)


def update(optimizer, gradient, maximum_norm=None):
    optimizer.advance()
    optimizer.descend(gradient, maximum_norm)


def test_two_updates_by_hand():
    parameters = Parameters({"w": (1,)}, CPU)
    parameters.flat.fill_(1.0)
    optimizer = Adam(parameters, learning_rate=0.5, epsilon=0.25)
    update(optimizer, torch.tensor([2.0]))
    # m = 0.2, corrected 0.2 / (1 - 0.9) = 2; v = 0.004, corrected 0.004 / (1 - 0.999) = 4
    first = 1 - 0.5 * 2 / (2 + 0.25)
    assert parameters.flat.item() == pytest.approx(first, rel=1e-6)
    update(optimizer, torch.tensor([-2.0]), maximum_norm=1.0)
    # g = -1; m = 0.18 - 0.1 = 0.08, corrected by 1 - 0.81; v = 0.003996 + 0.001, by 1 - 0.998001
    second = first - 0.5 * (0.08 / 0.19) / (math.sqrt(0.004996 / 0.001999) + 0.25)
    assert parameters.flat.item() == pytest.approx(second, rel=1e-5)
    assert optimizer.mean.flat.item() == pytest.approx(0.08, rel=1e-6)
    assert optimizer.square.flat.item() == pytest.approx(0.004996, rel=1e-6)


def test_the_fused_loop_gives_the_bits_of_one_operation_after_the_other():
    parameters, optimizer = make()
    w, m, v = (x.flat.numpy().copy() for x in (parameters, optimizer.mean, optimizer.square))
    for number in range(1, 8):
        given, maximum = gradient(number), 100.0 * number
        update(optimizer, given, maximum)
        g = given.numpy() * f(clipping_factor(given, maximum))
        m = m * f(0.9) + g * f(1 - 0.9)
        v = v * f(0.999) + (g * g) * f(1 - 0.999)
        corrections = (f(1 - float(Fraction(decay) ** number)) for decay in (0.9, 0.999))
        mean, square = (x / correction for x, correction in zip((m, v), corrections, strict=True))
        w = w - (mean / (np.sqrt(square) + f(1e-3))) * f(1e-4)
        assert torch.equal(given, gradient(number))
    for ours, expected in ((parameters, w), (optimizer.mean, m), (optimizer.square, v)):
        assert np.array_equal(ours.flat.numpy().view(np.int32), expected.view(np.int32))


def against_torch(device):
    parameters, optimizer = make(device=device)
    theirs = torch.nn.Parameter(parameters.flat.clone())
    reference = torch.optim.Adam([theirs], lr=1e-4, betas=(0.9, 0.999), eps=1e-3)
    start = parameters.flat.clone()
    for number in range(50):
        given = gradient(number, scale=2.0 ** (number % 7 - 3), device=device)
        update(optimizer, given, 40.0)
        theirs.grad = given.clone()
        found = torch.nn.utils.clip_grad_norm_([theirs], 40.0)
        factor = min(1, 40.0 / found.item())
        assert float(clipping_factor(given, 40.0)) == pytest.approx(factor, rel=1e-5)
        reference.step()
    assert (parameters.flat - start).abs().max() > 1e-3
    torch.testing.assert_close(parameters.flat, theirs.detach(), rtol=0, atol=2e-6)


@pytest.mark.slow
def test_it_is_torchs_adam():
    against_torch(CPU)


def test_means_that_nothing_is_added_to_end_at_zero_not_at_subnormal_numbers():
    tiny = torch.finfo(torch.float32).tiny
    parameters, optimizer = make()
    optimizer.mean.flat.fill_(1.5 * tiny)
    optimizer.square.flat.fill_(1.001 * tiny)
    nothing = torch.zeros_like(parameters.flat)
    for _ in range(4):
        update(optimizer, nothing)
        for means in (optimizer.mean.flat, optimizer.square.flat):
            assert ((means == 0) | (means >= tiny)).all()
    assert not optimizer.mean.flat.any()
    assert not optimizer.square.flat.any()


@pytest.mark.gpu
def test_on_a_gpu_it_is_torchs_adam_and_the_cpus():
    cuda = torch.device("cuda")
    against_torch(cuda)
    (ours, first), (theirs, second) = make(), make(device=cuda)
    for number in range(10):
        update(first, gradient(number), 100.0)
        update(second, gradient(number, device=cuda), 100.0)
    torch.testing.assert_close(theirs.flat.cpu(), ours.flat, rtol=0, atol=1e-6)


def test_it_goes_on_from_its_state():
    straight, first = make()
    for number in range(6):
        update(first, gradient(number), 40.0)
    halted, second = make()
    for number in range(3):
        update(second, gradient(number), 40.0)
    resumed, third = make(seed=1)
    resumed.load(halted.arrays())
    third.mean.load(second.mean.arrays())
    third.square.load(second.square.arrays())
    third.updates = second.updates
    for number in range(3, 6):
        update(third, gradient(number), 40.0)
    assert torch.equal(straight.flat, resumed.flat)
    assert torch.equal(first.square.flat, third.square.flat)
    assert third.updates == 6


def test_a_norm_is_one_sum_in_memory_order():
    total = 0.0
    for element in gradient(0).tolist():
        total += element * element
    assert clipping_factor(gradient(0), 1.0) == 1.0 / math.sqrt(total)


def test_a_norm_of_large_or_small_numbers_is_neither_infinite_nor_zero():
    for size in (1e30, 1e-40):
        found = clipping_factor(torch.full((4,), size, dtype=torch.float32), size)
        assert found == pytest.approx(1 / 2, rel=1e-4)


def test_only_a_gradient_beyond_the_maximum_is_clipped():
    given = gradient(0)
    norm = math.sqrt(kernels.sum_of_squares(given))
    free, first = make()
    update(first, given)
    for maximum in (norm, 2 * norm):
        parameters, optimizer = make()
        update(optimizer, given, maximum)
        assert torch.equal(parameters.flat, free.flat)
    _, optimizer = make()
    update(optimizer, given, norm / 4)
    torch.testing.assert_close(optimizer.mean.flat, given * f(0.1) / 4)


def test_what_is_not_a_number_reaches_the_weights():
    for value in (math.nan, math.inf):
        parameters, optimizer = make()
        given = gradient(0)
        given[7] = value
        update(optimizer, given, 40.0)
        assert parameters.flat[7].isnan()
