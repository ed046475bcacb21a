"""LayerBackend as chains: against the C library's fma step by step, torch, and each other."""

import ctypes
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.spec import CpuAccelerator
from capsule.experiment.trainers import ModuleSpec
from capsule.training.layers import kernels
from capsule.training.layers.backends import FIXED_ORDER, IMAGES, LIBRARY, Convolution, backend_for
from capsule.training.networks.feedforward import images

fmaf = ctypes.CDLL("libm.so.6").fmaf
fmaf.restype = ctypes.c_float
fmaf.argtypes = [ctypes.c_float] * 3


@pytest.fixture(params=["AVX2", "AVX-512"])
def instructions(request):
    found = kernels.limit_instruction_set(request.param)
    yield found
    kernels.limit_instruction_set("AVX-512")


def chain(pairs, start=0.0):
    """Sum products one by one, each step rounded once."""
    total = np.float32(start)
    for left, right in pairs:
        total = np.float32(fmaf(left, right, total))
    return total


def normal(*shape, key=0):
    generator = torch.Generator().manual_seed(key)
    return torch.randn(shape, generator=generator)


def same_bits(ours, expected):
    ours, expected = (np.asarray(array, np.float32) for array in (ours, expected))
    return ours.shape == expected.shape and ours.tobytes() == expected.tobytes()


# Each sum, written out


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


# As layers


LAYERS = [  # images, filters, stride: the network of Mnih et al. 2015, and odd sizes
    ((3, 4, 84, 84), (32, 4, 8, 8), 4),
    ((3, 32, 20, 20), (64, 32, 4, 4), 2),
    ((3, 64, 9, 9), (64, 64, 3, 3), 1),
    ((2, 7, 11, 13), (21, 7, 3, 3), 2),
]


def channels_last(*shape, key):
    batch, channels, height, width = shape
    return normal(batch, height, width, channels, key=key).permute(0, 3, 1, 2)


def through_convolution(products, shape, filter_shape, stride, rectified=True):
    leaves = [
        channels_last(*shape, key=1).requires_grad_(),
        (channels_last(*filter_shape, key=2) * 0.05).requires_grad_(),
        normal(filter_shape[0], key=3).requires_grad_(),
    ]
    outputs = products.convolution(*leaves, stride, rectified=rectified)
    gradient = channels_last(*outputs.shape, key=4)
    return [outputs.detach(), *torch.autograd.grad(outputs, leaves, gradient)]


def through_dense(products, rows, fan_in, units, biased=True):
    shapes = ((rows, fan_in), (units, fan_in), (units,))[: 3 if biased else 2]
    leaves = [normal(*shape, key=key).requires_grad_() for key, shape in enumerate(shapes)]
    outputs = products.dense(*leaves, *([] if biased else [None]))
    gradient = normal(rows, units, key=4)
    return [outputs.detach(), *torch.autograd.grad(outputs, leaves, gradient)]


@pytest.mark.slow
@pytest.mark.parametrize("rectified", [True, False])
@pytest.mark.parametrize("layer", LAYERS)
def test_convolutions_equal_torchs(instructions, layer, rectified):
    pairs = zip(
        through_convolution(FIXED_ORDER, *layer, rectified),
        through_convolution(LIBRARY, *layer, rectified),
        strict=True,
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_convolutions_together_are_those_one_by_one(instructions):
    frames = torch.randint(0, 256, (2 * IMAGES + 3, 20, 20), dtype=torch.uint8)
    stacks = frames.unfold(0, 4, 1).permute(0, 3, 1, 2)  # overlapping, as in a replay memory
    leaves = [
        (channels_last(5, 4, 4, 4, key=1) * 0.1).requires_grad_(),
        normal(5, key=2).requires_grad_(),
        (channels_last(6, 5, 3, 3, key=3) * 0.1).requires_grad_(),
        normal(6, key=4).requires_grad_(),
    ]
    layers = [Convolution(*leaves[:2], 2), Convolution(*leaves[2:], 1)]

    def prepare(observations):
        return images(observations, 1 / 255)

    hidden = prepare(stacks)
    for layer in layers:
        hidden = FIXED_ORDER.convolution(hidden, *layer, rectified=True)
    together = FIXED_ORDER.rectified_convolutions(stacks, prepare, layers)
    assert same_bits(together.detach(), hidden.detach())
    with torch.no_grad():
        assert same_bits(
            FIXED_ORDER.rectified_convolutions(stacks, prepare, layers), hidden.detach()
        )
    gradient = channels_last(*hidden.shape, key=5)
    expected = torch.autograd.grad(hidden, leaves, gradient)
    found = torch.autograd.grad(together, leaves, gradient)
    assert all(same_bits(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    library = LIBRARY.rectified_convolutions(stacks, prepare, layers)
    torch.testing.assert_close(together, library, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("sizes", [(1, 3136, 512), (70, 400, 90), (33, 20, 6), (5, 512, 18)])
def test_dense_layers_equal_torchs(instructions, sizes, biased):
    pairs = zip(
        through_dense(FIXED_ORDER, *sizes, biased),
        through_dense(LIBRARY, *sizes, biased),
        strict=True,
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("layer", LAYERS)
def test_instruction_sets_give_equal_bits(layer):
    results = {}
    for name in ("AVX2", "AVX-512"):
        if kernels.limit_instruction_set(name) == name:
            results[name] = through_convolution(FIXED_ORDER, *layer)
    kernels.limit_instruction_set("AVX-512")
    first, *others = results.values()
    for other in others:
        assert all(same_bits(a, b) for a, b in zip(first, other, strict=True))


def test_a_row_alone_gets_what_it_gets_in_a_batch(instructions):
    images, filters = channels_last(21, 4, 20, 20, key=1), channels_last(32, 4, 4, 4, key=2)
    weight, bias = normal(50, 32 * 81, key=3), normal(50, key=4)

    def network(batch):
        hidden = FIXED_ORDER.convolution(batch, filters, bias[:32], 2, rectified=True)
        return FIXED_ORDER.dense(hidden.flatten(1), weight, bias)

    together = network(images)
    for row in range(len(images)):
        assert same_bits(network(images[row : row + 1])[0], together[row])


def test_what_is_not_a_number_stays_one(instructions):
    images = torch.full((1, 2, 3, 3), torch.nan)
    filters, bias = torch.ones(3, 2, 2, 2), torch.zeros(3)
    assert FIXED_ORDER.convolution(images, filters, bias, 1, rectified=True).isnan().all()
    assert FIXED_ORDER.dense(images.flatten(1), torch.ones(4, 18), torch.zeros(4)).isnan().all()


def test_only_processors_without_fma_and_gpus_leave_it_to_the_library():
    assert backend_for(CpuAccelerator(), "mlp") is FIXED_ORDER
    assert backend_for(CpuAccelerator(numerics="native"), "mlp") is FIXED_ORDER
    assert backend_for(CpuAccelerator(), ModuleSpec(module="nets:make")) is LIBRARY
    assert backend_for(CpuAccelerator(numerics="portable-v2"), "mlp") is LIBRARY
    kernels.limit_instruction_set("none")
    try:
        assert backend_for(CpuAccelerator(), "mlp") is LIBRARY
    finally:
        kernels.limit_instruction_set("AVX-512")
