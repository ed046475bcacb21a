"""Recurrent networks: sizes of the papers, torch.nn's values and gradients, resets, bits by row."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from capsule.training.layers.backends import FIXED_ORDER, LIBRARY
from capsule.training.networks.recurrent import Sequences, _lstm, _maximum, make_recurrent_network
from capsule.training.state.frames import FrameLayout
from capsule.training.state.streams import Stream
from tests.training.networks.unrolls import (
    CPU,
    assert_a_sequence_is_its_steps,
    assert_instruction_sets_give_equal_bits,
    assert_rows_get_alone_what_they_get_in_a_batch,
    cut,
    drawn,
    leaves,
    on_device,
    parameters_of,
    same_bits,
)

KINDS = {  # torso: frame stack, shape of a frame, recurrent units
    "nature": (4, (84, 84), 24),
    "small-conv": (1, (4, 10, 10), 21),
    "mlp": (1, (4,), 13),
    "residual": (2, (21, 18), 19),
}
PAPER = {"frame_stack": 4, "layout": FrameLayout((84, 84)), "actions": 18}
FEED_FORWARD = pytest.mark.parametrize("recurrent", [True, False])


def network(name="mlp", recurrent=True, products=FIXED_ORDER, actions=5):
    stack, shape, units = KINDS[name]
    return make_recurrent_network(
        name,
        frame_stack=stack,
        layout=FrameLayout(shape),
        actions=actions,
        recurrent_units=units if recurrent else 0,
        hidden_units=17,
        products=products,
    )


def sequences(net, name, time, batch):
    """Draw sequences without resets."""
    return drawn(net, name, *KINDS[name][:2], time, batch, resets=0.0)


# --- sizes ----------------------------------------------------------------------------------------


def test_the_papers_network_has_its_sizes():
    net = make_recurrent_network(
        "nature", **PAPER, recurrent_units=512, hidden_units=512, products=FIXED_ORDER
    )
    assert net.shapes == {
        "conv1.weight": (32, 4, 8, 8),
        "conv1.bias": (32,),
        "conv2.weight": (64, 32, 4, 4),
        "conv2.bias": (64,),
        "conv3.weight": (64, 64, 3, 3),
        "conv3.bias": (64,),
        "lstm.inputs.weight": (4 * 512, 7 * 7 * 64 + 1 + 18),
        "lstm.recurrent.weight": (4 * 512, 512),
        "lstm.bias": (4 * 512,),
        "advantage1.weight": (512, 512),
        "advantage1.bias": (512,),
        "advantage2.weight": (18, 512),
        "advantage2.bias": (18,),
        "value1.weight": (512, 512),
        "value1.bias": (512,),
        "value2.weight": (1, 512),
        "value2.bias": (1,),
    }
    assert net.state_shape == (2, 512)


def test_the_feed_forward_ablation_has_a_dense_layer_for_the_lstm():
    net = make_recurrent_network(
        "nature", **PAPER, recurrent_units=0, hidden_units=512, products=FIXED_ORDER
    )
    assert net.shapes["memory.weight"] == (512, 7 * 7 * 64 + 1 + 18)
    assert net.state_shape == (0,)
    assert not any(name.startswith("lstm") for name in net.shapes)


def test_the_residual_torso_has_fifteen_convolutions():
    net = make_recurrent_network(
        "residual", **PAPER, recurrent_units=256, hidden_units=256, products=FIXED_ORDER
    )
    convolutions = [shape for shape in net.shapes.values() if len(shape) == 4]
    assert convolutions == [
        (16, 4, 3, 3), *[(16, 16, 3, 3)] * 4,
        (32, 16, 3, 3), *[(32, 32, 3, 3)] * 4,
        (32, 32, 3, 3), *[(32, 32, 3, 3)] * 4,
    ]  # fmt: skip
    assert net.shapes["dense1.weight"] == (256, 11 * 11 * 32)  # 84, 42, 21, 11
    assert net.shapes["lstm.inputs.weight"] == (1024, 256 + 1 + 18)


def test_impalas_network_has_its_1_6_million_parameters():
    """Figure 3, right: 96x72 frames of RGB, an LSTM of 256; the heads are too small to count.

    Missing here is what reads instructions: an LSTM of 64 over embeddings of 20.
    """
    net = make_recurrent_network(
        "residual",
        frame_stack=1,
        layout=FrameLayout((3, 72, 96)),
        actions=9,
        recurrent_units=256,
        hidden_units=1,
        products=FIXED_ORDER,
    )
    size = sum(math.prod(s) for n, s in net.shapes.items() if not n.startswith(("adv", "val")))
    language = 4 * 64 * (20 + 64 + 1) + 4 * 256 * 64  # and its way into the other LSTM
    assert round((size + language) / 1e6, 1) == 1.6


def test_a_flat_observation_passes_one_dense_layer():
    net = network("mlp")
    assert net.shapes["dense1.weight"] == (17, 4)
    assert net.shapes["lstm.inputs.weight"] == (4 * 13, 17 + 1 + 5)


def test_initialization_is_uniform_by_fan_in():
    net = network("nature")
    arrays = parameters_of(net).arrays()
    stream = Stream("initialization", 0)
    for name, shape in net.shapes.items():
        # The bias of the LSTM follows, and is drawn like, the recurrent weights.
        weight = {"lstm.bias": "lstm.recurrent.weight"}.get(name, name.replace("bias", "weight"))
        bound = 1 / math.sqrt(math.prod(net.shapes[weight][1:]))
        uniforms = stream.uniforms(math.prod(shape)).reshape(shape)
        np.testing.assert_allclose(arrays[name], bound * (2 * uniforms - 1), rtol=1e-6, atol=1e-9)


# --- against torch.nn -----------------------------------------------------------------------------


def reference_torso(name, weights, observations):
    """Compute the torso with torch's layers; its padding and pooling as TensorFlow defines SAME."""
    images = observations.flatten(1, -3) if name != "mlp" else observations
    images = images.float() / (1 if name in ("small-conv", "mlp") else 255)

    def convolve(key, hidden, stride=1, padding="valid"):
        weight, bias = weights[f"{key}.weight"], weights[f"{key}.bias"]
        return functional.conv2d(hidden, weight, bias, stride, padding)

    def dense(hidden):
        return functional.linear(hidden, weights["dense1.weight"], weights["dense1.bias"]).relu()

    def flat(hidden):
        return hidden.permute(0, 2, 3, 1).flatten(1)

    if name == "mlp":
        return dense(images.flatten(1))
    if name == "nature":
        for layer, stride in ((1, 4), (2, 2), (3, 1)):
            images = convolve(f"conv{layer}", images, stride).relu()
        return flat(images)
    if name == "small-conv":
        return flat(convolve("conv1", images).relu())
    for section in ("section1", "section2", "section3"):
        images = pooled(convolve(f"{section}.conv", images, padding="same"))
        for block in ("block1", "block2"):
            inner = convolve(f"{section}.{block}.conv1", images.relu(), padding="same").relu()
            images = images + convolve(f"{section}.{block}.conv2", inner, padding="same")
    return dense(flat(images.relu()))


def pooled(images):
    odd = [size % 2 for size in images.shape[2:]]
    padded = functional.pad(images, (odd[1], 1, odd[0], 1), value=-math.inf)
    return functional.max_pool2d(padded, 3, 2)


def reference(net, name, weights, seen):
    observations, actions, rewards, states, _, _ = seen
    time, batch = actions.shape
    features = reference_torso(name, weights, observations.flatten(0, 1))
    one_hot = functional.one_hot(actions + 1, net.actions + 1)[..., 1:].flatten(0, 1)
    inputs = torch.cat((features, rewards.view(-1, 1), one_hot), 1)
    if net.state_shape == (0,):
        hidden = functional.linear(inputs, weights["memory.weight"], weights["memory.bias"]).relu()
    else:
        units = net.state_shape[1]
        lstm = nn.LSTM(inputs.shape[1], units)
        names = ("lstm.inputs.weight", "lstm.recurrent.weight", "lstm.bias")
        values = *(weights[name] for name in names), torch.zeros(4 * units)
        theirs = dict(zip(lstm.state_dict(), values, strict=True))
        start = tuple(part.contiguous() for part in states.transpose(0, 1).unsqueeze(1))
        arguments = inputs.view(time, batch, -1), start
        hidden, after = torch.func.functional_call(lstm, theirs, arguments)
        hidden, states = hidden.flatten(0, 1), torch.cat(after).transpose(0, 1)

    def head(key):
        first, second = (
            (weights[f"{key}{layer}.weight"], weights[f"{key}{layer}.bias"]) for layer in (1, 2)
        )
        return functional.linear(functional.linear(hidden, *first).relu(), *second)

    advantages = head("advantage")
    values = head("value") + advantages - advantages.mean(1, keepdim=True)
    return values.view(time, batch, -1), states


@pytest.mark.slow
@pytest.mark.parametrize("products", [FIXED_ORDER, LIBRARY], ids=["chained", "library"])
@pytest.mark.parametrize("name", KINDS)
@FEED_FORWARD
def test_values_and_gradients_equal_torchs(name, recurrent, products):
    net = network(name, recurrent, products)
    seen = sequences(net, name, 4, 3)
    results = []
    for unroll in (net.unroll, partial(reference, net, name)):
        weights, start = leaves(parameters_of(net)), seen.states.clone().requires_grad_()
        values, after = unroll(weights, seen._replace(states=start))
        factors = torch.randn(values.shape, generator=torch.Generator().manual_seed(1))
        loss = (factors * values).sum() + (after * torch.arange(after.numel()).view_as(after)).sum()
        wanted = [*weights.values(), *([start] if recurrent else [])]
        results.append([values, after, *torch.autograd.grad(loss, wanted)])
    for mine, theirs in zip(*results, strict=True):
        scale = max(1.0, theirs.abs().max().item()) if theirs.numel() else 1.0
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-6 * scale)


@pytest.mark.parametrize("shape", [(9, 8), (8, 9), (1, 2), (21, 84)])
def test_maxima_equal_max_pool2d(shape):
    images = torch.randn(2, 3, *shape, generator=torch.Generator().manual_seed(0))
    ours, theirs = (images.clone().requires_grad_() for _ in range(2))
    found, expected = _maximum(ours), pooled(theirs)
    assert found.shape[2:] == tuple(-(-side // 2) for side in shape)
    assert torch.equal(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("batch", [1, 3])
def test_the_backward_pass_does_not_write_to_the_gradient_that_it_is_given(batch):
    gates = torch.randn(4, batch, 8, requires_grad=True)
    states, resets = torch.randn(batch, 2, 2), torch.zeros(4, batch, dtype=torch.bool)
    _, after = _lstm(gates, torch.randn(8, 2), states, states, resets, FIXED_ORDER)
    given = torch.randn(batch, 2, 2)
    before = given.clone()
    torch.autograd.grad(after, gates, given)
    assert torch.equal(given, before)


def test_a_duel_is_its_formula():
    net = network("mlp")
    weights = dict(parameters_of(net).views)
    seen = sequences(net, "mlp", 2, 3)
    before, _ = net.unroll(weights, seen)
    # A constant added to every advantage is taken away again; added to the value, it is kept.
    weights["advantage2.bias"] = weights["advantage2.bias"] + 3
    torch.testing.assert_close(net.unroll(weights, seen)[0], before)
    weights["value2.bias"] = weights["value2.bias"] + 3
    torch.testing.assert_close(net.unroll(weights, seen)[0], before + 3)
    # With no weights in them, heads are their biases.
    for key in ("advantage2.weight", "value2.weight"):
        weights[key] = torch.zeros_like(weights[key])
    weights["advantage2.bias"] = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0])
    weights["value2.bias"] = torch.tensor([100.0])
    expected = torch.tensor([97.0, 98.0, 99.0, 100.0, 106.0]).expand(2, 3, 5)
    torch.testing.assert_close(net.unroll(weights, seen)[0], expected)


def test_the_previous_action_and_reward_reach_the_lstm():
    net = network("mlp")
    parameters = parameters_of(net).views
    observations, _, rewards, states, resets, _ = sequences(net, "mlp", 1, 6)
    observations, states = observations[:, :1].expand(1, 6, 1, 4), states[:1].expand(6, 2, 13)
    actions = torch.arange(-1, 5).view(1, 6)
    alike = torch.zeros(1, 6)
    values, _ = net.unroll(parameters, Sequences(observations, actions, alike, states, resets))
    assert len({tuple(row.tolist()) for row in values[0]}) == 6
    none = torch.full((1, 6), -1)
    values, _ = net.unroll(parameters, Sequences(observations, none, rewards, states, resets))
    assert len({tuple(row.tolist()) for row in values[0]}) == 6


# --- time and batch -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
@FEED_FORWARD
def test_a_sequence_is_its_steps_bit_for_bit(name, recurrent):
    net = network(name, recurrent)
    assert_a_sequence_is_its_steps(net, sequences(net, name, 6, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@FEED_FORWARD
def test_a_row_alone_gets_what_it_gets_in_a_batch(name, recurrent):
    net = network(name, recurrent)
    seen = sequences(net, name, 2, 19)
    seen.resets[1, ::3] = True
    assert_rows_get_alone_what_they_get_in_a_batch(net, seen, slice(3, 9))


def test_instruction_sets_give_equal_bits():
    net = network("nature")
    assert_instruction_sets_give_equal_bits(net, sequences(net, "nature", 3, 5))


# --- resets ---------------------------------------------------------------------------------------


def test_a_reset_begins_a_second_unroll():
    net = network("mlp")
    parameters = parameters_of(net).views
    seen = sequences(net, "mlp", 7, 4)
    seen.resets[3] = True
    values, after = net.unroll(parameters, seen)
    for times in (slice(0, 3), slice(3, 7)):
        found, end = net.unroll(parameters, cut(seen, times))
        assert same_bits(found, values[times])
    assert same_bits(end, after)


def test_only_the_sequence_that_is_reset_begins_again():
    net = network("mlp")
    parameters = parameters_of(net).views
    seen = sequences(net, "mlp", 5, 3)
    without, _ = net.unroll(parameters, seen)
    seen.resets[2, 1] = True
    values, _ = net.unroll(parameters, seen)
    assert same_bits(values[:, (0, 2)], without[:, (0, 2)])
    assert same_bits(values[:2], without[:2])
    assert (values[2:, 1] != without[2:, 1]).all()


def test_row_0_is_always_reset():
    net = network("mlp")
    parameters = parameters_of(net).views
    seen = sequences(net, "mlp", 3, 2)
    expected, _ = net.unroll(parameters, seen)
    seen.resets[0] = True
    assert same_bits(net.unroll(parameters, seen)[0], expected)


def test_no_gradient_flows_through_a_reset():
    net = network("mlp")
    seen = sequences(net, "mlp", 6, 2)
    seen.resets[4, 0] = True
    rewards, states = seen.previous_rewards.requires_grad_(), seen.states.requires_grad_()
    values, _ = net.unroll(parameters_of(net).views, seen)
    reset, other = values[5, 0].square().sum(), values[5, 1].square().sum()
    through, start = torch.autograd.grad(reset, (rewards, states), retain_graph=True)
    assert (through[4:, 0] != 0).all()
    assert not through[:4].any()
    assert not through[:, 1].any()
    assert start[0].all()
    assert not start[1].any()
    through, _ = torch.autograd.grad(other, (rewards, states))
    assert (through[:, 1] != 0).all()


def test_gradients_with_resets_are_those_of_separate_unrolls():
    net = network("small-conv")
    seen = sequences(net, "small-conv", 6, 3)
    seen.resets[4] = True
    weights = leaves(parameters_of(net))
    values, _ = net.unroll(weights, seen)
    whole = torch.autograd.grad(values.square().sum(), list(weights.values()))
    total = [torch.zeros_like(gradient) for gradient in whole]
    for times in (slice(0, 4), slice(4, 6)):
        found, _ = net.unroll(weights, cut(seen, times))
        parts = torch.autograd.grad(found.square().sum(), list(weights.values()))
        total = [sum_ + gradient for sum_, gradient in zip(total, parts, strict=True)]
    for ours, expected in zip(whole, total, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@FEED_FORWARD
def test_every_parameter_gets_a_gradient(name, recurrent):
    net = network(name, recurrent)
    weights = leaves(parameters_of(net))
    values, _ = net.unroll(weights, sequences(net, name, 3, 4))
    gradients = torch.autograd.grad(values[2].square().sum(), list(weights.values()))
    assert all(gradient.any() for gradient in gradients)


def test_states_alone_may_be_wanted_without_a_gradient_for_them():
    net = network("mlp")
    weights = leaves(parameters_of(net))
    _, after = net.unroll(weights, sequences(net, "mlp", 2, 2))
    gradient = torch.autograd.grad(after.sum(), [weights["lstm.recurrent.weight"]])[0]
    assert gradient.any()


@pytest.mark.gpu
@pytest.mark.usefixtures("no_tf32")
@pytest.mark.parametrize("name", KINDS)
@FEED_FORWARD
def test_a_gpu_comes_close_to_the_cpu(name, recurrent):
    net = network(name, recurrent, LIBRARY)
    seen = sequences(net, name, 5, 3)
    seen.resets[2, 1] = True
    results = []
    for device in (CPU, torch.device("cuda")):
        weights = leaves(parameters_of(net, device=device))
        values, after = net.unroll(weights, on_device(seen, device))
        loss = values.square().sum() + after.sum()
        gradients = torch.autograd.grad(loss, list(weights.values()))
        results.append([part.cpu() for part in (values, after, *gradients)])
    for on_cpu, on_gpu in zip(*results, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-3, atol=1e-3)
