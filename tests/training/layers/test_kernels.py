"""Calls of the C kernels: sums step by step, the cell of an LSTM, policies, bit for bit."""

import ctypes
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.training.layers import kernels
from tests.training.layers.conftest import normal, same_bits

fmaf = ctypes.CDLL("libm.so.6").fmaf
fmaf.restype = ctypes.c_float
fmaf.argtypes = [ctypes.c_float] * 3


def chain(pairs, start=0.0):
    """Sum products one by one, each step rounded once."""
    total = np.float32(start)
    for left, right in pairs:
        total = np.float32(fmaf(left, right, total))
    return total


def convolved(images, filters, bias, stride):
    rows, height, width, _ = images.shape
    count, size = filters.shape[:2]
    down, across = (1 + (side - size) // stride for side in (height, width))
    result = np.empty((rows, down, across, count), np.float32)
    for row, i, j, f in np.ndindex(result.shape):
        window = images[row, i * stride : i * stride + size, j * stride : j * stride + size]
        result[row, i, j, f] = chain(zip(window.ravel(), filters[f].ravel(), strict=True)) + bias[f]
    return result


def filters_gradient(images, gradient, shape, stride):
    result = np.empty(shape, np.float32)
    places = list(np.ndindex(gradient.shape[:3]))
    for f, y, x, c in np.ndindex(shape):
        result[f, y, x, c] = chain(
            (gradient[row, i, j, f], images[row, i * stride + y, j * stride + x, c])
            for row, i, j in places
        )
    return result


def images_gradient(gradient, filters, shape, stride):
    result = np.zeros(shape, np.float32)
    rows, down, across, count = gradient.shape
    size = filters.shape[1]
    order = itertools.product(range(rows), range(down), range(size), range(size), range(across))
    for row, i, y, x, j in order:
        for c in range(shape[3]):
            place = row, i * stride + y, j * stride + x, c
            pairs = ((gradient[row, i, j, f], filters[f, y, x, c]) for f in range(count))
            result[place] = chain(pairs, result[place])
    return result


@st.composite
def convolutions(draw):
    stride, size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    height, width = (size + draw(st.integers(0, 4)) for _ in "hw")
    shape = draw(st.integers(1, 2)), height, width, draw(st.integers(1, 5))
    return shape, (draw(st.integers(1, 19)), size, size, shape[3]), stride


@settings(deadline=None, max_examples=25)
@given(convolutions(), st.integers(0, 2**31))
def test_a_convolution_is_its_chains(instructions_of_all, case, key):
    shape, filter_shape, stride = case
    images, filters = normal(*shape, key=key), normal(*filter_shape, key=key + 1)
    bias = normal(filter_shape[0], key=key + 2)
    unrectified = convolved(images.numpy(), filters.numpy(), bias.numpy(), stride)
    outputs = np.maximum(unrectified, np.float32(0))
    gradient = normal(*outputs.shape, key=key + 3)
    through = np.where(outputs > 0, gradient.numpy(), np.float32(0))
    for name in instructions_of_all:
        kernels.limit_instruction_set(name)
        assert same_bits(
            kernels.convolution(images, filters, bias, stride, rectified=False), unrectified
        )
        ours = kernels.convolution(images, filters, bias, stride, rectified=True)
        assert same_bits(ours, outputs)
        bias_gradient = torch.zeros(filter_shape[0])
        back = kernels.relu_backward(gradient, ours, bias_gradient)
        assert same_bits(back, through)
        assert same_bits(bias_gradient, sums(through.reshape(-1, filter_shape[0])))
        found = torch.zeros(filter_shape)
        kernels.conv2d_weight_grad(images, back, found, stride)
        assert same_bits(found, filters_gradient(images.numpy(), through, filter_shape, stride))
        found = kernels.conv2d_input_grad(back, filters, images.shape, stride)
        assert same_bits(found, images_gradient(through, filters.numpy(), shape, stride))


def sums(matrix):
    total = np.zeros(matrix.shape[1], np.float32)
    for row in matrix:
        total = total + row
    return total


@pytest.fixture(scope="module")
def instructions_of_all():
    yield ("AVX2", "AVX-512")
    kernels.limit_instruction_set("AVX-512")


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 18), st.integers(1, 140), st.integers(1, 21), st.integers(0, 2**31))
def test_a_dense_layer_is_its_chains(instructions_of_all, rows, fan_in, units, key):
    inputs, weight = normal(rows, fan_in, key=key), normal(units, fan_in, key=key + 1)
    bias, gradient = normal(units, key=key + 2), normal(rows, units, key=key + 3)
    x, w, b, g = (tensor.numpy() for tensor in (inputs, weight, bias, gradient))
    outputs = [
        [chain(zip(x[r], w[u], strict=True)) + b[u] for u in range(units)] for r in range(rows)
    ]
    weights = [
        [chain(zip(g[:, u], x[:, i], strict=True)) for i in range(fan_in)] for u in range(units)
    ]
    through = [[chain(zip(g[r], w[:, i], strict=True)) for i in range(fan_in)] for r in range(rows)]
    for name in instructions_of_all:
        kernels.limit_instruction_set(name)
        assert same_bits(kernels.dense(inputs, weight, bias), outputs)
        assert same_bits(kernels.dense(inputs, weight, None) + bias, outputs)
        assert same_bits(kernels.outer(gradient, inputs), weights)
        assert same_bits(kernels.matrix_product(gradient, weight), through)
        assert same_bits(kernels.column_sums(gradient), sums(g))


@pytest.mark.parametrize(
    ("rows", "steps", "columns"),
    [(253, 130, 513), (600, 390, 100), (3, 130, 1_700), (65, 193, 1_667), (64, 200, 66)],
)
def test_the_blocks_of_a_large_product_do_not_show(instructions, rows, steps, columns):
    left, right = normal(rows, steps, key=1), normal(steps, columns, key=2)
    narrow = [
        kernels.matrix_product(left[row : row + 7], right[:, column : column + 33].contiguous())
        for row in range(0, rows, 7)
        for column in range(0, columns, 33)
    ]
    per_row = -(-columns // 33)
    lines = [
        torch.cat(narrow[start : start + per_row], 1) for start in range(0, len(narrow), per_row)
    ]
    assert same_bits(kernels.matrix_product(left, right), torch.cat(lines))
    assert same_bits(kernels.outer(left.t().contiguous(), right), torch.cat(lines))
    assert same_bits(kernels.dense(left, right.t().contiguous(), None), torch.cat(lines))


# --- the cell of an LSTM --------------------------------------------------------------------------


def cell(gates, before):
    """Take one step with these gates; adding -0 changes no number."""
    rows, units = before.shape
    found = {"gates": torch.empty(rows, 4 * units)}
    found |= {name: torch.empty(rows, units) for name in ("cell", "squashed", "hidden")}
    kernels.lstm(gates, torch.full_like(gates, -0.0), before, **found)
    return found


def float64_ulps(found, exact):
    """Return the largest distance in units of the last place of float32."""
    return (np.abs(found.astype(np.float64) - exact) / np.spacing(np.abs(exact.astype("f4")))).max()


def test_logistic_and_tanh_are_rounded_correctly_but_for_rare_ties():
    small = np.geomspace(1e-30, 80, 5_000)
    numbers = np.concatenate((np.linspace(-20, 20, 40_001), small, -small)).astype(np.float32)
    gates = torch.from_numpy(np.tile(numbers, (4, 1)).reshape(1, -1))
    found = cell(gates, torch.zeros(1, len(numbers)))["gates"].numpy().reshape(4, -1)
    exact = numbers.astype(np.float64)
    logistic, tanh = 1 / (1 + np.exp(-exact)), np.tanh(exact)
    for gate, expected in zip(found, (logistic, logistic, tanh, logistic), strict=True):
        assert float64_ulps(gate, expected) <= 0.5001


def test_the_cell_at_the_ends_of_numbers():
    numbers = torch.tensor([[math.inf, -math.inf, 0.0, -0.0, 1e-45, 3e38, -3e38, math.nan]])
    found = cell(numbers.repeat(1, 4), torch.zeros(1, 8))["gates"].view(4, 8)
    logistic = [1.0, 0.0, 0.5, 0.5, 0.5, 1.0, 0.0]
    for row in (0, 1, 3):
        assert found[row, :7].tolist() == logistic
    assert found[2, :7].tolist() == [1.0, -1.0, 0.0, 0.0, numbers[0, 4], 1.0, -1.0]
    assert math.copysign(1, found[2, 3]) == -1
    assert found[:, 7].isnan().all()


@pytest.mark.parametrize("units", [1, 3, 8, 20, 33])
def test_a_cell_and_its_gradient_are_the_formulas_bit_for_bit(units):
    generator = torch.Generator().manual_seed(units)
    gates, before = (torch.randn(2, n * units, generator=generator) for n in (4, 1))
    found = cell(gates, before)
    i, f, g, o = (part.numpy() for part in found["gates"].chunk(4, 1))
    after = f * before.numpy() + i * g
    assert np.array_equal(found["cell"], after)
    assert float64_ulps(found["squashed"].numpy(), np.tanh(after.astype(np.float64))) <= 0.5001
    squashed = found["squashed"].numpy()
    assert np.array_equal(found["hidden"], o * squashed)

    dh, dc = (torch.randn(2, units, generator=generator) for _ in range(2))
    through, cell_gradient = torch.empty(2, 4 * units), dc.clone()
    kernels.lstm_backward(
        found["gates"], before, found["squashed"], dh,
        cell_gradient=cell_gradient, gate_gradients=through,
    )  # fmt: skip
    one, dh = np.float32(1), dh.numpy()
    dc = dc.numpy() + (dh * o) * (one - squashed * squashed)
    expected = [
        (dc * g) * (i * (one - i)), (dc * before.numpy()) * (f * (one - f)),
        (dc * i) * (one - g * g), (dh * squashed) * (o * (one - o)),
    ]  # fmt: skip
    assert np.array_equal(through, np.concatenate(expected, 1))
    assert np.array_equal(cell_gradient, dc * f)


# --- policies -------------------------------------------------------------------------------------


def test_the_gradient_is_float32_action_by_action():
    logits, factors, bends = normal(9, 6), normal(9, 6, key=1), normal(9, key=2)
    logarithms, probabilities, entropies = kernels.log_softmax(logits)
    found = kernels.log_softmax_backward(
        logarithms, probabilities, entropies, factors, bends
    ).numpy()
    logarithms, probabilities, entropies, factors, bends = (
        part.numpy() for part in (logarithms, probabilities, entropies, factors, bends)
    )
    total = np.zeros(9, np.float32)
    for action in range(6):
        total = total + factors[:, action]
    bend = bends[:, None] * (logarithms + entropies[:, None])
    assert np.array_equal(found, factors - probabilities * (total[:, None] + bend))


def test_policies_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)], [5.0, 5.0], [0.0, -math.inf]])
    logarithms, probabilities, entropies = kernels.log_softmax(logits)
    expected = [[math.log(0.25), math.log(0.75)], [math.log(0.5)] * 2]
    assert logarithms[:2].tolist() == [pytest.approx(row, rel=1e-7) for row in expected]
    assert probabilities.tolist() == [
        pytest.approx(row) for row in ([0.25, 0.75], [0.5, 0.5], [1, 0])
    ]
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert entropies[:2].tolist() == pytest.approx([entropy, math.log(2)], rel=1e-7)


def test_of_a_single_action_the_policy_is_certain():
    logarithms, probabilities, entropies = kernels.log_softmax(torch.tensor([[7.0], [-1e30]]))
    assert (logarithms.tolist(), probabilities.tolist()) == ([[0.0]] * 2, [[1.0]] * 2)
    assert entropies.tolist() == [0.0, 0.0]


# --- exponentials and sums of squares -------------------------------------------------------------


def test_exponentials_are_rounded_once():
    numbers = np.concatenate((np.linspace(-87, 88, 20_001), np.geomspace(1e-30, 80, 999)))
    found = kernels.exponentiate(torch.from_numpy(numbers.astype(np.float32))).numpy()
    exact = np.exp(numbers.astype(np.float32).astype(np.float64))
    assert float64_ulps(found, exact) <= 0.5001


def test_exponentials_at_the_ends_of_numbers():
    numbers = torch.tensor([[0.0, -0.0, math.inf], [-math.inf, 89.0, -200.0]])
    assert kernels.exponentiate(numbers).tolist() == [[1.0, 1.0, math.inf], [0.0, math.inf, 0.0]]
    assert kernels.exponentiate(torch.tensor([math.nan])).isnan().all()


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40))
def test_a_sum_of_squares_is_taken_first_to_last_in_float64(numbers):
    total = 0.0
    for number in numbers:
        total += number * number
    assert kernels.sum_of_squares(torch.tensor(numbers, dtype=torch.float32)) == total


# --- images ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1 / 255, 0.5])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 4, 5, 7), (2, 3, 16, 16), (5, 17, 3, 2)])
def test_images_become_numbers_with_their_channels_last(shape, scale):
    images = torch.randint(
        0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    expected = np.moveaxis(images.numpy(), 1, 3).astype(np.float32) * np.float32(scale)
    assert same_bits(kernels.interleave(images, scale), expected)


def test_stacks_that_share_their_frames_are_read_where_they_are():
    frames = torch.arange(9 * 4 * 5, dtype=torch.uint8).view(9, 4, 5)
    stacks = frames.unfold(0, 3, 1).permute(0, 3, 1, 2)
    assert not stacks.is_contiguous()
    for images in (
        stacks,
        frames.view(1, 9, 4, 5)[:, ::2],
        frames.view(9, 1, 5, 4).transpose(2, 3),
    ):
        expected = np.moveaxis(images.numpy(), 1, 3).astype(np.float32)
        assert same_bits(kernels.interleave(images, 1.0), expected)


# --- memory ---------------------------------------------------------------------------------------


def test_results_are_aligned_for_vectors():
    images, filters = normal(2, 5, 6, 3), normal(7, 2, 2, 3)
    made = [
        kernels.convolved(images, filters, 1),
        kernels.convolution(images, filters, normal(7), 1, rectified=True),
        kernels.dense(normal(3, 5), normal(7, 5), None),
        kernels.matrix_product(normal(3, 5), normal(5, 7)),
        kernels.outer(normal(3, 5), normal(3, 7)),
        kernels.column_sums(normal(3, 5)),
        kernels.exponentiate(normal(3)),
        *kernels.log_softmax(normal(3, 5)),
    ]
    assert [each.data_ptr() % kernels.ALIGNMENT for each in made] == [0] * len(made)


@pytest.mark.parametrize(("stride", "rows"), [(1, None), (2, None), (3, 9)])
def test_memory_for_a_convolution_has_its_shape(stride, rows):
    images, filters = normal(2, 11, 8, 3), normal(5, 3, 3, 3)
    with torch.no_grad():
        expected = torch.nn.functional.conv2d(
            images.permute(0, 3, 1, 2), filters.permute(0, 3, 1, 2), stride=stride
        )
    found = kernels.convolved(images, filters, stride, rows)
    assert found.shape == (rows or 2, *expected.shape[2:], 5)


def test_a_convolution_is_written_to_the_memory_that_is_given():
    images, filters, bias = normal(4, 5, 6, 3), normal(7, 2, 2, 3, key=1), normal(7, key=2)
    expected = kernels.convolution(images, filters, bias, 1, rectified=False)
    memory = torch.full((6, *expected.shape[1:]), math.nan)
    found = kernels.convolution(images, filters, bias, 1, rectified=False, out=memory[1:5])
    assert found.data_ptr() == memory[1].data_ptr()
    assert same_bits(memory[1:5], expected)
    assert memory[0].isnan().all()
    assert memory[5].isnan().all()


def test_an_outer_product_reads_rows_that_are_apart_and_writes_where_it_is_told():
    wide, right = normal(6, 9), normal(6, 4, key=1)
    left = wide[:, 2:7]
    assert not left.is_contiguous()
    memory = torch.full((5, 4), math.nan)
    found = kernels.outer(left, right, out=memory)
    assert found is memory
    assert same_bits(memory, kernels.outer(left.contiguous(), right))
    torch.testing.assert_close(memory, left.t() @ right)


def test_gradients_of_filters_and_biases_are_added_to_those_of_earlier_images():
    images, gradient = normal(5, 6, 7, 3), normal(5, 3, 3, 4, key=1)
    outputs = normal(5, 3, 3, 4, key=2)
    found = {}
    for cuts in ([5], [2, 5], [1, 2, 3, 4, 5]):
        filters, bias, first = torch.zeros(4, 2, 2, 3), torch.zeros(4), 0
        for end in cuts:
            part = slice(first, end)
            kernels.conv2d_weight_grad(images[part], gradient[part], filters, 2)
            kernels.relu_backward(gradient[part], outputs[part], bias)
            first = end
        found[len(cuts)] = filters, bias
    for filters, bias in found.values():
        assert same_bits(filters, found[1][0])
        assert same_bits(bias, found[1][1])
    assert found[1][0].any()


# --- instruction sets -----------------------------------------------------------------------------


@pytest.fixture
def all_instructions():
    """Restore the widest instruction set afterwards."""
    yield
    kernels.limit_instruction_set("AVX-512")


@pytest.mark.usefixtures("all_instructions")
def test_no_wider_instructions_are_used_than_allowed():
    widest = kernels.instruction_set()
    for place, name in enumerate(kernels.INSTRUCTION_SETS):
        used = kernels.limit_instruction_set(name)
        assert kernels.INSTRUCTION_SETS.index(used) <= place
        assert kernels.instruction_set() == used
        assert kernels.has_products() == (used != "none")
    assert used == widest


def test_tensors_of_a_device_are_rejected():
    """Their addresses mean nothing to the CPU."""
    elsewhere = torch.empty(4, device="meta")
    with pytest.raises(ValueError, match="take tensors of the CPU, not of meta"):
        kernels.sum_of_squares(elsewhere)


@pytest.mark.usefixtures("all_instructions")
def test_an_unknown_instruction_set_changes_nothing():
    kernels.limit_instruction_set("none")
    with pytest.raises(ValueError, match="'SSE9' is not one of 'none', "):
        kernels.limit_instruction_set("SSE9")
    assert kernels.instruction_set() == "none"


@pytest.mark.usefixtures("all_instructions")
def test_the_products_name_what_the_processor_has():
    flags = Path("/proc/cpuinfo").read_text().split()
    widest = kernels.limit_instruction_set("AVX-512")
    assert (widest != "none") == {"avx2", "fma"}.issubset(flags)
    if widest == "AVX-512":
        assert "avx512f" in flags
