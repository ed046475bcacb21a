"""The networks of the case study have the papers' layers and sizes."""

import pytest
import torch
from models import MODELS, LstmRegressor, ResidualBlock, lenet5, resnet
from torch import nn


def parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def convolution(channels: int, maps: int) -> int:
    return maps * (25 * channels + 1)


def linear(inputs: int, outputs: int) -> int:
    return outputs * (inputs + 1)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("lenet1", convolution(1, 4) + convolution(4, 12) + linear(192, 10)),
        (
            "lenet4",
            convolution(1, 4) + convolution(4, 16) + linear(400, 120) + linear(120, 10),
        ),
        ("lenet5", 61_706),
        ("lstm", 4 * 32 * (1 + 32 + 2) + linear(32, 1)),
    ],
)
def test_parameter_counts(model: str, expected: int) -> None:
    assert parameters(MODELS[model]()) == expected


def test_lenet5_differs_from_the_papers_60000_by_the_stated_deviations() -> None:
    unconnected = 25 * (16 * 6 - 60)  # Table I of the paper: 60 of 96 pairs of maps are connected
    subsampling = 2 * (6 + 16)  # a coefficient and a bias for each map
    radial_basis = 850  # fixed in the paper, trained here
    assert parameters(lenet5()) - unconnected + subsampling - radial_basis == 60_000


@pytest.mark.parametrize(
    ("depth", "millions"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85), (110, 1.7)]
)
def test_resnets_have_the_parameters_of_he_et_al_table_6(depth: int, millions: float) -> None:
    digits = 1 if depth == 110 else 2
    assert round(parameters(resnet(depth)) / 1e6, digits) == millions


@pytest.mark.parametrize("depth", [38, 56])
def test_a_resnet_has_as_many_layers_with_weights_as_its_name_says(depth: int) -> None:
    layers = [m for m in resnet(depth).modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == depth


@pytest.mark.parametrize("depth", [2, 9, 37])
def test_resnet_refuses_other_depths(depth: int) -> None:
    with pytest.raises(ValueError, match=rf"depth {depth} is not 6 n \+ 2"):
        resnet(depth)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("lenet1", (1, 28, 28)),
        ("lenet4", (1, 32, 32)),
        ("lenet5", (1, 32, 32)),
        ("resnet38", (3, 32, 32)),
        ("resnet56", (3, 16, 16)),
    ],
)
def test_classifiers_map_images_to_ten_logits(model: str, shape: tuple[int, ...]) -> None:
    assert MODELS[model]()(torch.zeros(2, *shape)).shape == (2, 10)


def test_a_block_without_its_residual_is_its_shortcut() -> None:
    block = ResidualBlock(16, 32)
    nn.init.zeros_(block.normalization2.weight)
    inputs = torch.rand(2, 16, 8, 8)
    outputs = block(inputs)
    assert torch.equal(outputs[:, :16], inputs[:, :, ::2, ::2])
    assert not outputs[:, 16:].any()


def test_the_regressor_drops_out_in_training_only() -> None:
    network = LstmRegressor()
    sequences = torch.rand(64, 24, 1)
    assert not torch.equal(network(sequences), network(sequences))
    network.eval()
    assert torch.equal(network(sequences), network(sequences))
    assert network(sequences).shape == (64,)
