"""Passes through a Q-network without autograd, in memory that every pass uses again.

Torch takes a few microseconds to make a tensor, and autograd to record an operation. In a network
as small as MinAtar's, this is most of the time of a pass. Here, the kernels of
:mod:`capsule.training.layers.kernels` are called directly, in the same order and with the same
arguments as by :meth:`Network.values` and by autograd, and so give the same bits.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from capsule.training.layers import kernels
from capsule.training.networks.feedforward import WIDE, Network, Parameters

CPU = torch.device("cpu")


def has_passes(network: Network) -> bool:
    """Return whether this module computes a network: one image, rectified, in the fixed order."""
    special = network.modules or network.layout.packed or network.activation != "relu"
    return network.products.fixed_order and not special


class ForwardPass:
    """Computes Q-values of a fixed number of observations.

    Attributes:
        features: Inputs of the first dense layer in the last pass, float32 ``[rows, features]``.
    """

    def __init__(self, network: Network, parameters: Parameters, rows: int) -> None:
        """Lay out the memory.

        Args:
            network: A network for which :func:`has_passes` is true.
            parameters: Theta, on the CPU, which is read at every pass.
            rows: Number of observations.
        """
        self._network, views = network, parameters.views
        self._convolutions = network.layers(views, "")
        self._filters = [layer.filters.permute(0, 2, 3, 1) for layer in self._convolutions]
        self._images = self._image_memory(rows)
        self.features = self._images[-1].view(rows, -1)
        names = [f"dense{layer}" for layer in range(1, network.dense + 1)]
        self._dense = [(views[f"{name}.weight"], views[f"{name}.bias"]) for name in names]
        self._outputs = [torch.zeros(rows, len(bias)) for _, bias in self._dense]

    def values(self, observations: torch.Tensor) -> torch.Tensor:
        """Return Q-values, float32 ``[rows, actions]``, which the next pass overwrites.

        Args:
            observations: uint8 or float32 ``[rows, frame_stack, *frame_shape]``.
        """
        self._prepare(observations)
        hidden, *others = self._images
        for layer, filters, out in zip(self._convolutions, self._filters, others, strict=True):
            hidden = kernels.convolution(
                hidden, filters, layer.bias, layer.stride, rectified=True, out=out
            )
        hidden = self.features
        for (weight, bias), out in zip(self._dense[:-1], self._outputs, strict=False):
            hidden = kernels.rectify(kernels.dense(hidden, weight, None, out=out), bias)
        return kernels.dense(hidden, *self._dense[-1], out=self._outputs[-1])

    def _prepare(self, observations: torch.Tensor) -> None:
        """Write observations, prepared as by :meth:`Network.prepare`, into the first memory."""
        if self._convolutions and observations.dtype == torch.uint8:
            stacks = observations.flatten(1, -3)
            kernels.interleave(stacks, self._network.scale, out=self._images[0])
            return
        prepared = self._network.prepare(observations)
        self._images[0].copy_(prepared.permute(0, 2, 3, 1) if self._convolutions else prepared)

    def _image_memory(self, rows: int) -> list[torch.Tensor]:
        """Return memory for the prepared observations and the results of each convolution."""
        channels = self._filters[0].shape[-1] if self._filters else self._network.width
        sides = self._network.layout.images[0][-2:] if self._filters else ()
        memory = [torch.zeros(rows, *sides, channels)]
        for layer, filters in zip(self._convolutions, self._filters, strict=True):
            shape = kernels.convolved(memory[-1], filters, layer.stride).shape
            memory.append(torch.zeros(shape))
        return memory


class GradientPass(ForwardPass):
    """A forward pass whose Q-values can be differentiated.

    Attributes:
        small: Gradient of every parameter except the weight of the first dense layer, whose
            gradient is ``returned^T features``.
        returned: Gradient of the first dense layer's outputs, float32 ``[rows, units]``.
    """

    def __init__(self, network: Network, parameters: Parameters, rows: int) -> None:
        super().__init__(network, parameters, rows)
        shapes = {name: shape for name, shape in network.shapes.items() if name != WIDE}
        self.small = Parameters(shapes, CPU)
        convolutions = range(1, len(self._convolutions) + 1)
        self._filter_gradients = [
            self.small.views[f"conv{layer}.weight"].permute(0, 2, 3, 1) for layer in convolutions
        ]
        # Gradients of the results of each hidden layer, and of its rectifier's inputs.
        self._image_gradients = [torch.zeros_like(each) for each in self._images[1:]]
        self._convolved_gradients = [torch.zeros_like(each) for each in self._images[1:]]
        self._hidden_gradients = [torch.zeros_like(each) for each in self._outputs[:-1]]
        self._dense_gradients = [torch.zeros_like(each) for each in self._outputs[:-1]]
        self.returned = torch.zeros_like(self._outputs[0])

    def differentiate(self, gradient: torch.Tensor) -> None:
        """Set ``small`` and ``returned``, which are valid until the next call.

        Args:
            gradient: Gradient of the Q-values, float32 ``[rows, actions]``.
        """
        small = self.small.views
        self.small.flat.zero_()  # some kernels add to their output
        kernels.column_sums(gradient, out=small[f"dense{len(self._dense)}.bias"])
        for layer in range(len(self._dense) - 1, 0, -1):
            outputs = self._outputs[layer - 1]
            kernels.outer(gradient, outputs, out=small[f"dense{layer + 1}.weight"])
            hidden = self._hidden_gradients[layer - 1]
            kernels.matrix_product(gradient, self._dense[layer][0], out=hidden)
            gradient = kernels.relu_backward(
                hidden, outputs, small[f"dense{layer}.bias"], out=self._dense_gradients[layer - 1]
            )
        self.returned = gradient
        if self._convolutions:
            images = self._image_gradients[-1]
            kernels.matrix_product(gradient, self._dense[0][0], out=images.view(len(images), -1))
            self._differentiate_convolutions()

    def _differentiate_convolutions(self) -> None:
        """Continue from the gradient of the last convolution's results."""
        for number in reversed(range(len(self._convolutions))):
            stride, inputs = self._convolutions[number].stride, self._images[number]
            gradient = kernels.relu_backward(
                self._image_gradients[number],
                self._images[number + 1],
                self.small.views[f"conv{number + 1}.bias"],
                out=self._convolved_gradients[number],
            )
            kernels.conv2d_weight_grad(inputs, gradient, self._filter_gradients[number], stride)
            if number:
                before = self._image_gradients[number - 1]
                filters = self._filters[number]
                kernels.conv2d_input_grad(gradient, filters, inputs.shape, stride, out=before)


class PassesOfAnySize:
    """Computes Q-values of any number of observations, with a pass for each number that occurs."""

    def __init__(self, network: Network, parameters: Parameters) -> None:
        self._network, self._parameters = network, parameters
        self._passes: dict[int, ForwardPass] = {}

    def __call__(self, observations: NDArray[np.generic]) -> NDArray[np.float32]:
        """Return Q-values, float32 ``[rows, actions]``.

        Args:
            observations: ``[rows, frame_stack, *frame_shape]``.
        """
        rows = len(observations)
        if rows not in self._passes:
            self._passes[rows] = ForwardPass(self._network, self._parameters, rows)
        values = self._passes[rows].values(torch.from_numpy(observations))
        copied: NDArray[np.float32] = values.numpy().copy()
        return copied
