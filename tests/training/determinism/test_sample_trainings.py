"""The sample trainings: each against a reference in float64 of torch's layers and autograd."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional

from capsule.training.determinism import self_test
from capsule.training.determinism.operator_sweep import fill, labels, positive, real
from capsule.training.determinism.sample_trainings import (
    UPDATES,
    convolutional,
    recurrent,
    residual,
    trainings,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(modules, loss_of, update):
    """Return the losses and parameters of a training in float64; ``update`` changes the latter."""
    for module in modules:
        module.double()
    parameters = [parameter for module in modules for parameter in module.parameters()]
    losses = []
    for number in range(UPDATES):
        loss = loss_of(number)
        gradients = torch.autograd.grad(loss, parameters)
        losses.append(loss.item())
        with torch.no_grad():
            update(parameters, gradients)
    return SimpleNamespace(losses=losses, parameters=[each.detach() for each in parameters])


def filled(*modules):
    """Fill modules as one, so that no two parameters get the same numbers."""
    fill(nn.ModuleList(modules))
    return modules


def check(found, expected, moved):
    """Compare the answers of a training with a reference, and see that it went that far."""
    losses, parameters = found[:UPDATES], found[UPDATES:]
    assert [loss.item() for loss in losses] == pytest.approx(expected.losses, rel=1e-4)
    for one, other in zip(parameters, expected.parameters, strict=True):
        assert one.dtype == torch.float32
        # Adam divides a gradient by its size. Where the gradient is mostly rounding error, even its
        # sign may differ from the reference: one element of 400,000 does so on an AMD EPYC.
        differences = np.abs(one.double().numpy() - other.numpy())
        assert differences.max() < moved
        assert (differences > 0.01 * moved).mean() < 1e-5


def rule_of(change):
    """Return an update that has a state for each parameter, which begins with zeros."""
    states = {}

    def update(parameters, gradients):
        for number, (weight, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            zeros = torch.zeros_like(weight)
            weight.add_(change(states.setdefault(number, [zeros, zeros]), weight, gradient))

    return update


def adam(state, _weight, gradient):
    """Algorithm 1 of Kingma and Ba 2015 with its default rates, but for the bias correction."""
    state[0] = 0.9 * state[0] + 0.1 * gradient
    state[1] = 0.999 * state[1] + 0.001 * gradient**2
    return -0.001 * state[0] / (state[1] ** 0.5 + 1e-8)


def rmsprop(state, _weight, gradient):
    """RMSProp with a rate of 0.001, a decay of 0.99, and 0.01 inside of the root."""
    state[0] = 0.99 * state[0] + 0.01 * gradient**2
    return -0.001 * gradient / (state[0] + 0.01) ** 0.5


def momentum(state, weight, gradient):
    """Sutskever et al. 2013, with a rate of 0.05, a momentum of 0.9 and weight decay of 0.0001."""
    state[0] = 0.9 * state[0] + gradient + 1e-4 * weight
    return -0.05 * state[0]


def test_the_convolutional_network_is_that_of_the_paper_trained_on_a_huber_loss():
    layers = filled(
        nn.Conv2d(4, 32, 8, stride=4),
        nn.Conv2d(32, 64, 4, stride=2),
        nn.Conv2d(64, 64, 3, stride=1),
        nn.Linear(64 * 7 * 7, 128),
        nn.Linear(128, 6),
    )

    def loss(number):
        hidden = positive(5, 4, 84, 84, key=number, limit=1.0).double()
        for layer in layers[:3]:
            hidden = functional.relu(layer(hidden))
        values = layers[4](functional.relu(layers[3](hidden.reshape(5, -1))))
        chosen = values[torch.arange(5), labels(5, 1, classes=6, key=number)[:, 0]]
        error = (chosen - real(5, 1, key=number)[:, 0].double()).abs()
        return torch.where(error < 1, error**2 / 2, error - 0.5).mean()

    check(convolutional(), trained(layers, loss, rule_of(adam)), moved=0.01)


def test_the_recurrent_network_is_an_actor_critic():
    memory, policy, value = filled(nn.LSTM(20, 48), nn.Linear(48, 6), nn.Linear(48, 1))

    def loss(number):
        hidden, _ = memory(real(12, 4, 20, key=number).double())
        chances = Categorical(logits=policy(hidden))
        advantages = real(12, 4, 1, key=number + 7)[..., 0].double() - value(hidden)[..., 0]
        chosen = chances.log_prob(labels(12, 4, 1, classes=6, key=number)[..., 0])
        gain = (chosen * advantages.detach()).mean()
        return 0.5 * (advantages**2).mean() - gain - 0.01 * chances.entropy().mean()

    check(recurrent(), trained((memory, policy, value), loss, rule_of(rmsprop)), moved=0.01)


def test_the_residual_network_has_two_blocks_and_batch_statistics():
    stem, *convolutions = (nn.Conv2d(3, 16, 3, padding=1), *convolutions_of(4))
    norms = [nn.BatchNorm2d(16) for _ in range(4)]
    head = nn.Linear(16, 10)
    (one, two, three, four), (n1, n2, n3, n4) = convolutions, norms
    # In the order in which the layers are declared: the parts of a block, then its norms.
    layers = filled(stem, one, two, n1, n2, three, four, n3, n4, head)

    def block(maps, first, second, norm_of_first, norm_of_second):
        inner = functional.relu(normed(norm_of_first, first(maps)))
        return functional.relu(maps + normed(norm_of_second, second(inner)))

    def loss(number):
        maps = stem(real(6, 3, 20, 20, key=number).double())
        maps = block(block(maps, one, two, n1, n2), three, four, n3, n4)
        chances = head(maps.mean((2, 3))).log_softmax(1)
        return -chances[torch.arange(6), labels(6, classes=10, key=number)].mean()

    check(residual(), trained(layers, loss, rule_of(momentum)), moved=0.05)


def convolutions_of(count):
    return [nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(count)]


def normed(norm, maps):
    """Normalise each channel over its batch, rows and columns (Ioffe and Szegedy 2015)."""
    variance, mean = torch.var_mean(maps, (0, 2, 3), correction=0, keepdim=True)
    scale, shift = norm.weight[:, None, None], norm.bias[:, None, None]
    return (maps - mean) / (variance + 1e-5) ** 0.5 * scale + shift


@pytest.mark.parametrize("name", trainings())
def test_a_training_depends_on_no_random_numbers(name):
    answers = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        answers.add(self_test.digest(trainings()[name]()))
    assert len(answers) == 1
