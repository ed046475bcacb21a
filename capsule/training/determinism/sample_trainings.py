"""Three small trainings with known answers: a convolutional, a recurrent and a residual network.

They use only torch's own modules, so that their answers depend on the machine and its libraries,
and not on Capsule's trainers. All inputs are made of integers, as in
:mod:`capsule.training.determinism.operator_sweep`. The update rules are written out, because
importing ``torch.optim`` takes longer than these trainings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from capsule.training.determinism.operator_sweep import Operator, fill, labels, positive, real

UPDATES = 3
Rule = Callable[[Sequence[torch.Tensor]], None]  # updates parameters, given their gradients


def trainings() -> dict[str, Operator]:
    """Return the trainings by name, as functions that return losses and parameters."""
    return {
        "training.convolutional": convolutional,
        "training.recurrent": recurrent,
        "training.residual": residual,
    }


def convolutional() -> list[torch.Tensor]:
    """Train the network of Mnih et al. 2015, doi:10.1038/nature14236, on Q-values, with Adam.

    The last hidden layer is narrower than in the paper.
    """
    network = nn.Sequential(
        nn.Conv2d(4, 32, 8, 4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, 2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
        nn.Flatten(),
        # The convolutions reduce 84x84 to 64 channels of 7x7.
        nn.Linear(3136, 128),
        nn.ReLU(),
        nn.Linear(128, 6),
    )

    def loss(update: int) -> torch.Tensor:
        values = network(positive(5, 4, 84, 84, key=update, limit=1.0))
        chosen = values.gather(1, labels(5, 1, classes=6, key=update))
        return F.smooth_l1_loss(chosen, real(5, 1, key=update))

    return _trained(network, loss, _adam)


def recurrent() -> list[torch.Tensor]:
    """Train an LSTM actor-critic on sequences of 12 steps, with RMSProp."""
    steps, actors, actions = 12, 4, 6
    memory, policy, value = nn.LSTM(20, 48), nn.Linear(48, actions), nn.Linear(48, 1)

    def loss(update: int) -> torch.Tensor:
        hidden, _ = memory(real(steps, actors, 20, key=update))
        chances = policy(hidden).log_softmax(2)
        advantages = real(steps, actors, 1, key=update + 7) - value(hidden)
        chosen = chances.gather(2, labels(steps, actors, 1, classes=actions, key=update))
        entropy = -(chances.exp() * chances).sum(2).mean()
        gain = (chosen * advantages.detach()).mean()
        error = advantages.square().mean()
        return torch.add(error * 0.5 - gain, entropy, alpha=-0.01)

    modules = nn.ModuleList([memory, policy, value])
    return _trained(modules, loss, _rmsprop)


def residual() -> list[torch.Tensor]:
    """Train two residual blocks (He et al. 2016, arXiv:1512.03385, figure 2), with momentum."""
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), _Block(16), _Block(16), _Mean(), nn.Linear(16, 10)
    )

    def loss(update: int) -> torch.Tensor:
        scores = network(real(6, 3, 20, 20, key=update))
        return F.cross_entropy(scores, labels(6, classes=10, key=update))

    return _trained(network, loss, _momentum)


class _Block(nn.Module):
    """Two convolutions with batch normalisation and a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)])

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        hidden = self.norms[0](self.first(maps)).relu()
        return torch.relu(maps + self.norms[1](self.second(hidden)))


class _Mean(nn.Module):
    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        return maps.mean((2, 3))


def _trained(
    network: nn.Module,
    loss_of: Callable[[int], torch.Tensor],
    rule_of: Callable[[Sequence[torch.Tensor]], Rule],
) -> list[torch.Tensor]:
    """Train the network, and return the loss of each update and every parameter."""
    fill(network)
    parameters = list(network.parameters())
    rule = rule_of(parameters)
    losses = []
    for update in range(UPDATES):
        loss = loss_of(update)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            rule(gradients)
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in parameters)]


def _adam(parameters: Sequence[torch.Tensor]) -> Rule:
    """Return the rule of Kingma and Ba 2015, arXiv:1412.6980, without the bias correction."""
    means = [torch.zeros_like(parameter) for parameter in parameters]
    squares = [torch.zeros_like(parameter) for parameter in parameters]

    def update(gradients: Sequence[torch.Tensor]) -> None:
        for w, m, v, g in zip(parameters, means, squares, gradients, strict=True):
            m.lerp_(g, 0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            w.addcdiv_(m, v.sqrt().add_(1e-8), value=-0.001)

    return update


def _rmsprop(parameters: Sequence[torch.Tensor]) -> Rule:
    squares = [torch.zeros_like(parameter) for parameter in parameters]

    def update(gradients: Sequence[torch.Tensor]) -> None:
        for w, v, g in zip(parameters, squares, gradients, strict=True):
            v.mul_(0.99).addcmul_(g, g, value=0.01)
            w.sub_(0.001 * g * (v + 0.01).rsqrt())

    return update


def _momentum(parameters: Sequence[torch.Tensor]) -> Rule:
    velocities = [torch.zeros_like(parameter) for parameter in parameters]

    def update(gradients: Sequence[torch.Tensor]) -> None:
        for w, velocity, g in zip(parameters, velocities, gradients, strict=True):
            velocity.mul_(0.9).add_(g).add_(w, alpha=1e-4)
            w.sub_(velocity, alpha=0.05)

    return update
