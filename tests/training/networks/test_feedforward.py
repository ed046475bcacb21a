"""Networks: sizes from the papers, values against torch.nn, initialization against its formula."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import truncnorm
from torch import nn

from capsule.experiment.errors import CapsuleError
from capsule.experiment.trainers import ConvolutionSpec, LayersSpec
from capsule.training.layers.backends import FIXED_ORDER, LIBRARY
from capsule.training.networks.feedforward import Parameters, flatten, initialize, make_network
from capsule.training.state.frames import FrameLayout
from capsule.training.state.streams import Stream

CPU = torch.device("cpu")


def nature(actions=4, hidden=512, products=FIXED_ORDER):
    return make_network(
        "nature",
        frame_stack=4,
        layout=FrameLayout((84, 84)),
        actions=actions,
        hidden_units=hidden,
        products=products,
    )


def initialized(network, seed=0, **distribution):
    parameters = Parameters(network.shapes, CPU)
    initialize(parameters, Stream("initialization", seed), **distribution)
    return parameters


def test_nature_has_the_papers_sizes():
    network = nature(actions=18)
    assert network.shapes == {
        "conv1.weight": (32, 4, 8, 8),
        "conv1.bias": (32,),
        "conv2.weight": (64, 32, 4, 4),
        "conv2.bias": (64,),
        "conv3.weight": (64, 64, 3, 3),
        "conv3.bias": (64,),
        "dense1.weight": (512, 7 * 7 * 64),
        "dense1.bias": (512,),
        "dense2.weight": (18, 512),
        "dense2.bias": (18,),
    }
    assert network.strides == (4, 2, 1)


def test_shallow_has_the_sizes_of_mnih_et_al_2013():
    network = make_network(
        "shallow",
        frame_stack=4,
        layout=FrameLayout((84, 84)),
        actions=4,
        hidden_units=256,
        products=FIXED_ORDER,
    )
    assert network.shapes == {
        "conv1.weight": (16, 4, 8, 8),
        "conv1.bias": (16,),
        "conv2.weight": (32, 16, 4, 4),
        "conv2.bias": (32,),
        "dense1.weight": (256, 9 * 9 * 32),
        "dense1.bias": (256,),
        "dense2.weight": (4, 256),
        "dense2.bias": (4,),
    }
    assert (network.strides, network.scale) == ((4, 2), 1 / 255)


@pytest.mark.parametrize(
    ("name", "fits"), [("nature", (36, 36)), ("shallow", (20, 20)), ("small-conv", (3, 3))]
)
def test_frames_that_are_too_small_for_the_convolutions_are_refused(name, fits):
    common = {"frame_stack": 1, "actions": 2, "hidden_units": 4, "products": FIXED_ORDER}
    network = make_network(name, layout=FrameLayout((3, *fits)), **common)
    last = f"conv{len(network.strides)}.weight"
    assert network.shapes["dense1.weight"][1] == network.shapes[last][0]  # a single place is left
    for shape in ((fits[0] - 1, fits[1]), (fits[0], fits[1] - 1)):
        with pytest.raises(CapsuleError, match=f"{shape[0]}x{shape[1]} are too small") as refusal:
            make_network(name, layout=FrameLayout((3, *shape)), **common)
        assert refusal.value.code == "CAP-T243"


def test_small_networks_have_their_sizes():
    conv = make_network(
        "small-conv",
        frame_stack=1,
        layout=FrameLayout((7, 10, 10)),
        actions=6,
        hidden_units=128,
        products=FIXED_ORDER,
    )
    assert conv.shapes["conv1.weight"] == (16, 7, 3, 3)
    assert conv.shapes["dense1.weight"] == (128, 8 * 8 * 16)
    mlp = make_network(
        "mlp",
        frame_stack=1,
        layout=FrameLayout((4,)),
        actions=2,
        hidden_units=64,
        products=FIXED_ORDER,
    )
    shapes = [mlp.shapes[f"dense{layer}.weight"] for layer in (1, 2, 3)]
    assert shapes == [(64, 4), (64, 64), (2, 64)]


def test_nature_values_equal_torchs_layers():
    network = nature()
    parameters = initialized(network)
    views = {name: view.clone() for name, view in parameters.views.items()}
    # torch flattens channel first; ours row, column, channel.
    first = views["dense1.weight"].view(512, 7, 7, 64).permute(0, 3, 1, 2).reshape(512, -1)
    reference = nn.Sequential(
        nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
        nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
        nn.Linear(512, 4),
    )  # fmt: skip
    with torch.no_grad():
        for parameter, value in zip(reference.parameters(), views.values(), strict=True):
            parameter.copy_(first if value.shape == first.shape else value)
    frames = np.random.default_rng(0).integers(0, 256, (5, 4, 84, 84), dtype=np.uint8)
    ours = network.values(parameters.views, torch.from_numpy(frames))
    with torch.no_grad():
        theirs = reference(torch.from_numpy(frames).float() / 255)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_mlp_values_equal_torchs_layers():
    network = make_network(
        "mlp",
        frame_stack=1,
        layout=FrameLayout((4,)),
        actions=2,
        hidden_units=8,
        products=FIXED_ORDER,
    )
    parameters = initialized(network)
    reference = nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)
    )
    with torch.no_grad():
        for parameter, value in zip(reference.parameters(), parameters.views.values(), strict=True):
            parameter.copy_(value)
        states = torch.randn(6, 1, 4, generator=torch.Generator().manual_seed(0))
        expected = reference(states.flatten(1))
    torch.testing.assert_close(network.values(parameters.views, states), expected)


def test_inputs_are_scaled_and_channels_last():
    frames = torch.arange(2 * 4 * 84 * 84, dtype=torch.int64).remainder(256).to(torch.uint8)
    frames = frames.view(2, 4, 84, 84)
    inputs = nature().prepare(frames)
    assert inputs.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(inputs, frames.float() / 255)


def test_frame_stacks_may_share_their_frames():
    frames = torch.randint(0, 256, (9, 2, 84, 84), dtype=torch.uint8)
    shared = frames.unfold(0, 4, 1).permute(0, 1, 4, 2, 3).flatten(0, 1)
    assert shared.data_ptr() == frames.data_ptr()
    turned = shared.transpose(2, 3)
    network = nature()
    assert torch.equal(network.prepare(shared), network.prepare(shared.contiguous()))
    assert torch.equal(network.prepare(turned), network.prepare(turned.contiguous()))


def test_a_batch_of_minatar_frames_keeps_its_channels():
    network = make_network(
        "small-conv",
        frame_stack=1,
        layout=FrameLayout((4, 10, 10)),
        actions=6,
        hidden_units=16,
        products=FIXED_ORDER,
    )
    frames = (torch.rand(3, 1, 4, 10, 10) < 0.5).to(torch.uint8)
    assert torch.equal(network.prepare(frames), frames.squeeze(1).float())


def test_initialization_follows_its_formula_and_its_stream():
    network = nature(hidden=32)
    parameters = initialized(network, seed=5)
    stream = Stream("initialization", 5)
    for name, fan_in in (("conv1.weight", 4 * 8 * 8), ("conv1.bias", 4 * 8 * 8)):
        array = parameters.arrays()[name]
        uniforms = stream.uniforms(array.size).reshape(array.shape)
        bound = 1 / np.sqrt(fan_in)
        np.testing.assert_allclose(array, -bound + 2 * bound * uniforms, rtol=1e-5, atol=1e-8)
    dense = parameters.arrays()["dense1.weight"]
    assert np.abs(dense).max() <= 1 / 56  # fan-in 3136 = 56^2
    assert dense.std() == pytest.approx(1 / 56 / np.sqrt(3), rel=0.01)
    assert not torch.equal(parameters.flat, initialized(network, seed=6).flat)


def test_torchs_generator_is_never_used():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    initialized(nature(hidden=8))
    assert torch.equal(torch.get_rng_state(), before)


def test_views_and_segments_are_one_buffer():
    parameters = initialized(nature(hidden=8))
    views = list(parameters.views.values())
    for view, segment in zip(views, parameters.segments, strict=True):
        assert torch.equal(flatten(view), segment)
        assert flatten(view).data_ptr() == segment.data_ptr()
    parameters.flat.zero_()
    assert not any(view.any() for view in views)


def test_arrays_and_load_are_inverse():
    parameters = initialized(nature(hidden=8))
    copy = parameters.zeros_like()
    copy.load(parameters.arrays())
    assert torch.equal(copy.flat, parameters.flat)
    assert all(array.flags.c_contiguous for array in parameters.arrays().values())


@pytest.mark.gpu
@pytest.mark.usefixtures("no_tf32")
def test_gpu_values_are_close_to_the_cpus():
    network = nature(products=LIBRARY)
    parameters = initialized(network)
    on_gpu = Parameters(network.shapes, torch.device("cuda"))
    on_gpu.load(parameters.arrays())
    frames = torch.randint(0, 256, (8, 4, 84, 84), dtype=torch.uint8)
    expected = network.values(parameters.views, frames)
    found = network.values(on_gpu.views, frames.cuda())
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-4)


OWN = LayersSpec(
    convolutions=(
        ConvolutionSpec(filters=6, kernel=3, stride=2),
        ConvolutionSpec(filters=5, kernel=2),
    ),
    dense=(7, 4),
    activation="tanh",
)


def own(layers, frame_shape=(3, 9, 8), products=FIXED_ORDER):
    return make_network(
        layers,
        frame_stack=1,
        layout=FrameLayout(frame_shape),
        actions=2,
        hidden_units=99,
        products=products,
    )


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("products", [FIXED_ORDER, LIBRARY], ids=["fixed order", "library"])
def test_declared_layers_equal_torchs(activation, products):
    network = own(OWN.model_copy(update={"activation": activation}), products=products)
    parameters = initialized(network)
    leaves = parameters.leaves()
    act = {"relu": nn.ReLU, "tanh": nn.Tanh}[activation]
    reference = nn.Sequential(
        nn.Conv2d(3, 6, 3, 2), act(), nn.Conv2d(6, 5, 2), act(), nn.Flatten(),
        nn.Linear(3 * 2 * 5, 7), act(), nn.Linear(7, 4), act(), nn.Linear(4, 2),
    )  # fmt: skip

    def in_torchs_order(name, values):
        if name == "dense1.weight":
            return values.reshape(7, 3, 2, 5).permute(0, 3, 1, 2).reshape(7, -1)
        return values

    theirs = dict(zip(parameters.views, reference.parameters(), strict=True))
    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.copy_(in_torchs_order(name, parameters.views[name]))
    frames = np.random.default_rng(0).integers(0, 256, (5, 1, 3, 9, 8), dtype=np.uint8)
    values = network.values(leaves, torch.from_numpy(frames))
    expected = reference(torch.from_numpy(frames[:, 0]).float() / 255)
    torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-5)
    weights = torch.linspace(-1, 1, 10).view(5, 2)
    (values * weights).sum().backward()
    (expected * weights).sum().backward()
    for name, parameter in theirs.items():
        found = in_torchs_order(name, leaves[name].grad)
        torch.testing.assert_close(found, parameter.grad, rtol=1e-3, atol=1e-5)


def test_a_named_network_is_that_of_its_layers():
    layers = LayersSpec(
        convolutions=tuple(
            ConvolutionSpec(filters=filters, kernel=kernel, stride=stride)
            for filters, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1))
        ),
        dense=(512,),
    )
    common = {"frame_stack": 4, "layout": FrameLayout((84, 84)), "actions": 4, "hidden_units": 512}
    assert make_network(layers, **common, products=FIXED_ORDER) == nature()
    flat = {**common, "layout": FrameLayout((6,)), "frame_stack": 1}
    assert make_network(LayersSpec(dense=(512, 512)), **flat, products=FIXED_ORDER) == make_network(
        "mlp", **flat, products=FIXED_ORDER
    )


def test_no_hidden_layer_at_all():
    network = own(LayersSpec(), frame_shape=(4,))
    assert network.shapes == {"dense1.weight": (2, 4), "dense1.bias": (2,)}


def test_a_declared_convolution_that_does_not_fit_is_named():
    with pytest.raises(CapsuleError) as refused:
        own(OWN, frame_shape=(3, 4, 4))
    assert refused.value.code == "CAP-T243"
    assert "trainer.network.convolutions.1: frames of 4x4" in refused.value.message
    assert "gets 1x1, and its kernel has 2x2" in refused.value.message


def test_numbers_of_images_are_divided_unless_they_are_to_stay():
    assert (own(OWN).scale, own(OWN.model_copy(update={"scaled": False})).scale) == (1 / 255, 1.0)


@given(st.lists(st.floats(-200, 200, width=32), min_size=1, max_size=40))
def test_a_tanh_does_not_depend_on_its_neighbours(numbers):
    whole = torch.tensor(numbers)
    together = FIXED_ORDER.tanh(whole)
    alone = torch.cat([FIXED_ORDER.tanh(whole[at : at + 1]) for at in range(len(numbers))])
    assert together.numpy().tobytes() == alone.numpy().tobytes()
    torch.testing.assert_close(together.double(), whole.double().tanh(), rtol=0, atol=2e-7)


def test_the_truncated_normal_is_scipys_by_inversion():
    network = nature(hidden=8)
    parameters = initialized(network, seed=3, distribution="truncated-normal")
    stream = Stream("initialization", 3)
    for name, array in parameters.arrays().items():
        if name.endswith("bias"):
            assert not array.any()
            continue
        uniforms = stream.uniforms(array.size).reshape(array.shape)
        scale = 1 / np.sqrt(np.prod(array.shape[1:]))
        expected = truncnorm.ppf(uniforms, -2, 2, scale=scale)
        np.testing.assert_allclose(array, expected, rtol=1e-6, atol=1e-12)
        assert np.abs(array).max() <= 2 * scale
