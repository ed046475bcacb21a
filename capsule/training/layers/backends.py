"""Convolutions and dense layers, whose sums have a fixed order or that of torch's libraries.

A library chooses the order of a sum by the processor, the size of the batch and the position of a
row in it. Under :data:`FIXED_ORDER` every element of every result is one chain of fused
multiply-adds, in the order below (``capsule/native/source/numerics/products.h``). Its bits depend
only on its inputs: AVX2 and AVX-512 give the same bits, and a row has the same result in any batch.
It is also faster than torch's libraries under a portable profile, which restricts those to AVX2.

Order of the sums, from first to last; each sum begins with zero:

* convolution: filter row, filter column, channel; then the bias is added;
* its gradient for the filters: image, output row, output column;
* for its inputs: output row, filter row, filter column, filter;
* dense layer: input, then the bias; its gradient for the weights: row; for the inputs: unit;
* gradients of biases: image, output row, output column; or row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from capsule.experiment.spec import CpuAccelerator, CudaAccelerator
from capsule.experiment.trainers import ModuleSpec, OwnNetwork
from capsule.training.layers import kernels

IMAGES = 32  # images that pass through a stack of convolutions at a time, so that they stay cached


class Convolution(NamedTuple):
    """A convolutional layer.

    Attributes:
        filters: float32 ``[filters, channels, size, size]``, channels-last in memory.
        bias: float32 ``[filters]``.
        stride: Stride in both directions.
    """

    filters: torch.Tensor
    bias: torch.Tensor
    stride: int


@dataclass(eq=False)
class LayerBackend:
    """The arithmetic of layers. Convolutions and dense layers can be differentiated.

    Attributes:
        fixed_order: Whether sums have the order above, which needs a CPU with AVX2 and FMA. If not,
            torch's libraries compute the layers, on any device.
    """

    fixed_order: bool = False

    def convolution(
        self,
        images: torch.Tensor,
        filters: torch.Tensor,
        bias: torch.Tensor,
        stride: int,
        *,
        rectified: bool,
    ) -> torch.Tensor:
        """Return the convolution of images, without padding, with a bias.

        Args:
            images: float32 ``[batch, channels, height, width]``, channels-last in memory.
            filters: float32 ``[filters, channels, size, size]``, channels-last in memory.
            bias: float32 ``[filters]``.
            stride: Stride in both directions.
            rectified: Whether negative results are set to zero.

        Returns:
            float32 ``[batch, filters, down, across]``, channels-last in memory.
        """
        if self.fixed_order:
            return _apply(_Convolution, images, filters, bias, stride, rectified)
        outputs = functional.conv2d(images, filters, bias, stride)
        return outputs.relu_() if rectified else outputs

    def rectified_convolutions(
        self,
        observations: torch.Tensor,
        prepare: Callable[[torch.Tensor], torch.Tensor],
        layers: Sequence[Convolution],
    ) -> torch.Tensor:
        """Apply one rectified convolution after another.

        Args:
            observations: ``[batch, ...]``. No gradient is computed for them.
            prepare: Converts any rows of them to the images that :meth:`convolution` takes.
            layers: The convolutions, first to last, at least one.

        Returns:
            float32 ``[batch, filters, down, across]``, channels-last in memory.
        """
        if self.fixed_order:
            parameters = [tensor for layer in layers for tensor in (layer.filters, layer.bias)]
            # Autograd is switched off inside ``forward``, so this is determined here.
            keeps = torch.is_grad_enabled() and any(each.requires_grad for each in parameters)
            strides = [layer.stride for layer in layers]
            return _apply(_Convolutions, observations, prepare, strides, keeps, *parameters)
        hidden = prepare(observations)
        for layer in layers:
            hidden = self.convolution(hidden, *layer, rectified=True)
        return hidden

    def dense(
        self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``inputs weight^T + bias``.

        Args:
            inputs: float32 ``[batch, in]``.
            weight: float32 ``[out, in]``.
            bias: float32 ``[out]``; None for no bias.

        Returns:
            float32 ``[batch, out]``.
        """
        if self.fixed_order:
            if not torch.is_grad_enabled():  # autograd takes 40 % of the time of a small layer
                return kernels.dense(inputs.contiguous(), weight, bias)
            return _apply(_Dense, inputs, weight, bias)
        # W x^T: at small batch sizes a third faster than x W^T.
        if bias is None:
            return torch.mm(weight, inputs.t()).t()
        return torch.addmm(bias.unsqueeze(1), weight, inputs.t()).t()

    def tanh(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the hyperbolic tangent of float32 numbers, of any shape.

        In the fixed order it is computed as ``1 - 2 / (e^2x + 1)``, whose absolute error is below
        2e-7, because the bits of ``torch.tanh`` depend on whether a number is in a full vector.
        """
        if self.fixed_order:
            return _apply(_Tanh, numbers)
        return numbers.tanh()

    def outer(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Set ``out`` to ``left^T right`` and return it. It is not differentiated.

        Args:
            left: float32 ``[batch, rows]``; its rows need not follow one another in memory.
            right: float32 ``[batch, columns]``.
            out: float32 ``[rows, columns]``.
        """
        if self.fixed_order:
            return kernels.outer(left, right, out)
        return torch.mm(left.t(), right, out=out)

    def matrix_product(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Return ``left right``, which is not differentiated.

        Args:
            left: float32 ``[rows, steps]``.
            right: float32 ``[steps, columns]``.

        Returns:
            float32 ``[rows, columns]``.
        """
        return kernels.matrix_product(left, right) if self.fixed_order else torch.mm(left, right)


LIBRARY = LayerBackend()
FIXED_ORDER = LayerBackend(fixed_order=True)


def backend_for(
    accelerator: CpuAccelerator | CudaAccelerator, network: str | OwnNetwork
) -> LayerBackend:
    """Return the arithmetic with which a trainer computes the layers of its network.

    The fixed order needs AVX2 and FMA. The profile ``portable-v2`` is for processors without them,
    and therefore does not use them on any processor. A network with a user module is computed by
    torch's libraries.

    Args:
        accelerator: The spec's section ``accelerator``, or another accelerator.
        network: The spec's ``trainer.network``.
    """
    if isinstance(network, ModuleSpec):
        return LIBRARY
    on_cpu = isinstance(accelerator, CpuAccelerator) and accelerator.numerics != "portable-v2"
    return FIXED_ORDER if on_cpu and kernels.has_products() else LIBRARY


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        images: torch.Tensor,
        filters: torch.Tensor,
        bias: torch.Tensor,
        stride: int,
        rectified: bool,
    ) -> torch.Tensor:
        inputs, weights = _last(images), _last(filters)
        outputs = kernels.convolution(inputs, weights, bias, stride, rectified=rectified)
        context.stride = stride
        # The results of a rectifier suffice to differentiate it: where they are zero, the gradient
        # is zero.
        context.save_for_backward(inputs, weights, *([outputs] if rectified else []))
        return _first(outputs)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weights, *outputs = context.saved_tensors
        wants_images, wants_filters, wants_bias, _, _ = context.needs_input_grad
        through, bias = _back(_last(gradient), *outputs)
        filters = images = None
        if wants_filters:
            # The kernel adds to its output.
            filters = torch.zeros_like(weights)
            kernels.conv2d_weight_grad(inputs, through, filters, context.stride)
            filters = _first(filters)
        if wants_images:
            images = _first(
                kernels.conv2d_input_grad(through, weights, inputs.shape, context.stride)
            )
        return images, filters, bias if wants_bias else None, None, None


def _back(
    gradient: torch.Tensor, outputs: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of a convolution before its bias and of the bias.

    If ``outputs`` are given, they are those of a rectifier, which is differentiated first.
    """
    if outputs is None:
        return gradient, kernels.column_sums(gradient.flatten(0, -2))
    bias = gradient.new_zeros(gradient.shape[-1])
    return kernels.relu_backward(gradient, outputs, bias), bias


class _Convolutions(torch.autograd.Function):
    """A stack of rectified convolutions, applied to :data:`IMAGES` images at a time.

    A few images stay in the cache from layer to layer. The sums of the gradients continue from one
    part of the images to the next, so the division into parts does not change the order of a sum.
    """

    @staticmethod
    def forward(
        context: Any,
        observations: torch.Tensor,
        prepare: Callable[[torch.Tensor], torch.Tensor],
        strides: Sequence[int],
        keeps: bool,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        filters, biases = [_last(each) for each in parameters[::2]], parameters[1::2]
        rows, last = len(observations), len(strides) - 1
        outputs: list[torch.Tensor] = []
        for part in _parts(rows):
            hidden = _last(prepare(observations[part]))
            for layer, (weights, bias, stride) in enumerate(
                zip(filters, biases, strides, strict=True)
            ):
                # Without a gradient, results between two layers are needed only for the current
                # part, so every part uses the same memory. The last part may not fill it.
                whole = keeps or layer == last
                if layer == len(outputs):
                    room = kernels.convolved(hidden, weights, stride, rows if whole else None)
                    outputs.append(room)
                out = outputs[layer][part if whole else slice(len(hidden))]
                kernels.convolution(hidden, weights, bias, stride, rectified=True, out=out)
                hidden = out
        if keeps:
            context.prepare, context.strides = prepare, strides
            context.save_for_backward(observations, *filters, *outputs)
        return _first(outputs[last])

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        observations, *tensors = context.saved_tensors
        strides = context.strides
        filters, outputs = tensors[: len(strides)], tensors[len(strides) :]
        gradients = [(torch.zeros_like(each), each.new_zeros(len(each))) for each in filters]
        for part in _parts(len(observations)):
            # Prepared a second time and not kept, because uint8 frames take four times the memory
            # as float32.
            inputs = [_last(context.prepare(observations[part]))]
            inputs += [output[part] for output in outputs[:-1]]
            back = _last(gradient[part])
            for layer, stride in reversed(list(enumerate(strides))):
                filters_gradient, bias_gradient = gradients[layer]
                back = kernels.relu_backward(back, outputs[layer][part], bias_gradient)
                kernels.conv2d_weight_grad(inputs[layer], back, filters_gradient, stride)
                # The inputs of the first layer need no gradient.
                if layer:
                    shape = inputs[layer].shape
                    back = kernels.conv2d_input_grad(back, filters[layer], shape, stride)
        flat = [each for pair in gradients for each in (_first(pair[0]), pair[1])]
        return None, None, None, None, *flat


def _parts(rows: int) -> Iterator[slice]:
    return (slice(start, min(start + IMAGES, rows)) for start in range(0, rows, IMAGES))


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        inputs = inputs.contiguous()
        context.save_for_backward(inputs, weight)
        return kernels.dense(inputs, weight, bias)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = context.saved_tensors
        gradient = gradient.contiguous()
        wants_inputs, wants_weight, wants_bias = context.needs_input_grad
        return (
            kernels.matrix_product(gradient, weight) if wants_inputs else None,
            kernels.outer(gradient, inputs) if wants_weight else None,
            kernels.column_sums(gradient) if wants_bias else None,
        )


class _Tanh(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, numbers: torch.Tensor) -> torch.Tensor:
        # If e^2x is infinite in float32, the result is 1; (e^2x - 1) / (e^2x + 1) would be NaN.
        outputs = 1 - 2 / (kernels.exponentiate((2 * numbers).contiguous()) + 1)
        context.save_for_backward(outputs)
        return outputs

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        (outputs,) = context.saved_tensors
        slopes: torch.Tensor = 1 - outputs * outputs
        return gradient * slopes


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:
    apply: Callable[..., torch.Tensor] = function.apply
    return apply(*arguments)


def _last(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``[n, channels, height, width]`` as contiguous ``[n, height, width, channels]``."""
    return tensor.permute(0, 2, 3, 1).contiguous()


def _first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(0, 3, 1, 2)
