"""The networks of the case study: three LeNets, two residual networks, one LSTM.

The layer sizes are those of the papers. What differs from them, because it is how these networks
are built today (and were in the case study):

- LeNets: every map of a layer sees every map of the one before; the papers connect some only.
  Subsampling is a plain mean, without the trained coefficient and bias of each map; the squashing
  function is tanh without its two constants; the outputs are logits for a softmax where LeNet-5 has
  radial basis functions. LeNet-5 thereby has 61,706 parameters instead of 60,000.
- ResNets: none in the network. Shortcuts are the paper's option A, without parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 10


def lenet1() -> nn.Sequential:
    """Map images ``[n, 1, 28, 28]`` to logits ``[n, 10]``.

    LeCun et al., "Handwritten digit recognition with a back-propagation network", 1990.
    """
    return nn.Sequential(
        *_convolution(1, 4),
        *_convolution(4, 12),
        nn.Flatten(),
        nn.Linear(12 * 4 * 4, CLASSES),
    )


def lenet4() -> nn.Sequential:
    """Map images ``[n, 1, 32, 32]`` to logits ``[n, 10]``.

    LeCun et al., "Comparison of learning algorithms for handwritten digit recognition", 1995.
    """
    return nn.Sequential(
        *_convolution(1, 4),
        *_convolution(4, 16),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120),
        nn.Tanh(),
        nn.Linear(120, CLASSES),
    )


def lenet5() -> nn.Sequential:
    """Map images ``[n, 1, 32, 32]`` to logits ``[n, 10]``.

    LeCun et al., "Gradient-based learning applied to document recognition", 1998, Section II.B.
    """
    return nn.Sequential(
        *_convolution(1, 6),
        *_convolution(6, 16),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120),
        nn.Tanh(),
        nn.Linear(120, 84),
        nn.Tanh(),
        nn.Linear(84, CLASSES),
    )


def _convolution(channels: int, maps: int) -> tuple[nn.Module, ...]:
    """Return a LeNet's convolution and the subsampling after it."""
    return nn.Conv2d(channels, maps, kernel_size=5), nn.Tanh(), nn.AvgPool2d(2)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut without parameters.

    Where the block halves the image and doubles the channels, the shortcut takes every other pixel
    and fills the new channels with zeros (option A).
    """

    def __init__(self, channels: int, maps: int) -> None:
        super().__init__()
        self.stride = maps // channels
        self.new_maps = maps - channels
        self.convolution1 = nn.Conv2d(channels, maps, 3, self.stride, padding=1, bias=False)
        self.normalization1 = nn.BatchNorm2d(maps)
        self.convolution2 = nn.Conv2d(maps, maps, 3, padding=1, bias=False)
        self.normalization2 = nn.BatchNorm2d(maps)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map ``[n, channels, h, w]`` to ``[n, maps, h / stride, w / stride]``."""
        shortcut = inputs[:, :, :: self.stride, :: self.stride]
        shortcut = functional.pad(shortcut, (0, 0, 0, 0, 0, self.new_maps))
        hidden = functional.relu(self.normalization1(self.convolution1(inputs)))
        return functional.relu(self.normalization2(self.convolution2(hidden)) + shortcut)


def resnet(depth: int) -> nn.Sequential:
    """Map images ``[n, 3, h, w]`` to logits ``[n, 10]``; the paper's are 32x32.

    He et al., "Deep residual learning for image recognition", 2016, Section 4.2: a convolution,
    three stages of ``(depth - 2) / 6`` blocks, the mean over the image, one linear layer.

    Args:
        depth: Layers with weights, ``6 n + 2``.

    Raises:
        ValueError: ``depth`` has another form.
    """
    blocks, rest = divmod(depth - 2, 6)
    if rest or blocks < 1:
        raise ValueError(f"depth {depth} is not 6 n + 2 for an n of at least 1")
    widths = [16, *[16] * blocks, *[32] * blocks, *[64] * blocks]
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        *[ResidualBlock(before, after) for before, after in pairwise(widths)],
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    )
    for module in network.modules():
        if isinstance(module, nn.Conv2d):  # He et al. 2015, as Section 4.2 says
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network


class LstmRegressor(nn.Module):
    """One LSTM layer, dropout on its last output, one linear unit.

    The case study keeps the design of its LSTM ("ModelX", a forecast of energy usage) to itself;
    this one stands in for it.
    """

    def __init__(self, features: int = 1, hidden: int = 32, dropout: float = 0.2) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(hidden, 1)

    def forward(self, sequences: Tensor) -> Tensor:
        """Map sequences ``[n, time, features]`` to predictions ``[n]``."""
        outputs, _ = self.lstm(sequences)
        return torch.squeeze(self.output(self.dropout(outputs[:, -1])), 1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lenet1": lenet1,
    "lenet4": lenet4,
    "lenet5": lenet5,
    "resnet38": lambda: resnet(38),
    "resnet56": lambda: resnet(56),
    "lstm": LstmRegressor,
}
