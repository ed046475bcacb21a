"""Layers of a backend: against torch, alone and in batches, whatever the instructions."""

import pytest
import torch

from capsule.experiment.spec import CpuAccelerator
from capsule.experiment.trainers import ModuleSpec
from capsule.training.layers import kernels
from capsule.training.layers.backends import FIXED_ORDER, IMAGES, LIBRARY, Convolution, backend_for
from capsule.training.networks.feedforward import images
from tests.training.layers.conftest import normal, same_bits

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
