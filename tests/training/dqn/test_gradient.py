"""The sharded gradient: against autograd's, whole and in pieces, whoever takes them."""

import pytest
import torch

from capsule.training.dqn.gradient import FactoredGradient, FactoredShard
from capsule.training.layers.backends import FIXED_ORDER, LIBRARY
from capsule.training.networks.feedforward import WIDE, Parameters, flatten

SHAPES = {"conv1.weight": (4, 3, 2, 2), WIDE: (37, 9_000), "dense1.bias": (37,)}
SIZES = (5, 3)


@pytest.fixture(params=[FIXED_ORDER, LIBRARY])
def gradient(request):
    """A gradient in two shards, and what autograd makes of the same layer."""
    generator = torch.Generator().manual_seed(0)
    parameters = Parameters(SHAPES, torch.device("cpu"))
    shards = []
    expected = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for size in SIZES:
        weight = torch.zeros(SHAPES[WIDE], requires_grad=True)
        inputs = torch.randn((size, 9_000), generator=generator)
        returned = torch.randn((size, 37), generator=generator)
        (product,) = torch.autograd.grad((inputs @ weight.t() * returned).sum(), [weight])
        small = {
            name: torch.randn(shape, generator=generator)
            for name, shape in SHAPES.items()
            if name != WIDE
        }
        flat = torch.cat([flatten(tensor) for tensor in small.values()])
        shards.append(FactoredShard(torch.zeros(()), flat, inputs, returned))
        for name, tensor in ({WIDE: product} | small).items():
            expected[name] += tensor
    sharded = FactoredGradient(shards, parameters, request.param)
    return sharded, torch.cat([flatten(tensor) for tensor in expected.values()])


@pytest.mark.slow
def test_the_whole_is_what_autograd_gives(gradient):
    sharded, expected = gradient
    torch.testing.assert_close(sharded.whole(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_pieces_are_the_same_bits_whoever_takes_them(gradient, parts):
    sharded, _ = gradient
    whole = sharded.whole()
    found = torch.full_like(whole, torch.nan)
    for part in range(parts):
        for piece in sharded.pieces(part, parts):
            values = piece.parts[0]
            for more in piece.parts[1:]:
                values = values + more
            assert found[piece.start : piece.end].isnan().all()
            found[piece.start : piece.end] = values
    assert torch.equal(found, whole)
