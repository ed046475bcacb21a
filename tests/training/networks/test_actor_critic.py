"""Actor-critic networks: sizes of the paper, torch.nn's values and gradients, episodes, bits."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from capsule.training.layers.backends import FIXED_ORDER, LIBRARY
from capsule.training.networks.actor_critic import make_actor_critic_network
from capsule.training.networks.recurrent import Sequences
from capsule.training.state.frames import FrameLayout
from tests.training.networks.test_language import reference as reference_language
from tests.training.networks.test_recurrent import reference_torso
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
    "shallow": (4, (44, 36), 24),
    "nature": (2, (44, 52), 11),
    "residual": (2, (21, 18), 19),
    "small-conv": (1, (4, 10, 10), 21),
    "mlp": (1, (4,), 13),
}
LSTM = pytest.mark.parametrize("recurrent", [True, False])
EACH = pytest.mark.parametrize("name", KINDS)


def network(name="mlp", recurrent=True, products=FIXED_ORDER, actions=5, **language):
    stack, shape, units = KINDS[name]
    return make_actor_critic_network(
        name,
        frame_stack=stack,
        layout=FrameLayout(shape),
        actions=actions,
        recurrent_units=units if recurrent else 0,
        hidden_units=17,
        products=products,
        **language,
    )


def sequences(net, name, time, batch, resets=0.2):
    """Draw sequences, and some beginnings of episodes."""
    return drawn(net, name, *KINDS[name][:2], time, batch, resets=resets)


# --- sizes ----------------------------------------------------------------------------------------


def paper(name, **changes):
    arguments = {
        "frame_stack": 1, "layout": FrameLayout((3, 72, 96)), "actions": 9,
        "recurrent_units": 256, "hidden_units": 256, "products": FIXED_ORDER,
    }  # fmt: skip
    return make_actor_critic_network(name, **arguments | changes)


def size_of(net):
    return sum(math.prod(shape) for shape in net.shapes.values())


def test_the_shallow_network_of_atari():
    """Table G.1: 84x84, four frames, grey, feed-forward, the full action set."""
    atari = {"frame_stack": 4, "layout": FrameLayout((84, 84)), "actions": 18, "recurrent_units": 0}
    net = paper("shallow", **atari)
    assert net.shapes == {
        "conv1.weight": (16, 4, 8, 8),
        "conv1.bias": (16,),
        "conv2.weight": (32, 16, 4, 4),
        "conv2.bias": (32,),
        "dense1.weight": (256, 9 * 9 * 32),  # 84, 20, 9
        "dense1.bias": (256,),
        "policy.weight": (18, 256),
        "policy.bias": (18,),
        "baseline.weight": (1, 256),
        "baseline.bias": (1,),
    }
    assert net.state_shape == (0,)


def test_nature_has_three_convolutions():
    """Section 5.3.2: the shallow network of Atari "features three convolutional layers"."""
    atari = {"frame_stack": 4, "layout": FrameLayout((84, 84)), "actions": 6, "recurrent_units": 0}
    net = paper("nature", **atari | {"hidden_units": 512})
    convolutions = [shape for shape in net.shapes.values() if len(shape) == 4]
    assert convolutions == [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3)]
    assert net.shapes["dense1.weight"] == (512, 7 * 7 * 64)  # 84, 20, 9, 7
    assert net.shapes["policy.weight"] == (6, 512)


def test_an_lstm_stands_before_the_heads():
    net = paper("shallow")
    assert net.shapes["lstm.inputs.weight"] == (1024, 256 + 1 + 9)
    assert net.shapes["lstm.recurrent.weight"] == (1024, 256)
    assert net.shapes["lstm.bias"] == (1024,)
    assert net.shapes["policy.weight"] == (9, 256)
    assert net.shapes["baseline.weight"] == (1, 256)
    assert net.state_shape == (2, 256)


def test_the_paper_counts_1_2_and_1_6_million_parameters():
    """Figure 3, with what reads instructions; the number of words it leaves open."""
    language = {"vocabulary": 1000, "words": 20}
    shallow, residual = (size_of(paper(name, **language)) for name in ("shallow", "residual"))
    few = {"vocabulary": 1, "words": 20}
    assert size_of(paper("shallow", **few)) - size_of(paper("shallow")) == (
        20 + 4 * 64 * (20 + 64 + 1) + 4 * 256 * 64  # and its way into the other LSTM
    )
    assert (round(shallow / 1e6, 1), round(residual / 1e6, 1)) == (1.2, 1.6)
    # With padding, 18x24 and 9x12 would be left of 72x96, where now 17x23 and 7x10 are.
    padded = shallow + 256 * 32 * (9 * 12 - 7 * 10)
    assert round(padded / 1e6, 1) == 1.5


def test_the_residual_network_has_fifteen_convolutions():
    convolutions = [shape for shape in paper("residual").shapes.values() if len(shape) == 4]
    assert len(convolutions) == 15
    assert paper("residual", hidden_units=7).shapes == paper("residual").shapes


def test_small_tasks_have_a_dense_layer_too():
    assert network("small-conv").shapes["dense1.weight"] == (17, 8 * 8 * 16)
    assert network("mlp").shapes["dense1.weight"] == (17, 4)


# --- against torch.nn -----------------------------------------------------------------------------


def features_of(name, weights, observations):
    """Compute the torso with torch's layers."""
    if name in ("mlp", "residual"):
        return reference_torso(name, weights, observations)
    if name == "small-conv":
        flat = reference_torso(name, weights, observations)
    else:
        images = observations.flatten(1, -3).float() / 255
        for layer, stride in enumerate((4, 2, 1)[: 3 if name == "nature" else 2], start=1):
            weight, bias = weights[f"conv{layer}.weight"], weights[f"conv{layer}.bias"]
            images = functional.conv2d(images, weight, bias, stride).relu()
        flat = images.permute(0, 2, 3, 1).flatten(1)
    return functional.linear(flat, weights["dense1.weight"], weights["dense1.bias"]).relu()


def reference(net, name, weights, seen):
    observations, actions, rewards, states, resets, instructions = seen
    time, batch = actions.shape
    features = features_of(name, weights, observations.flatten(0, 1))
    if instructions is not None:
        told = reference_language(weights, instructions.flatten(0, 1))
        features = torch.cat((features, told), 1)
    hidden = features.view(time, batch, -1)
    if net.state_shape != (0,):
        one_hot = functional.one_hot(actions + 1, net.actions + 1)[..., 1:]
        hidden = torch.cat((hidden, rewards.unsqueeze(2), one_hot), 2)
        cell = nn.LSTMCell(hidden.shape[2], net.state_shape[1])
        names = "lstm.inputs.weight", "lstm.recurrent.weight", "lstm.bias"
        values = *(weights[key] for key in names), torch.zeros(4 * net.state_shape[1])
        theirs = dict(zip(cell.state_dict(), values, strict=True))
        rows, state = [], (states[:, 0], states[:, 1])
        for row in range(time):
            goes_on = (~resets[row]).float().unsqueeze(1)
            state = torch.func.functional_call(
                cell, theirs, (hidden[row], tuple(part * goes_on for part in state))
            )
            rows.append(state[0])
        hidden, states = torch.stack(rows), torch.stack(state, 1)
    logits, baselines = (
        functional.linear(hidden, weights[f"{head}.weight"], weights[f"{head}.bias"])
        for head in ("policy", "baseline")
    )
    return logits, baselines.squeeze(2), states


@pytest.mark.slow
@pytest.mark.parametrize("products", [FIXED_ORDER, LIBRARY], ids=["chained", "library"])
@EACH
@LSTM
def test_results_and_gradients_equal_torchs(name, recurrent, products):
    net = network(name, recurrent, products)
    seen = sequences(net, name, 5, 3)
    seen.resets[0, 1], seen.resets[3, 2] = True, True
    results = []
    for unroll in (net.unroll, partial(reference, net, name)):
        weights, start = leaves(parameters_of(net)), seen.states.clone().requires_grad_()
        found = unroll(weights, seen._replace(states=start))
        generator = torch.Generator().manual_seed(1)
        loss = sum((torch.randn(part.shape, generator=generator) * part).sum() for part in found)
        wanted = [*weights.values(), *([start] if recurrent else [])]
        results.append([*found, *torch.autograd.grad(loss, wanted)])
    assert results[0][0].shape == (5, 3, 5)
    assert results[0][1].shape == (5, 3)
    for mine, theirs in zip(*results, strict=True):
        scale = max(1.0, theirs.abs().max().item()) if theirs.numel() else 1.0
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-6 * scale)


@LSTM
def test_only_an_lstm_reads_the_previous_action_and_reward(recurrent):
    net = network("mlp", recurrent)
    parameters = parameters_of(net).views
    observations, _, rewards, states, _, _ = sequences(net, "mlp", 1, 6)
    observations, states = observations[:, :1].expand(1, 6, 1, 4), states[:1].expand_as(states)
    none, actions = torch.full((1, 6), -1), torch.arange(-1, 5).view(1, 6)
    resets = torch.zeros(1, 6, dtype=torch.bool)
    for inputs in ((actions, torch.zeros(1, 6)), (none, rewards)):
        logits, baselines, _ = net.unroll(
            parameters, Sequences(observations, *inputs, states, resets)
        )
        different = 6 if recurrent else 1
        assert len({tuple(row.tolist()) for row in logits[0]}) == different
        assert len(set(baselines[0].tolist())) == different


# --- language -------------------------------------------------------------------------------------

LANGUAGE = {"vocabulary": 32, "words": 6}


def instructed(net, time, batch):
    """Draw sequences, of which every second row has another instruction, some none."""
    generator = torch.Generator().manual_seed(7)
    instructions = torch.randint(0, 32, (time, batch, 6), generator=generator)
    lengths = torch.randint(0, 7, (time, batch, 1), generator=generator)
    instructions[torch.arange(6) >= lengths] = -1
    instructions[1::2] = instructions[0 : time - 1 : 2]
    return sequences(net, "mlp", time, batch)._replace(instructions=instructions)


@LSTM
def test_the_features_of_instructions_follow_those_of_the_torso(recurrent):
    plain, net = network("mlp", recurrent), network("mlp", recurrent, **LANGUAGE)
    added = {name: shape for name, shape in net.shapes.items() if name not in plain.shapes}
    assert net.language is not None
    assert added == net.language.shapes
    reader = "lstm.inputs.weight" if recurrent else "policy.weight"
    assert net.shapes[reader][1] == plain.shapes[reader][1] + 64
    assert (plain.language, plain.words, net.words) == (None, 0, 6)


@pytest.mark.slow
@pytest.mark.parametrize("products", [FIXED_ORDER, LIBRARY], ids=["chained", "library"])
@LSTM
def test_results_and_gradients_with_instructions_equal_torchs(recurrent, products):
    net = network("mlp", recurrent, products, **LANGUAGE)
    seen, results = instructed(net, 5, 3), []
    for unroll in (net.unroll, partial(reference, net, "mlp")):
        weights = leaves(parameters_of(net))
        found = unroll(weights, seen)
        generator = torch.Generator().manual_seed(1)
        loss = sum((torch.randn(part.shape, generator=generator) * part).sum() for part in found)
        results.append([*found, *torch.autograd.grad(loss, list(weights.values()))])
    for mine, theirs in zip(*results, strict=True):
        scale = max(1.0, theirs.abs().max().item()) if theirs.numel() else 1.0
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-6 * scale)


@LSTM
def test_steps_and_rows_with_instructions_get_the_bits_of_the_whole(recurrent):
    net = network("mlp", recurrent, **LANGUAGE)
    seen = instructed(net, 4, 7)
    assert_a_sequence_is_its_steps(net, seen)
    assert_rows_get_alone_what_they_get_in_a_batch(net, seen)


@LSTM
def test_instructions_reach_both_heads_and_every_parameter_of_theirs_learns(recurrent):
    net = network("mlp", recurrent, **LANGUAGE)
    weights = leaves(parameters_of(net))
    inputs = [each[:, :1].expand(1, 4, *each.shape[2:]) for each in sequences(net, "mlp", 1, 4)[:3]]
    states, resets = torch.zeros(4, *net.state_shape), torch.zeros(1, 4, dtype=torch.bool)
    none = -torch.ones(1, 4, 6, dtype=torch.int64)
    told = none.clone()
    told[0, :, 0] = torch.tensor([3, 5, 5, -1])
    told[0, :, 1] = torch.tensor([-1, -1, 3, -1])
    logits, baselines, _ = net.unroll(weights, Sequences(*inputs, states, resets, told))
    assert len({tuple(row.tolist()) for row in logits[0]}) == 4
    assert len(set(baselines[0].tolist())) == 4
    silent, _, _ = net.unroll(weights, Sequences(*inputs, states, resets, none))
    assert same_bits(silent[0, 3], logits[0, 3])
    for head in (logits, baselines):
        loss = head.square().sum()
        names = [name for name in net.shapes if name.startswith("language.")]
        wanted = [weights[name] for name in names]
        assert all(each.any() for each in torch.autograd.grad(loss, wanted, retain_graph=True))


def test_instructions_go_with_a_network_that_reads_them():
    for language, given in ((LANGUAGE, False), ({}, True)):
        net = network("mlp", **language)
        seen = instructed(net, 2, 3) if given else sequences(net, "mlp", 2, 3)
        with pytest.raises(ValueError, match="vocabulary"):
            net.unroll(parameters_of(net).views, seen)


# --- time and batch -------------------------------------------------------------------------------


@EACH
@LSTM
def test_a_sequence_is_its_steps_bit_for_bit(name, recurrent):
    net = network(name, recurrent)
    seen = sequences(net, name, 6, 3)
    assert seen.resets.any()
    assert_a_sequence_is_its_steps(net, seen)


@pytest.mark.slow
@EACH
@LSTM
def test_a_row_alone_gets_what_it_gets_in_a_batch(name, recurrent):
    net = network(name, recurrent)
    seen = sequences(net, name, 2, 19)
    assert_rows_get_alone_what_they_get_in_a_batch(net, seen, slice(3, 9))


def test_instruction_sets_give_equal_bits():
    net = network("shallow")
    assert_instruction_sets_give_equal_bits(net, sequences(net, "shallow", 3, 5))


# --- episodes -------------------------------------------------------------------------------------


def test_an_episode_begins_with_a_state_of_zero():
    net = network("mlp")
    parameters = parameters_of(net).views
    seen = sequences(net, "mlp", 7, 4, resets=0.0)
    without = net.unroll(parameters, seen)
    seen.resets[3, 1] = True
    found = net.unroll(parameters, seen)
    for ours, theirs in zip(found[:2], without[:2], strict=True):
        assert same_bits(ours[:, (0, 2, 3)], theirs[:, (0, 2, 3)])
        assert same_bits(ours[:3], theirs[:3])
        assert (ours[3:, 1] != theirs[3:, 1]).all()
    seen.resets[3, 1] = False
    rest = cut(seen, slice(3, None), states=torch.zeros_like(seen.states))
    alone = net.unroll(parameters, rest)
    for ours, theirs in zip(found[:2], alone[:2], strict=True):
        assert same_bits(ours[3:, 1].contiguous(), theirs[:, 1].contiguous())
    assert same_bits(found[2][1], alone[2][1])


def test_row_0_goes_on_from_the_state_unless_an_episode_begins():
    net = network("mlp")
    parameters = parameters_of(net).views
    seen = sequences(net, "mlp", 2, 3, resets=0.0)
    going_on = net.unroll(parameters, seen)[0]
    seen.resets[0, 2] = True
    found = net.unroll(parameters, seen)[0]
    seen.resets[0, 2], seen.states[2] = False, 0
    expected = net.unroll(parameters, seen)[0]
    assert same_bits(found, expected)
    assert same_bits(found[:, :2], going_on[:, :2])
    assert (found[:, 2] != going_on[:, 2]).all()


def test_no_gradient_flows_from_one_episode_to_the_one_before():
    net = network("mlp")
    seen = sequences(net, "mlp", 6, 2, resets=0.0)
    seen.resets[4, 0] = True
    rewards, states = seen.previous_rewards.requires_grad_(), seen.states.requires_grad_()
    logits, baselines, _ = net.unroll(parameters_of(net).views, seen)
    for head in (logits, baselines):
        begun, other = head[5, 0].square().sum(), head[5, 1].square().sum()
        through, start = torch.autograd.grad(begun, (rewards, states), retain_graph=True)
        assert (through[4:, 0] != 0).all()
        assert not through[:4].any()
        assert not start.any()
        through, start = torch.autograd.grad(other, (rewards, states), retain_graph=True)
        assert (through[:, 1] != 0).all()
        assert (start[1] != 0).all()


@pytest.mark.slow
@EACH
@LSTM
def test_every_parameter_gets_a_gradient(name, recurrent):
    net = network(name, recurrent)
    weights = leaves(parameters_of(net))
    seen = sequences(net, name, 3, 4, resets=0.0)
    logits, baselines, _ = net.unroll(weights, seen)
    loss = logits[2].square().sum() + baselines[2].square().sum()
    gradients = torch.autograd.grad(loss, list(weights.values()))
    assert all(gradient.any() for gradient in gradients)


@pytest.mark.gpu
@pytest.mark.usefixtures("no_tf32")
@EACH
@LSTM
def test_a_gpu_comes_close_to_the_cpu(name, recurrent):
    net = network(name, recurrent, LIBRARY)
    seen = sequences(net, name, 5, 3)
    results = []
    for device in (CPU, torch.device("cuda")):
        weights = leaves(parameters_of(net, device=device))
        found = net.unroll(weights, on_device(seen, device))
        loss = sum(part.square().sum() for part in found)
        gradients = torch.autograd.grad(loss, list(weights.values()))
        results.append([part.cpu() for part in (*found, *gradients)])
    for on_cpu, on_gpu in zip(*results, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-3, atol=1e-3)
