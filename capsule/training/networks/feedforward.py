"""Feed-forward networks, as pure functions of one flat parameter buffer.

``nature`` is the network of Mnih et al. 2015 (doi:10.1038/nature14236, Methods, "Model
architecture"), ``shallow`` that of Mnih et al. 2013 (arXiv:1312.5602, section 4.1), ``small-conv``
that of Young and Tian 2019 (MinAtar, arXiv:1903.03176, section 3), and ``mlp`` has two hidden
layers for flat observations. The hidden layers of these networks end in rectifiers. ``nature`` and
``shallow`` divide pixels by 255. No convolution is padded.

Weights and biases start uniform in ``[-1/sqrt(fan_in), 1/sqrt(fan_in))``, the default of Torch7
that DQN used, or normal as in the authors' code of IMPALA (:func:`initialize`). They are drawn from
the stream ``initialization``, never from torch's generator.

Images are stored channels-last, which was measured to be faster, and flattened in the order row,
column, channel. Compared with implementations that flatten channels first, this permutes the
columns of the first dense layer; the distribution of the initial network is the same, because its
weights are drawn independently.

If a frame contains several images (:mod:`capsule.training.state.frames`), each has convolutions of
its own, of the same kind; their parameters' names begin with ``image1.``, ``image2.`` and so on.
The features of the images follow one another, and the numbers of packed frames follow them
unchanged, those of the oldest frame of a stack first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from capsule.experiment.errors import CapsuleError
from capsule.experiment.trainers import (
    Activation,
    Initialization,
    LayersSpec,
    ModuleSpec,
    OwnNetwork,
)
from capsule.training.layers import kernels
from capsule.training.layers.backends import Convolution, LayerBackend
from capsule.training.networks.own_module import OwnModule
from capsule.training.state.frames import FrameLayout
from capsule.training.state.streams import Stream

Shape = tuple[int, ...]
PlainName = Literal["nature", "shallow", "small-conv", "mlp"]
WIDE = "dense1.weight"  # nearly all parameters of a convolutional network are in this tensor
_CONVOLUTIONS = {  # output channels, kernel size, stride
    "nature": ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
    "shallow": ((16, 8, 4), (32, 4, 2)),
    "small-conv": ((16, 3, 1),),
    "mlp": (),
}
_SCALED = {"nature", "shallow"}


def unpacked(
    layout: FrameLayout, observations: torch.Tensor
) -> tuple[Sequence[torch.Tensor], torch.Tensor | None]:
    """Return the images and numbers of packed frames; return other frames unchanged.

    Args:
        layout: Layout of a frame.
        observations: ``[batch, frame_stack, *frame_shape]``.

    Returns:
        Images, ``[batch, frame_stack, *image]``, and numbers, float32 ``[batch, frame_stack *
        numbers]``; None where there are none.
    """
    if not layout.packed:
        return (observations,), None
    rows = observations.shape[:2]
    *images, numbers = torch.split(observations, layout.part_bytes, -1)
    seen = [each.reshape(*rows, *shape) for each, shape in zip(images, layout.images, strict=True)]
    if not layout.numbers:
        return seen, None
    # A copy, because a view as float32 must be aligned to four bytes, which numbers behind images
    # of any size need not be. contiguous() would not copy a single row.
    aligned = numbers.clone(memory_format=torch.contiguous_format)
    return seen, aligned.view(torch.float32).flatten(1)


def joined(features: Sequence[torch.Tensor], numbers: torch.Tensor | None) -> torch.Tensor:
    """Return the features of all images, then the numbers: float32 ``[batch, width]``.

    Args:
        features: Features of each image, float32 ``[batch, features]``.
        numbers: float32 ``[batch, frame_stack * numbers]``; None if there are none.
    """
    parts = [*features] if numbers is None else [*features, numbers]
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def prefixes(layout: FrameLayout) -> list[str]:
    """Return the prefix of the names of each image's parameters."""
    if not layout.further:
        return [""]
    return [f"image{number}." for number in range(1, len(layout.images) + 1)]


@dataclass(frozen=True)
class Convolutions:
    """A stack of convolutions for each image, or none for flat observations.

    Attributes:
        shapes: Parameter name to shape, in order.
        strides: Strides of the convolutions of an image; empty without convolutions.
        scale: Factor of every pixel.
        width: Number of features of one observation.
        products: The arithmetic of the layers.
        activation: Activation of the hidden layers.
        layout: Layout of a frame.
        modules: The user modules that replace the convolutions, one for each image; usually none.
    """

    shapes: dict[str, Shape]
    strides: tuple[int, ...]
    scale: float
    width: int
    products: LayerBackend
    activation: Activation
    layout: FrameLayout
    modules: tuple[OwnModule, ...]

    def prepare(self, seen: torch.Tensor) -> torch.Tensor:
        """Return one image, or flat observations, in the network's layout and range.

        Args:
            seen: uint8 or float32 ``[batch, frame_stack, *image]``.

        Returns:
            float32 ``[batch, channels, height, width]`` in channels-last memory; for flat
            observations ``[batch, features]``; for user modules ``[batch, frame_stack, *image]``.
        """
        if self.modules:
            return seen.to(torch.float32)
        if not self.strides:
            return seen.flatten(1).to(torch.float32)
        return images(seen, self.scale)

    def features(
        self, parameters: Mapping[str, torch.Tensor], observations: torch.Tensor
    ) -> torch.Tensor:
        """Return the features of observations, float32 ``[batch, width]``.

        Args:
            parameters: Name to tensor.
            observations: uint8 or float32 ``[batch, frame_stack, *frame_shape]``.
        """
        parts, numbers = unpacked(self.layout, observations)
        prepared = [self.prepare(each) for each in parts]
        if self.modules:
            own = zip(self.modules, prepared, strict=True)
            return joined([it.features(parameters, seen) for it, seen in own], numbers)
        named = zip(prefixes(self.layout), prepared, strict=True)
        found = [self._convolved(parameters, prefix, seen) for prefix, seen in named]
        return joined(found, numbers)

    def _convolved(
        self, parameters: Mapping[str, torch.Tensor], prefix: str, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Return the features of one image, whose parameters' names begin with ``prefix``."""
        rectified = self.activation == "relu"
        for layer in self.layers(parameters, prefix):
            hidden = self.products.convolution(hidden, *layer, rectified=rectified)
            hidden = hidden if rectified else self.activate(hidden)
        return hidden.permute(0, 2, 3, 1).flatten(1) if self.strides else hidden

    def layers(self, parameters: Mapping[str, torch.Tensor], prefix: str) -> list[Convolution]:
        """Return the convolutions whose parameters have names that begin with ``prefix``."""
        names = [f"{prefix}conv{layer}" for layer in range(1, len(self.strides) + 1)]
        return [
            Convolution(parameters[f"{name}.weight"], parameters[f"{name}.bias"], stride)
            for name, stride in zip(names, self.strides, strict=True)
        ]

    def activate(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the activation to a hidden layer's outputs, of any shape."""
        return hidden.relu() if self.activation == "relu" else self.products.tanh(hidden)


@dataclass(frozen=True)
class Network(Convolutions):
    """A Q-network: convolutions followed by dense layers.

    Attributes:
        dense: Number of dense layers.
    """

    dense: int

    def values(
        self, parameters: Mapping[str, torch.Tensor], observations: torch.Tensor
    ) -> torch.Tensor:
        """Return Q-values, float32 ``[batch, actions]``; arguments as for :meth:`features`."""
        features = self.features(parameters, observations)
        return self.head(parameters, self.wide(parameters, features))

    def wide(self, parameters: Mapping[str, torch.Tensor], features: torch.Tensor) -> torch.Tensor:
        """Return the first dense layer's outputs, float32 ``[batch, units]``, not activated."""
        return dense(self.products, parameters, "dense1", features)

    def head(self, parameters: Mapping[str, torch.Tensor], outputs: torch.Tensor) -> torch.Tensor:
        """Return Q-values, float32 ``[batch, actions]``, from the outputs of :meth:`wide`."""
        for layer in range(2, self.dense + 1):
            hidden = self.activate(outputs)
            outputs = dense(self.products, parameters, f"dense{layer}", hidden)
        return outputs


class Parameters:
    """Named float32 tensors that are views into one flat buffer.

    Convolution weights are channels-last in memory, all others in C order.

    Attributes:
        shapes: Name to shape of each tensor.
        flat: The buffer, float32 ``[size]``.
        views: Name to each tensor, in its shape.
        segments: The part of the buffer of each tensor, flat, in memory order.
    """

    def __init__(self, shapes: Mapping[str, Shape], device: torch.device) -> None:
        self.shapes = shapes
        sizes = [math.prod(shape) for shape in shapes.values()]
        self.flat = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        self.segments = list(torch.split(self.flat, sizes))
        self.views = {
            name: _unflattened(segment, shape)
            for (name, shape), segment in zip(shapes.items(), self.segments, strict=True)
        }

    def zeros_like(self) -> Parameters:
        """Return zeros of the same names, shapes and device."""
        return Parameters(self.shapes, self.flat.device)

    def copy(self) -> Parameters:
        """Return parameters of the same values, in memory of their own."""
        copied = self.zeros_like()
        copied.copy_from(self)
        return copied

    def copy_from(self, other: Parameters) -> None:
        """Copy the values of ``other``."""
        self.flat.copy_(other.flat)

    def load(self, arrays: Mapping[str, NDArray[np.float32]]) -> None:
        """Copy the values of ``arrays``, which have these names and shapes."""
        for name, view in self.views.items():
            view.copy_(torch.from_numpy(arrays[name]))

    def leaves(self) -> dict[str, torch.Tensor]:
        """Return the leaf tensors for autograd, by name; they are views of the same memory."""
        return {name: view.detach().requires_grad_() for name, view in self.views.items()}

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Split another buffer ``[size]`` into the parts of each tensor, in order."""
        return list(torch.split(flat, [len(segment) for segment in self.segments]))

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """Return a C-ordered copy of each tensor in its shape, by name: float32."""
        return {name: view.cpu().numpy().copy(order="C") for name, view in self.views.items()}


def make_network(
    name: PlainName | OwnNetwork,
    *,
    frame_stack: int,
    layout: FrameLayout,
    actions: int,
    hidden_units: int,
    products: LayerBackend,
) -> Network:
    """Return the Q-network that a spec names or describes, for one kind of observation.

    Args:
        name: The spec's ``trainer.network``.
        frame_stack: Frames of one observation.
        layout: Layout of a frame.
        actions: Number of actions.
        hidden_units: Units of the hidden dense layers of a named network.
        products: The arithmetic of the layers.

    Raises:
        CapsuleError: As :func:`make_convolutions`.
    """
    stack = make_convolutions(name, frame_stack, layout, products)
    hidden = (hidden_units,) if stack.strides else (hidden_units, hidden_units)
    widths = [stack.width, *(name.dense if isinstance(name, OwnNetwork) else hidden), actions]
    shapes = dict(stack.shapes)
    for layer, (fan_in, fan_out) in enumerate(pairwise(widths), start=1):
        shapes |= dense_shapes(f"dense{layer}", fan_in, fan_out)
    return Network(**{**vars(stack), "shapes": shapes}, dense=len(widths) - 1)


def make_convolutions(
    name: PlainName | OwnNetwork,
    frame_stack: int,
    layout: FrameLayout,
    products: LayerBackend,
) -> Convolutions:
    """Return the convolutions of a network, or the user modules that replace them.

    Raises:
        CapsuleError: CAP-T243, the frames are too small for the convolutions; CAP-T244, the user
            module cannot be used.
    """
    if isinstance(name, ModuleSpec):
        return _make_modules(name, frame_stack, layout, products)
    activation: Activation = "relu"
    if isinstance(name, LayersSpec):
        convolutions = tuple((it.filters, it.kernel, it.stride) for it in name.convolutions)
        # Without convolutions the observations are vectors, which are never divided by 255.
        scaled, activation = name.scaled and bool(convolutions), name.activation
    else:
        convolutions, scaled = _CONVOLUTIONS[name], name in _SCALED
    shapes: dict[str, Shape] = {}
    width = frame_stack * layout.numbers
    for number, prefix in enumerate(prefixes(layout)):
        image = layout.images[number]
        channels, sides = frame_stack * math.prod(image[:-2]), image[-2:]
        for layer, (filters, kernel, stride) in enumerate(convolutions, start=1):
            shapes |= convolution_shapes(f"{prefix}conv{layer}", channels, filters, kernel)
            if min(sides) < kernel:
                raise _too_small(name, layer, sides, layout, number)
            sides = tuple(1 + (side - kernel) // stride for side in sides)
            channels = filters
        width += channels * math.prod(sides)
    strides = tuple(stride for _, _, stride in convolutions)
    scale = 1 / 255 if scaled else 1.0
    return Convolutions(shapes, strides, scale, width, products, activation, layout, ())


def _make_modules(
    spec: ModuleSpec, frame_stack: int, layout: FrameLayout, products: LayerBackend
) -> Convolutions:
    """Return the user modules that replace the convolutions of each image."""
    modules = tuple(
        OwnModule(spec.module, (frame_stack, *image), prefix)
        for image, prefix in zip(layout.images, prefixes(layout), strict=True)
    )
    shapes = {name: shape for module in modules for name, shape in module.shapes().items()}
    width = sum(module.width() for module in modules) + frame_stack * layout.numbers
    return Convolutions(shapes, (), 1.0, width, products, spec.activation, layout, modules)


def _too_small(
    name: PlainName | LayersSpec, layer: int, sides: Shape, layout: FrameLayout, number: int
) -> CapsuleError:
    rows, columns = layout.images[number][-2:]
    which = f" of environment.images.{number}" if layout.further else ""
    frames = f"frames{which} of {rows}x{columns} are too small for its convolutions"
    if isinstance(name, LayersSpec):
        kernel = name.convolutions[layer - 1].kernel
        return CapsuleError(
            "CAP-T243",
            f"trainer.network.convolutions.{layer - 1}: {frames}: this layer gets "
            f"{sides[0]}x{sides[1]}, and its kernel has {kernel}x{kernel}",
            fix="Use smaller kernels or strides, or fewer layers.",
        )
    return CapsuleError(
        "CAP-T243",
        f"trainer.network {name!r}: {frames}",
        fix="Use 'residual', which takes frames of any size, or 'small-conv'.",
    )


def dense_shapes(name: str, fan_in: int, fan_out: int) -> dict[str, Shape]:
    """Return the shapes of the dense layer called ``name``."""
    return {f"{name}.weight": (fan_out, fan_in), f"{name}.bias": (fan_out,)}


def dense(
    products: LayerBackend, parameters: Mapping[str, torch.Tensor], name: str, inputs: torch.Tensor
) -> torch.Tensor:
    """Return the outputs of a dense layer without activation, float32 ``[batch, out]``.

    Args:
        products: The arithmetic of the layer.
        parameters: Name to tensor, with ``{name}.weight`` and ``{name}.bias``.
        name: Name of the layer.
        inputs: float32 ``[batch, in]``.
    """
    return products.dense(inputs, parameters[f"{name}.weight"], parameters[f"{name}.bias"])


def convolution_shapes(name: str, channels: int, filters: int, size: int) -> dict[str, Shape]:
    """Return the shapes of the convolution called ``name``."""
    return {f"{name}.weight": (filters, channels, size, size), f"{name}.bias": (filters,)}


def images(observations: torch.Tensor, scale: float) -> torch.Tensor:
    """Return images in the layout of convolutions.

    Args:
        observations: uint8 or float32 ``[batch, frame_stack, *image]``.
        scale: Factor of every pixel.

    Returns:
        float32 ``[batch, channels, height, width]`` in channels-last memory; frames are channels.
    """
    stacks = observations.flatten(1, -3)
    if stacks.device.type == "cpu" and stacks.dtype == torch.uint8:
        return kernels.interleave(stacks, scale).permute(0, 3, 1, 2)
    floats = stacks.permute(0, 2, 3, 1).contiguous().to(torch.float32)
    return (floats.mul_(scale) if scale != 1.0 else floats).permute(0, 3, 1, 2)


def initialize(
    parameters: Parameters, stream: Stream, distribution: Initialization = "uniform"
) -> None:
    """Draw every parameter, in order, element by element in C order.

    Args:
        parameters: The parameters, which are overwritten.
        stream: One uniform is drawn for each element, except for biases that are 0.
        distribution: ``uniform``: weights and biases in ``[-1/sqrt(fan_in), 1/sqrt(fan_in))``.
            ``truncated-normal``: biases 0, and weights from a normal distribution with standard
            deviation ``1/sqrt(fan_in)``, truncated at two standard deviations. These are the
            defaults of Sonnet 1, with which the authors of IMPALA train
            (github.com/google-deepmind/scalable_agent). For an embedding ``[words, units]``,
            ``units`` is used in place of ``fan_in``; the authors' embedding has another scale.
    """
    arrays: dict[str, NDArray[np.float32]] = {}
    scale = 0.0
    for name, view in parameters.views.items():
        is_weight = name.endswith("weight")
        if is_weight:  # a bias shares the fan-in of the weight before it
            scale = 1.0 / math.sqrt(math.prod(view.shape[1:]))
        if distribution == "truncated-normal" and not is_weight:
            arrays[name] = np.zeros(view.shape, np.float32)
            continue
        drawn = stream.uniforms(view.numel()).reshape(view.shape)
        units = 2.0 * drawn - 1.0 if distribution == "uniform" else _truncated_normal(drawn)
        arrays[name] = (units * scale).astype(np.float32)
    parameters.load(arrays)


def _truncated_normal(uniforms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return normal numbers, truncated at two deviations, by inverting the distribution function.

    They are computed in float64, with the C library's ``log`` in the tails; the caller rounds them
    to float32.
    """
    normal = NormalDist()
    least, most = normal.cdf(-2.0), normal.cdf(2.0)
    drawn = (normal.inv_cdf(least + (most - least) * each) for each in uniforms.flat)
    return np.fromiter(drawn, np.float64, uniforms.size).reshape(uniforms.shape)


def flatten(gradient: torch.Tensor) -> torch.Tensor:
    """Return a parameter tensor's gradient as ``[size]``, in the order of :class:`Parameters`."""
    return (gradient.permute(0, 2, 3, 1) if gradient.dim() == 4 else gradient).reshape(-1)


def _unflattened(segment: torch.Tensor, shape: Shape) -> torch.Tensor:
    if len(shape) == 4:
        filters, channels, height, width = shape
        return segment.view(filters, height, width, channels).permute(0, 3, 1, 2)
    return segment.view(shape)
