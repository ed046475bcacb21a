"""Networks of the libraries' products, with a function that draws their inputs."""

from functools import cache

import torch

from capsule.experiment.spec import DeterminismSpec
from capsule.training.layers.backends import LIBRARY
from capsule.training.networks.feedforward import Parameters, initialize, make_network
from capsule.training.state.frames import FrameLayout
from capsule.training.state.streams import Stream

STRICT = DeterminismSpec()
FEATURES = 4
ACTIONS = 6


def relaxed(**switches):
    return STRICT.model_copy(update=switches)


@cache
def network_of(name):
    """Return a network of the libraries' products, and a function that draws its inputs."""
    generator = torch.Generator().manual_seed(5)
    if name == "lstm":
        cell = torch.nn.LSTMCell(64, 128)
        head = torch.nn.Linear(128, ACTIONS)
        for parameter in [*cell.parameters(), *head.parameters()]:
            torch.nn.init.uniform_(parameter, -0.1, 0.1, generator=generator)

        def recurrent(inputs):
            hidden, memory = cell(inputs[0], (inputs[1], inputs[2]))
            return head(hidden), torch.stack((hidden, memory), 1)

        return recurrent, lambda rows: tuple(
            torch.randn(rows, size, generator=generator) for size in (64, 128, 128)
        )
    shape, stack = ((84, 84), 4) if name == "nature" else ((FEATURES,), 1)
    network = make_network(
        name,
        frame_stack=stack,
        layout=FrameLayout(shape),
        actions=ACTIONS,
        hidden_units=64,
        products=LIBRARY,
    )
    parameters = Parameters(network.shapes, torch.device("cpu"))
    initialize(parameters, Stream("initialization", 5))

    def feed_forward(inputs):
        return network.values(parameters.views, inputs[0]), inputs[0][:, 0]

    def draw(rows):
        size = (rows, stack, *shape)
        if name == "nature":
            return (torch.randint(0, 256, size, dtype=torch.uint8, generator=generator),)
        return (torch.randn(size, generator=generator),)

    return feed_forward, draw
