"""Sequences for networks that read them, and what any such network must do with them."""

import numpy as np
import torch

from capsule.training.layers import kernels
from capsule.training.networks.feedforward import Parameters, initialize
from capsule.training.networks.recurrent import Sequences
from capsule.training.state.streams import Stream

CPU = torch.device("cpu")


def parameters_of(net, seed=0, device=CPU):
    parameters = Parameters(net.shapes, CPU)
    initialize(parameters, Stream("initialization", seed))
    on_device = Parameters(net.shapes, device)
    on_device.load(parameters.arrays())
    return on_device


def leaves(parameters):
    return {name: view.detach().requires_grad_() for name, view in parameters.views.items()}


def same_bits(ours, expected):
    return np.array_equal(
        ours.detach().numpy().view(np.int32), expected.detach().numpy().view(np.int32)
    )


def drawn(net, name, stack, shape, time, batch, *, resets):
    """Draw sequences for a torso, of whose rows a share of ``resets`` is reset."""
    generator = torch.Generator().manual_seed(0)
    size = (time, batch, stack, *shape)
    if name == "mlp":
        observations = torch.randn(size, generator=generator)
    else:
        top = 2 if name == "small-conv" else 256
        observations = torch.randint(0, top, size, generator=generator, dtype=torch.uint8)
    return Sequences(
        observations,
        torch.randint(-1, net.actions, (time, batch), generator=generator),
        torch.randn(time, batch, generator=generator),
        torch.randn(batch, *net.state_shape, generator=generator) / 2,
        torch.rand(time, batch, generator=generator) < resets,
    )


def cut(seen, times=slice(None), rows=slice(None), states=None):
    """Return some times and rows of sequences, from their states on or from others."""
    states = seen.states if states is None else states
    parts = (None if each is None else each[times, rows] for each in seen._replace(states=None))
    return Sequences(*parts)._replace(states=states[rows])


def on_device(seen, device):
    return Sequences(*(None if each is None else each.to(device) for each in seen))


def assert_a_sequence_is_its_steps(net, seen):
    parameters, states = parameters_of(net).views, seen.states
    *whole, after = net.unroll(parameters, seen)
    for time in range(len(seen.resets)):
        one = cut(seen, slice(time, time + 1), states=states)
        *found, states = net.unroll(parameters, one)
        assert all(same_bits(ours[0], all_[time]) for ours, all_ in zip(found, whole, strict=True))
    assert same_bits(states, after)


def assert_rows_get_alone_what_they_get_in_a_batch(net, seen, *more):
    """Check every row, and ``more`` slices."""
    parameters = parameters_of(net).views
    *whole, after = net.unroll(parameters, seen)
    for rows in (*(slice(row, row + 1) for row in range(len(seen.states))), *more):
        *found, state = net.unroll(parameters, cut(seen, rows=rows))
        for ours, all_ in zip(found, whole, strict=True):
            assert same_bits(ours.contiguous(), all_[:, rows].contiguous())
        assert same_bits(state, after[rows])


def assert_instruction_sets_give_equal_bits(net, seen):
    results = {}
    for name in ("AVX2", "AVX-512"):
        if kernels.limit_instruction_set(name) == name:
            weights = leaves(parameters_of(net))
            first, *others = net.unroll(weights, seen)
            loss = first.square().sum() + sum(each.sum() for each in others[:-1])
            gradients = torch.autograd.grad(loss, list(weights.values()))
            parts = (gradient.contiguous() for gradient in gradients)
            results[name] = [first, *others, *parts]
    kernels.limit_instruction_set("AVX-512")
    first, *others = results.values()
    for other in others:
        assert all(same_bits(a, b) for a, b in zip(first, other, strict=True))
