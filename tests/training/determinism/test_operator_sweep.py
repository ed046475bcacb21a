"""The operator sweep: exact inputs, and entries that compute what they are named after."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from capsule.training.determinism import operator_sweep, self_test

KEYS = st.integers(0, 2**20)


def splitmix_like(index, key, bits):
    """The generator of inputs once more, in Python's unbounded integers."""
    mixed = index + 1 + (key << 32)
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        mixed = (mixed ^ (mixed >> 29)) * factor % (1 << 64)
    return mixed >> (64 - bits)


@pytest.mark.parametrize(("key", "bits"), [(0, 24), (3, 24), (99, 7)])
def test_inputs_are_integer_arithmetic(key, bits):
    wanted = [splitmix_like(index, key, bits) for index in range(60)]
    assert operator_sweep.integers(6, 10, key=key, bits=bits).ravel().tolist() == wanted


def test_inputs_are_exact_and_in_range():
    reals, positives = operator_sweep.real(999), operator_sweep.positive(999)
    assert torch.equal(reals.double() * (1 << 21), (reals.double() * (1 << 21)).round())
    assert -4 <= reals.min() < -3.9 and 3.9 < reals.max() < 4
    assert positives.min() > 0 and positives.max() <= 8


@given(st.lists(st.integers(1, 5), max_size=3), KEYS, st.integers(1, 62))
def test_integers_have_their_shape_and_bits(shape, key, bits):
    found = operator_sweep.integers(*shape, key=key, bits=bits)
    assert (found.shape, found.dtype) == (tuple(shape), np.int64)
    assert found.min() >= 0
    assert found.max() < 2**bits


@given(st.integers(1, 50), KEYS)
def test_a_longer_input_begins_with_the_shorter_one(count, key):
    longer = operator_sweep.integers(60, key=key)
    assert operator_sweep.integers(count, key=key).tolist() == longer[:count].tolist()


def test_inputs_of_two_keys_have_nothing_in_common():
    one, other = (operator_sweep.integers(4_000, key=key, bits=62).tolist() for key in (0, 1))
    assert len({*one, *other}) == 8_000


@pytest.mark.parametrize("half_range", [0.125, 1.0, 4.0])
def test_reals_are_multiples_of_a_power_of_two_within_their_range(half_range):
    found = operator_sweep.real(37, 41, key=3, half_range=half_range)
    assert found.dtype == torch.float32
    scaled = found.double() / half_range * 2**23
    assert torch.equal(scaled, scaled.round())
    assert -half_range <= found.min() < -0.9 * half_range
    assert 0.9 * half_range < found.max() < half_range


@pytest.mark.parametrize("limit", [0.5, 1.0, 8.0])
def test_positive_inputs_reach_their_limit_and_never_zero(limit):
    found = operator_sweep.positive(37, 41, key=3, limit=limit)
    assert found.dtype == torch.float32
    scaled = found.double() / limit * 2**24
    assert torch.equal(scaled, scaled.round())
    assert 0 < found.min() < 0.1 * limit
    assert 0.9 * limit < found.max() <= limit


def test_labels_are_every_class_about_as_often():
    found = operator_sweep.labels(50, 100, classes=10, key=2)
    assert (found.dtype, found.shape) == (torch.int64, (50, 100))
    counts = np.bincount(found.ravel().numpy(), minlength=10)
    assert len(counts) == 10
    # Of 5,000 draws each class has 500, with a standard deviation of sqrt(5,000 * 0.1 * 0.9).
    assert np.abs(counts - 500).max() < 5 * math.sqrt(450)


def test_filled_parameters_do_not_depend_on_how_the_module_began():
    modules = [nn.Sequential(nn.Linear(24, 8), nn.Conv2d(4, 8, 2)) for _ in range(2)]
    for module in modules:
        operator_sweep.fill(module)
    for one, other in zip(*(module.parameters() for module in modules), strict=True):
        assert torch.equal(one, other)
    values = torch.cat([parameter.detach().ravel() for parameter in modules[0].parameters()])
    assert len(values.unique()) > 0.9 * len(values)
    # Of fan-in 24, the bound is the power of two next to 1/sqrt(24): 1/4; of 16 it is 1/4 as well,
    # and a bias has no fan-in.
    for parameter in modules[0].parameters():
        bound = 0.25 if parameter.ndim > 1 else 1.0
        assert 0.5 * bound < parameter.abs().max() <= bound


def test_the_optimizers_can_be_left_out():
    everything = operator_sweep.operators(optimizers=True)
    without = operator_sweep.operators(optimizers=False)
    assert without.keys() < everything.keys()
    assert {name.partition(".")[0] for name in everything.keys() - without.keys()} == {"optimizer"}


@pytest.mark.slow
def test_every_answer_is_a_number():
    torch.manual_seed(1)
    for name, compute in operator_sweep.operators(optimizers=True).items():
        result = compute()
        for part in result if isinstance(result, list | tuple) else [result]:
            array = self_test._array(part) if torch.is_tensor(part) else np.asarray(part)
            assert np.isfinite(array).all(), name
            assert array.size, name


@pytest.fixture(scope="module")
def sweep():
    """The operators but for those of ``torch.optim``; not to be changed."""
    return operator_sweep.operators(optimizers=False)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_answers_do_not_depend_on_the_order_of_the_operators(sweep):
    first = {name: self_test.digest(compute()) for name, compute in sweep.items()}
    second = {name: self_test.digest(sweep[name]()) for name in reversed(list(sweep))}
    assert first == second


MATHS = {
    "asinh": math.asinh, "atan": math.atan, "cbrt": math.cbrt, "cos": math.cos, "cosh": math.cosh,
    "erf": math.erf, "erfc": math.erfc, "exp": math.exp, "exp2": math.exp2, "expm1": math.expm1,
    "lgamma": math.lgamma, "log": math.log, "log10": math.log10, "log1p": math.log1p,
    "log2": math.log2, "sin": math.sin, "sinh": math.sinh, "sqrt": math.sqrt, "tan": math.tan,
    "tanh": math.tanh, "tgamma": math.gamma, "arctan": math.atan,
}  # fmt: skip
PREFIXES = {"libm": "", "numpy": "", "torch": ".float64"}
NAMED = [
    (f"{library}.{name}{suffix}", function)
    for library, suffix in PREFIXES.items()
    for name, function in MATHS.items()
]


def test_functions_are_those_that_entries_are_named_after(sweep):
    """In double precision, compared with the standard library on the same inputs."""
    positive = operator_sweep.positive(operator_sweep.SIZE).double().tolist()
    beyond_one = (operator_sweep.positive(251) + 1).double().tolist()
    compared = 0
    for name, function in NAMED:
        if name not in sweep:
            continue
        values = beyond_one if name.startswith("libm.") else positive
        found = np.asarray(sweep[name](), float)
        expected = np.array([function(value) for value in values])
        np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-15, err_msg=name)
        compared += 1
    assert compared > 40


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("python.gauss", lambda source: source.gauss(0.0, 1.0)),
        ("python.expovariate", lambda source: source.expovariate(1.5)),
        ("python.betavariate", lambda source: source.betavariate(0.5, 0.5)),
    ],
)
def test_pythons_draws_are_those_of_one_generator_each_time(sweep, name, draw):
    source = random.Random(7)  # noqa: S311 - of the same numbers each time
    expected = [draw(source) for _ in range(99)]
    assert sweep[name]() == sweep[name]() == expected


@pytest.mark.usefixtures("one_thread")
def test_products_and_sums_are_those_of_float64_up_to_rounding(sweep):
    a, b = operator_sweep.real(67, 129).double(), operator_sweep.real(129, 71, key=1).double()
    exact = np.array([[math.fsum(x * y) for y in b.numpy().T] for x in a.numpy()])
    scale = float(np.abs(exact).max())
    for name, precision in (
        ("torch.mm", 2**-20),
        ("torch.mm.float64", 2**-48),
        ("numpy.matmul", 2**-48),
        ("numpy.matmul.float32", 2**-20),
    ):
        found = np.asarray(sweep[name](), float)
        assert np.abs(found - exact).max() < precision * scale, name
    total = math.fsum(operator_sweep.real(operator_sweep.SIZE).tolist())
    assert float(sweep["torch.sum.float64"]()) == pytest.approx(total, rel=1e-12)


@pytest.mark.usefixtures("one_thread")
def test_gradients_follow_the_result_of_an_entry_with_a_backward_pass(sweep):
    """Of a softmax: ``(diag(s) - s s') c`` for the cotangent ``c``."""
    result, gradient = (part.double() for part in sweep["torch.softmax"]())
    rows = operator_sweep.real(61, 67).double()
    cotangent = operator_sweep.real(61, 67, key=99, half_range=1.0).double()
    exponentials = np.exp(rows.numpy())
    softmax = exponentials / exponentials.sum(1, keepdims=True)
    np.testing.assert_allclose(result, softmax, rtol=1e-5)
    weighted = cotangent.numpy() - (softmax * cotangent.numpy()).sum(1, keepdims=True)
    np.testing.assert_allclose(gradient, softmax * weighted, rtol=1e-4, atol=1e-7)
