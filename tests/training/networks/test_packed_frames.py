"""Frames that are an image and numbers: packed, taken apart, and read behind the convolutions."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capsule.experiment.trainers import ConvolutionSpec, LayersSpec
from capsule.training.layers.backends import FIXED_ORDER, LIBRARY
from capsule.training.networks.actor_critic import make_actor_critic_network
from capsule.training.networks.feedforward import Parameters, initialize, make_network, unpacked
from capsule.training.networks.recurrent import make_recurrent_network
from capsule.training.state.frames import FrameLayout
from capsule.training.state.streams import Stream

IMAGE, NUMBERS, STACK, BATCH = (3, 5, 6), 2, 2, 4
PACKED, PLAIN = FrameLayout(IMAGE, NUMBERS), FrameLayout(IMAGE)
LAYERS = LayersSpec(convolutions=(ConvolutionSpec(filters=4, kernel=2),), dense=(6,))
TANH = LAYERS.model_copy(update={"activation": "tanh"})
KINDS = pytest.mark.parametrize("torso", [LAYERS, TANH])
BACKENDS = pytest.mark.parametrize("products", [FIXED_ORDER, LIBRARY], ids=["fixed", "library"])


@pytest.fixture
def seen():
    """Images, numbers, and both packed."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (BATCH, STACK, *IMAGE), dtype=np.uint8)
    numbers = generator.standard_normal((BATCH, STACK, NUMBERS), dtype=np.float32)
    packed = PACKED.pack([images], [numbers])
    return torch.from_numpy(images), torch.from_numpy(numbers), torch.from_numpy(packed)


def initialized(shapes):
    parameters = Parameters(shapes, torch.device("cpu"))
    initialize(parameters, Stream("initialization", 0))
    return parameters


def common(layout, products=FIXED_ORDER):
    return {
        "frame_stack": STACK,
        "layout": layout,
        "actions": 3,
        "hidden_units": 7,
        "products": products,
    }


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
def test_what_was_packed_is_unpacked(side, numbers, rows):
    layout = FrameLayout((side, side + 1), numbers)
    generator = np.random.default_rng(side)
    images = generator.integers(0, 256, (rows, 2, *layout.image), dtype=np.uint8)
    values = generator.standard_normal((rows, 2, numbers)).astype(np.float32)
    packed = layout.pack([images], [values])
    assert packed.shape == (rows, 2, *layout.packed_shape)
    (found,), behind = unpacked(layout, torch.from_numpy(packed))
    np.testing.assert_array_equal(found.numpy(), images)
    np.testing.assert_array_equal(behind.numpy(), values.reshape(rows, 2 * numbers))


def test_other_frames_are_left_as_they_are():
    observations = torch.zeros(2, 1, 4)
    assert unpacked(FrameLayout((4,)), observations) == ((observations,), None)


@KINDS
@BACKENDS
def test_a_q_network_reads_numbers_behind_its_convolutions(seen, torso, products):
    images, numbers, packed = seen
    network = make_network(torso, **common(PACKED, products))
    plain = make_network(torso, **common(PLAIN, products))
    assert network.width == plain.width + STACK * NUMBERS
    parameters = initialized(network.shapes)
    found = network.features(parameters.views, packed)
    expected = plain.features(parameters.views, images)
    assert torch.equal(found[:, : plain.width], expected)
    assert torch.equal(found[:, plain.width :], numbers.flatten(1))
    values = network.values(parameters.views, packed)
    changed = torch.from_numpy(PACKED.pack([images.numpy()], [numbers.numpy() + 1]))
    assert not torch.equal(values, network.values(parameters.views, changed))


@pytest.mark.parametrize("make", [make_recurrent_network, make_actor_critic_network])
@pytest.mark.parametrize("torso", [LAYERS, TANH, "residual"])
@BACKENDS
def test_a_memory_reads_what_the_torso_makes_of_both(seen, make, torso, products):
    images, _, packed = seen
    network = make(torso, recurrent_units=8, **common(PACKED, products))
    plain = make(torso, recurrent_units=8, **common(PLAIN, products))
    wide = network.shapes["dense1.weight"][1]
    behind = STACK * NUMBERS
    assert wide == plain.shapes["dense1.weight"][1] + behind
    parameters = initialized(network.shapes)
    parameters.views["dense1.weight"][:, wide - behind :] = 0
    narrow = Parameters(plain.shapes, torch.device("cpu"))
    for name, view in narrow.views.items():
        taken = parameters.views[name]
        view.copy_(taken[:, : wide - behind] if name == "dense1.weight" else taken)
    found = network.torso.features(parameters.views, packed)
    expected = plain.torso.features(narrow.views, images)
    torch.testing.assert_close(found, expected)
    parameters.views["dense1.weight"][:, wide - behind :] = 1
    shifted = network.torso.features(parameters.views, packed)
    assert not torch.equal(shifted, found)


def test_a_row_depends_on_its_own_frame_alone(seen):
    _, _, packed = seen
    network = make_recurrent_network(LAYERS, recurrent_units=8, **common(PACKED))
    views = initialized(network.shapes).views
    together = network.torso.features(views, packed)
    for row in range(BATCH):
        alone = network.torso.features(views, packed[row : row + 1])
        assert torch.equal(alone[0], together[row])
