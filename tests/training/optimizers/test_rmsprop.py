"""IMPALA's RMSProp: by hand, bit for bit against numpy, against torch's; its rate."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capsule.training.layers import kernels
from capsule.training.networks.feedforward import Parameters
from capsule.training.optimizers.adam import clipping_factor
from capsule.training.optimizers.rmsprop import RmsProp, annealed

CPU = torch.device("cpu")
SETTINGS = {"epsilon": 0.01, "decay": 0.99, "momentum": 0.0}
f = np.float32
SHAPES = {"conv1.weight": (5, 3, 2, 2), "conv1.bias": (5,), "dense1.weight": (3, 5_000)}


def random(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def test_a_rate_falls_in_a_line_to_zero_and_stays_there():
    total = 200_000_000
    assert annealed(0.0006, 0, total) == 0.0006
    assert annealed(0.0006, total // 2, total) == 0.0003
    assert annealed(0.0006, total // 4, total) == pytest.approx(0.00045)
    assert annealed(0.0006, total - 1, total) > 0
    assert annealed(0.0006, total, total) == annealed(0.0006, total + 640, total) == 0.0


@given(st.floats(0, 1e3), st.integers(0, 2**40), st.integers(1, 2**40))
def test_a_rate_is_never_below_zero_or_above_its_beginning_and_never_rises(rate, done, total):
    found = annealed(rate, done, total)
    assert 0 <= annealed(rate, done + 1, total) <= found <= rate
    share = Fraction(max(total - done, 0), total)
    assert found == pytest.approx(float(Fraction(rate) * share), rel=1e-15, abs=5e-324)


def make(seed=0, device=CPU, **changes):
    parameters = Parameters(SHAPES, device)
    generator = np.random.default_rng(seed)
    parameters.load({n: generator.normal(size=s).astype(f) for n, s in SHAPES.items()})
    return parameters, RmsProp(parameters, **(SETTINGS | changes))


def gradient(seed, scale=3.0, device=CPU):
    size = sum(math.prod(shape) for shape in SHAPES.values())
    return random(size, seed=seed, scale=scale).to(device)


def test_steps_and_means_that_nothing_is_added_to_end_at_zero_not_at_subnormal_numbers():
    tiny = torch.finfo(torch.float32).tiny
    parameters, optimizer = make(decay=0.5, momentum=0.5)
    optimizer.square.flat.fill_(1.5 * tiny)
    optimizer.step.flat.fill_(-1.5 * tiny)
    optimizer.update(torch.zeros_like(parameters.flat), 0.1)
    assert not optimizer.square.flat.any()
    assert not optimizer.step.flat.any()


def test_two_updates_by_hand():
    parameters = Parameters({"w": (1,)}, CPU)
    parameters.flat.fill_(1.0)
    optimizer = RmsProp(parameters, epsilon=0.25, decay=0.5, momentum=0.5)
    optimizer.update(torch.tensor([2.0]), 0.5)
    # v = 0.5 + 0.5 4 = 2.5; u = 0.5 2 / sqrt(2.75)
    step = 1 / math.sqrt(2.75)
    assert parameters.flat.item() == pytest.approx(1 - step, rel=1e-6)
    optimizer.update(torch.tensor([-3.0]), 0.25, maximum_norm=1.0)
    # g = -1; v = 1.25 + 0.5 = 1.75; u = step / 2 - 0.25 / sqrt(2)
    second = step / 2 - 0.25 / math.sqrt(2)
    assert parameters.flat.item() == pytest.approx(1 - step - second, rel=1e-6)
    assert optimizer.square.flat.item() == 1.75
    assert optimizer.step.flat.item() == pytest.approx(second, rel=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_fused_loop_gives_the_bits_of_one_operation_after_the_other(momentum):
    parameters, optimizer = make(momentum=momentum)
    w, v, u = (x.flat.numpy().copy() for x in (parameters, optimizer.square, optimizer.step))
    assert (v == 1).all()
    assert (u == 0).all()
    for number in range(1, 8):
        given, maximum, rate = gradient(number), 100.0 * number, 6e-4 / number
        optimizer.update(given, rate, maximum)
        g = given.numpy() * f(clipping_factor(given, maximum))
        v = v * f(0.99) + (g * g) * f(1 - 0.99)
        u = u * f(momentum) + (g / np.sqrt(v + f(0.01))) * f(rate)
        w = w - u
        assert torch.equal(given, gradient(number))
    for ours, expected in ((parameters, w), (optimizer.square, v), (optimizer.step, u)):
        assert np.array_equal(ours.flat.numpy().view(np.int32), expected.view(np.int32))


def test_with_epsilon_nearly_0_and_no_start_it_is_torchs():
    """Where the two definitions meet: the place of epsilon no longer counts."""
    parameters, optimizer = make(epsilon=1e-20)
    optimizer.square.flat.zero_()
    theirs = torch.nn.Parameter(parameters.flat.clone())
    reference = torch.optim.RMSprop([theirs], lr=1e-3, alpha=0.99, eps=1e-10)
    start = parameters.flat.clone()
    for number in range(50):
        given = gradient(number, scale=2.0 ** (number % 7 - 3))
        optimizer.update(given, 1e-3, 40.0)
        theirs.grad = given.clone()
        torch.nn.utils.clip_grad_norm_([theirs], 40.0)
        reference.step()
    assert (parameters.flat - start).abs().max() > 1e-3
    torch.testing.assert_close(parameters.flat, theirs.detach(), rtol=0, atol=5e-6)


def test_the_place_of_epsilon_and_the_start_are_tensorflows():
    """First update of TensorFlow's: v = a + (1 - a) g^2, and a step of lr g / sqrt(v + c)."""
    parameters, optimizer = make()
    start, given = parameters.flat.double(), gradient(0).double()
    optimizer.update(gradient(0), 6e-4)
    square = 0.99 + 0.01 * given.square()
    expected = start - 6e-4 * given / (square + 0.01).sqrt()
    torch.testing.assert_close(parameters.flat.double(), expected, rtol=0, atol=2e-7)
    outside = start - 6e-4 * given / (square.sqrt() + 0.01)
    assert (expected - outside).abs().max() > 1e-6


def test_it_goes_on_from_its_state():
    straight, first = make(momentum=0.5)
    for number in range(6):
        first.update(gradient(number), 1e-3, 40.0)
    halted, second = make(momentum=0.5)
    for number in range(3):
        second.update(gradient(number), 1e-3, 40.0)
    resumed, third = make(seed=1, momentum=0.5)
    resumed.load(halted.arrays())
    third.square.load(second.square.arrays())
    third.step.load(second.step.arrays())
    for number in range(3, 6):
        third.update(gradient(number), 1e-3, 40.0)
    assert torch.equal(straight.flat, resumed.flat)
    assert torch.equal(first.square.flat, third.square.flat)


def test_only_a_gradient_beyond_the_maximum_is_clipped():
    given = gradient(0)
    norm = math.sqrt(kernels.sum_of_squares(given))
    free, first = make()
    first.update(given, 1e-3)
    for maximum in (norm, 2 * norm):
        parameters, optimizer = make()
        optimizer.update(given, 1e-3, maximum)
        assert torch.equal(parameters.flat, free.flat)
    _, optimizer = make()
    optimizer.square.flat.zero_()
    optimizer.update(given, 1e-3, norm / 4)
    torch.testing.assert_close(optimizer.square.flat, given.square() * f(1 - 0.99) / 16)


def test_what_is_not_a_number_reaches_the_weights():
    for value in (math.nan, math.inf):
        parameters, optimizer = make()
        given = gradient(0)
        given[7] = value
        optimizer.update(given, 1e-3, 40.0)
        assert parameters.flat[7].isnan()


def test_epsilon_may_be_changed_between_updates():
    parameters = Parameters({"w": (1,)}, CPU)
    optimizer = RmsProp(parameters, epsilon=0.0, decay=0.5, momentum=0.0)
    optimizer.square.flat.fill_(7.0)
    optimizer.update(torch.tensor([1.0]), 1.0)
    # v = 3.5 + 0.5 = 4; w = -1 / sqrt(4)
    assert parameters.flat.item() == -0.5
    optimizer.epsilon = 13.5
    optimizer.update(torch.tensor([1.0]), 1.0)
    # v = 2 + 0.5 = 2.5; 1 / sqrt(2.5 + 13.5) = 1 / 4
    assert parameters.flat.item() == -0.75


@pytest.mark.gpu
def test_on_a_gpu_updates_come_close_to_the_cpus():
    cuda = torch.device("cuda")
    (ours, first), (theirs, second) = make(momentum=0.5), make(momentum=0.5, device=cuda)
    for number in range(10):
        first.update(gradient(number), 1e-3, 100.0)
        second.update(gradient(number, device=cuda), 1e-3, 100.0)
    torch.testing.assert_close(theirs.flat.cpu(), ours.flat, rtol=0, atol=1e-6)
