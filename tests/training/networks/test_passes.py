"""Passes without autograd: the same bits as the layers with it, whatever network and rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.trainers import ConvolutionSpec, LayersSpec
from capsule.training.layers.backends import FIXED_ORDER, LIBRARY
from capsule.training.networks.feedforward import WIDE, Parameters, flatten, make_network
from capsule.training.networks.passes import GradientPass, PassesOfAnySize, has_passes
from capsule.training.state.frames import FrameLayout
from tests.training.layers.conftest import same_bits

CPU = torch.device("cpu")
IMAGE, FLAT = FrameLayout((3, 10, 9)), FrameLayout((6,))


def make(name, layout, products=FIXED_ORDER):
    return make_network(
        name, frame_stack=2, layout=layout, actions=5, hidden_units=20, products=products
    )


@st.composite
def networks(draw):
    """A network of a name, or of layers, with the data type of its frames."""
    dense = tuple(draw(st.lists(st.integers(1, 40), max_size=3)))
    image = draw(st.booleans())
    named = "small-conv" if image else "mlp"
    convolution = st.builds(
        ConvolutionSpec,
        filters=st.integers(1, 20),
        kernel=st.integers(1, 3),
        stride=st.integers(1, 2),
    )
    convolutions = tuple(draw(st.lists(convolution, min_size=1, max_size=2))) if image else ()
    own = LayersSpec(
        convolutions=convolutions, dense=dense, scaled=not image or draw(st.booleans())
    )
    name = draw(st.sampled_from([named, own])) if dense or image else named
    dtype = draw(st.sampled_from([np.uint8, np.float32]))
    return make(name, IMAGE if image else FLAT), dtype


def by_autograd(network, parameters, windows, gradient):
    """Return features, values, and the gradients that a pass has."""
    leaves = parameters.leaves()
    leaves[WIDE] = parameters.views[WIDE]
    features = network.features(leaves, windows)
    outputs = network.wide(leaves, features)
    values = network.head(leaves, outputs)
    small = [leaf for name, leaf in leaves.items() if name != WIDE]
    *gradients, returned = torch.autograd.grad(values, [*small, outputs], gradient)
    return features, values, torch.cat([flatten(each) for each in gradients]), returned


@settings(deadline=None, max_examples=60)
@given(networks(), st.integers(1, 40), st.integers(0, 2**31))
def test_values_and_gradients_have_the_bits_of_autograd(case, rows, key):
    network, dtype = case
    generator = np.random.default_rng(key)
    parameters = Parameters(network.shapes, CPU)
    passes = GradientPass(network, parameters, rows)
    for _ in range(2):  # the memory of the first pass is used again
        parameters.flat.copy_(torch.from_numpy(generator.normal(0, 0.3, parameters.flat.shape)))
        shape = rows, 3, *network.layout.images[0]
        frames = torch.from_numpy(generator.integers(0, 9, shape).astype(dtype))
        gradient = torch.from_numpy(generator.normal(0, 1, (rows, 5)).astype(np.float32))
        windows = frames[:, 1:]  # of longer ones, as a minibatch has them
        features, values, small, returned = by_autograd(network, parameters, windows, gradient)
        assert same_bits(passes.values(windows), values.detach().numpy())
        passes.differentiate(gradient)
        assert same_bits(passes.features, features.detach().numpy())
        assert same_bits(passes.small.flat, small.numpy())
        assert same_bits(passes.returned, returned.numpy())


def test_a_nan_reaches_the_values_and_the_gradient():
    network = make("mlp", FLAT)
    parameters = Parameters(network.shapes, CPU)
    parameters.views["dense1.bias"][0] = torch.nan
    parameters.views["dense2.weight"].fill_(1.0)
    parameters.views["dense3.weight"].fill_(1.0)
    passes = GradientPass(network, parameters, 2)
    assert passes.values(torch.ones(2, 2, 6)).isnan().all()
    passes.differentiate(torch.ones(2, 5))
    assert passes.small.views["dense2.weight"].isnan().any()


def test_any_number_of_observations_has_the_values_of_the_network():
    network = make("small-conv", IMAGE)
    parameters = Parameters(network.shapes, CPU)
    parameters.flat.copy_(torch.linspace(-0.2, 0.2, len(parameters.flat)))
    passes = PassesOfAnySize(network, parameters)
    frames = np.random.default_rng(0).integers(0, 2, (4, 2, 3, 10, 9), dtype=np.uint8)
    expected = network.values(parameters.views, torch.from_numpy(frames)).numpy()
    whole = passes(frames)
    assert all(same_bits(passes(frames[row : row + 1])[0], expected[row]) for row in range(4))
    assert same_bits(whole, expected)  # no later call changes it
    parameters.flat.zero_()
    assert not passes(frames).any()  # they read the parameters at every call


@pytest.mark.parametrize(
    ("name", "layout", "products"),
    [
        ("mlp", FLAT, LIBRARY),
        (LayersSpec(dense=(4,), activation="tanh"), FLAT, FIXED_ORDER),
        ("small-conv", FrameLayout((3, 10, 9), 2), FIXED_ORDER),
    ],
)
def test_other_networks_have_no_passes(name, layout, products):
    assert not has_passes(make(name, layout, products))
    assert has_passes(make("mlp", FLAT)) and has_passes(make("small-conv", IMAGE))
