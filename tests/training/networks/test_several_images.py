"""Several images in a frame: each has convolutions of its own, whose features are joined."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from capsule.experiment.contract import PROJECT_VARIABLE
from capsule.experiment.errors import CapsuleError
from capsule.experiment.trainers import ConvolutionSpec, LayersSpec, ModuleSpec
from capsule.training.layers.backends import FIXED_ORDER, LIBRARY
from capsule.training.networks.actor_critic import make_actor_critic_network
from capsule.training.networks.feedforward import make_network, unpacked
from capsule.training.networks.recurrent import make_recurrent_network
from capsule.training.state.frames import FrameLayout
from capsule.training.state.streams import Stream
from tests.training.networks.test_packed_frames import initialized

SHAPES, NUMBERS, STACK, BATCH = ((3, 7, 5), (6, 6)), 2, 2, 5
LAYOUT = FrameLayout(SHAPES[0], NUMBERS, SHAPES[1:])
LAYERS = LayersSpec(
    convolutions=(ConvolutionSpec(filters=4, kernel=3), ConvolutionSpec(filters=5, kernel=2)),
    dense=(6,),
)
TANH = LAYERS.model_copy(update={"activation": "tanh"})
MEMORIES = pytest.mark.parametrize("make", [make_recurrent_network, make_actor_critic_network])
BACKENDS = pytest.mark.parametrize("products", [FIXED_ORDER, LIBRARY], ids=["fixed", "library"])


def common(products=FIXED_ORDER, layout=LAYOUT):
    return {
        "frame_stack": STACK, "layout": layout, "actions": 3, "hidden_units": 7,
        "products": products,
    }  # fmt: skip


@pytest.fixture
def seen():
    """Images and numbers of a batch of stacks, and the packed frames."""
    generator = np.random.default_rng(0)
    images = [
        generator.integers(0, 256, (BATCH, STACK, *shape), dtype=np.uint8) for shape in SHAPES
    ]
    numbers = generator.standard_normal((BATCH, STACK, NUMBERS), dtype=np.float32)
    packed = LAYOUT.pack(images, [numbers])
    return [torch.from_numpy(each) for each in (*images, numbers, packed)]


def activated(torso, hidden):
    return torch.tanh(hidden) if torso is TANH else functional.relu(hidden)


def features_of(torso, views, seen):
    """Compute features with torch's own layers: what stands before the first dense layer."""
    *images, numbers, _ = seen
    features = []
    for number, image in enumerate(images, start=1):
        # Frames are channels, and a grey image has one of them.
        hidden = image.reshape(BATCH, -1, *image.shape[-2:]).float() / 255
        for layer in (1, 2):
            name = f"image{number}.conv{layer}"
            hidden = functional.conv2d(hidden, views[f"{name}.weight"], views[f"{name}.bias"])
            hidden = activated(torso, hidden)
        features.append(hidden.permute(0, 2, 3, 1).flatten(1))
    return torch.cat([*features, numbers.flatten(1)], 1)


def linear(views, name, hidden):
    return functional.linear(hidden, views[f"{name}.weight"], views[f"{name}.bias"])


WIDTH = 5 * (4 * 2) + 5 * (3 * 3) + STACK * NUMBERS


@given(st.data(), st.integers(1, 3), st.integers(1, 2))
def test_what_was_packed_is_unpacked(data, rows, stack):
    shape = st.lists(st.integers(1, 4), min_size=2, max_size=3).map(tuple)
    first, *further = data.draw(st.lists(shape, min_size=1, max_size=3))
    layout = FrameLayout(first, data.draw(st.integers(not further, 3)), tuple(further))
    generator = np.random.default_rng(0)
    images = [
        generator.integers(0, 256, (rows, stack, *each), dtype=np.uint8) for each in layout.images
    ]
    numbers = generator.standard_normal((rows, stack, layout.numbers), dtype=np.float32)
    packed = layout.pack(images, [numbers])
    assert packed.shape == (rows, stack, *layout.packed_shape)
    found, behind = unpacked(layout, torch.from_numpy(packed))
    for one, other in zip(found, images, strict=True):
        np.testing.assert_array_equal(one.numpy(), other)
    if layout.numbers:
        np.testing.assert_array_equal(behind.numpy(), numbers.reshape(rows, -1))
    else:
        assert behind is None


@BACKENDS
@pytest.mark.parametrize("torso", [LAYERS, TANH], ids=["relu", "tanh"])
def test_a_q_network_is_that_of_torchs_own_layers(seen, torso, products):
    network = make_network(torso, **common(products))
    assert network.width == WIDTH
    views = initialized(network.shapes).views
    expected = features_of(torso, views, seen)
    found = network.features(views, seen[-1])
    torch.testing.assert_close(found, expected)
    values = linear(views, "dense2", activated(torso, linear(views, "dense1", expected)))
    torch.testing.assert_close(network.values(views, seen[-1]), values)


@MEMORIES
@BACKENDS
@pytest.mark.parametrize("torso", [LAYERS, TANH], ids=["relu", "tanh"])
def test_the_torso_of_a_memory_is_that_of_torchs_own_layers(seen, make, torso, products):
    network = make(torso, recurrent_units=8, **common(products))
    views = initialized(network.shapes).views
    expected = activated(torso, linear(views, "dense1", features_of(torso, views, seen)))
    torch.testing.assert_close(network.torso.features(views, seen[-1]), expected)


@MEMORIES
def test_gradients_are_those_of_torchs_own_layers(seen, make):
    network = make(LAYERS, recurrent_units=8, **common())
    parameters = initialized(network.shapes)
    gradients = []
    for compute in (
        lambda leaves: network.torso.features(leaves, seen[-1]),
        lambda leaves: linear(leaves, "dense1", features_of(LAYERS, leaves, seen)).relu(),
    ):
        leaves = parameters.leaves()
        (compute(leaves) ** 2).sum().backward()
        gradients.append({name: it.grad for name, it in leaves.items() if it.grad is not None})
    found, expected = gradients
    assert found.keys() == expected.keys()
    assert (
        len(found) == 2 * 2 * 2 + 2
    )  # weights and biases of two layers for each image, and dense1
    for name, gradient in found.items():
        assert gradient.abs().sum() > 0
        torch.testing.assert_close(gradient, expected[name])


@MEMORIES
@BACKENDS
def test_residual_sections_read_each_image(seen, make, products):
    *images, numbers, packed = seen
    network = make("residual", recurrent_units=8, **common(products))
    views = initialized(network.shapes).views
    # Of networks for each image alone, only the dense layer is another one.
    parts = []
    for number, (image, shape) in enumerate(zip(images, SHAPES, strict=True), start=1):
        alone = make("residual", recurrent_units=8, **common(products, FrameLayout(shape)))
        own = {
            name: views[f"image{number}.{name}"]
            for name in alone.torso.shapes
            if name.startswith("section")
        }
        width = alone.shapes["dense1.weight"][1]
        # With this layer the torso returns what comes before it, which is not negative.
        own |= {"dense1.weight": torch.eye(width), "dense1.bias": torch.zeros(width)}
        parts.append(alone.torso.features(own, image))
    expected = linear(views, "dense1", torch.cat([*parts, numbers.flatten(1)], 1)).relu()
    torch.testing.assert_close(network.torso.features(views, packed), expected)


@MEMORIES
@pytest.mark.parametrize("torso", [LAYERS, "residual"])
def test_a_row_depends_on_its_own_frame_alone(seen, make, torso):
    *_, packed = seen
    network = make(torso, recurrent_units=8, **common())
    views = initialized(network.shapes).views
    together = network.torso.features(views, packed)
    for row in range(BATCH):
        assert torch.equal(network.torso.features(views, packed[row : row + 1])[0], together[row])


def test_images_of_one_shape_have_parameters_of_their_own():
    layout = FrameLayout((1, 6, 6), 0, ((1, 6, 6),))
    network = make_network(LAYERS, **common(layout=layout))
    names = [f"image{n}.conv{m}.{of}" for n in (1, 2) for m in (1, 2) for of in ("weight", "bias")]
    assert list(network.shapes)[:8] == names
    views = initialized(network.shapes).views
    assert not torch.equal(views["image1.conv1.weight"], views["image2.conv1.weight"])


def test_one_image_keeps_the_names_of_its_parameters():
    for layout in (FrameLayout((1, 6, 6)), FrameLayout((1, 6, 6), 3)):
        shapes = make_network(LAYERS, **common(layout=layout)).shapes
        assert list(shapes)[:4] == ["conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias"]


@MEMORIES
def test_a_user_module_reads_each_image(seen, make, tmp_path_factory, monkeypatch):
    # Imported modules stay imported, so all tests have the same folder.
    folder = tmp_path_factory.getbasetemp() / "several-images"
    folder.mkdir(exist_ok=True)
    (folder / "capsule_camera_nets.py").write_text(
        "import math\n"
        "from torch import nn\n"
        "def make(shape):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 4), nn.Tanh())\n"
    )
    monkeypatch.setenv(PROJECT_VARIABLE, str(folder))
    *images, numbers, packed = seen
    spec = ModuleSpec(module="capsule_camera_nets:make", dense=(8,))
    network = make(spec, recurrent_units=8, **common(LIBRARY))
    parameters, stream = initialized(network.shapes), Stream("initialization", 1)
    for module in network.torso.modules:
        module.initialize(parameters.views, stream)
    views = parameters.views
    parts = [
        torch.tanh(linear(views, f"image{number}.module.1", image.flatten(1).float()))
        for number, image in enumerate(images, start=1)
    ]
    expected = linear(views, "dense1", torch.cat([*parts, numbers.flatten(1)], 1)).relu()
    torch.testing.assert_close(network.torso.features(views, packed), expected)


def test_an_image_that_is_too_small_is_named():
    layout = FrameLayout((1, 6, 6), 0, ((3, 2, 9),))
    with pytest.raises(CapsuleError, match=r"CAP-T243 trainer\.network\.convolutions\.0: ") as one:
        make_network(LAYERS, **common(layout=layout))
    assert "frames of environment.images.1 of 2x9 are too small" in one.value.message
    with pytest.raises(CapsuleError, match=r"CAP-T243 .*'shallow': frames of environment.images.0"):
        make_network("shallow", **common(layout=layout))
