"""Calls of the C functions of ``libcapsule-kernels.so``, which work on the memory of CPU tensors.

A fused loop gives the same bits as its operations one by one, as the tests check with numpy. Unless
a function states otherwise, every tensor is contiguous float32, and images and filters are
channels-last: ``[rows, height, width, channels]`` and ``[filters, size, size, channels]``. The
order of every sum is described in :mod:`capsule.training.layers.backends`.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence

import numpy as np
import torch

from capsule.native import native_part

ALIGNMENT = 64  # bytes: a vector of AVX-512, and a cache line
INSTRUCTION_SETS = ("none", "AVX2", "AVX-512")
_WIDE = 65  # rows and units from which a dense layer fills its vectors without being transposed
_library = ctypes.CDLL(str(native_part("libcapsule-kernels.so")))  # calls release the GIL


class _Convolution(ctypes.Structure):
    """``Convolution`` of ``layers.c``."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("rows", "height", "width", "channels"),
            *("filters", "size", "stride", "down", "across"),
        )
    )


_TYPES = {
    "p": ctypes.c_void_p,
    "n": ctypes.c_int64,
    "f": ctypes.c_float,
    "i": ctypes.c_int,
    "c": ctypes.POINTER(_Convolution),
}
_SIGNATURES = {  # types of the arguments of each C function, one letter of _TYPES each
    "adam": "ppppn" + 9 * "f",
    "centred_rmsprop": "pppp" + "nn" + 6 * "f",
    "column_sums": "ppnn",
    "conv2d_input_grad": "cpppp",
    "conv2d_weight_grad": "cppp",
    "convolution": "cpppppn",
    "dense": "ppppnnn",
    "exponentiate": "ppn",
    "instruction_set": "",
    "interleave": "pnnnnnfp",
    "limit_instruction_set": "i",
    "log_softmax": "ppppnn",
    "log_softmax_backward": "ppppppnn",
    "lstm": "pppppppnn",
    "lstm_backward": "ppppppnn",
    "matrix_product": "pppnnn",
    "narrow_dense": "pppppnnnn",
    "outer": "pnppnnn",
    "rectify": "ppnn",
    "relu_backward": "ppppnn",
    "rmsprop": "ppppn" + 6 * "f",
    "sum_of_squares": "pn",
}
_RESULTS = {
    "sum_of_squares": ctypes.c_double,
    "instruction_set": ctypes.c_int,
    "limit_instruction_set": ctypes.c_int,
}
# Undeclared, an integer would be passed as a C int of 32 bits, which truncates an address.
for _name, _letters in _SIGNATURES.items():
    _function = getattr(_library, f"capsule_{_name}")
    _function.argtypes = [_TYPES[letter] for letter in _letters]
    _function.restype = _RESULTS.get(_name)


def centred_rmsprop(
    weights: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    parts: Sequence[torch.Tensor],
    *,
    decay: float,
    square_decay: float,
    floor: float,
    rate: float,
) -> None:
    """Update ``weights``, ``mean`` and ``square``, ``[size]`` each, in place.

    :mod:`capsule.training.optimizers.centred_rmsprop` has the equations. The gradient is the sum of
    ``parts``, ``[size]`` each, in this order.
    """
    _library.capsule_centred_rmsprop(
        *map(_pointer, (weights, mean, square)),
        (ctypes.c_void_p * len(parts))(*map(_pointer, parts)),
        len(parts),
        weights.numel(),
        decay,
        # Complements are computed in float64, and ctypes rounds them to float32.
        1 - decay,
        square_decay,
        1 - square_decay,
        floor,
        rate,
    )


def adam(
    weights: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    gradient: torch.Tensor,
    *,
    factor: float,
    decay: float,
    square_decay: float,
    correction: float,
    square_correction: float,
    epsilon: float,
    rate: float,
) -> None:
    """Update ``weights``, ``mean`` and ``square``, ``[size]`` each, in place.

    :mod:`capsule.training.optimizers.adam` has the equations. ``factor`` clips ``gradient``,
    ``[size]``. The corrections are ``1 - beta_1^t`` and ``1 - beta_2^t``.
    """
    decays = decay, 1 - decay, square_decay, 1 - square_decay
    _library.capsule_adam(
        *map(_pointer, (weights, mean, square, gradient)),
        weights.numel(),
        factor,
        *decays,
        correction,
        square_correction,
        epsilon,
        rate,
    )


def rmsprop(
    weights: torch.Tensor,
    square: torch.Tensor,
    step: torch.Tensor,
    gradient: torch.Tensor,
    *,
    factor: float,
    decay: float,
    momentum: float,
    epsilon: float,
    rate: float,
) -> None:
    """Update ``weights``, ``square`` and ``step``, ``[size]`` each, in place.

    :mod:`capsule.training.optimizers.rmsprop` has the equations. ``factor`` clips ``gradient``,
    ``[size]``.
    """
    _library.capsule_rmsprop(
        *map(_pointer, (weights, square, step, gradient)),
        weights.numel(),
        factor,
        decay,
        1 - decay,
        momentum,
        epsilon,
        rate,
    )


def sum_of_squares(values: torch.Tensor) -> float:
    """Return the sum of the squares, first to last in float64, of float32 ``[size]``."""
    total: float = _library.capsule_sum_of_squares(_pointer(values), values.numel())
    return total


def lstm(
    inputs: torch.Tensor,
    recurrent: torch.Tensor,
    before: torch.Tensor,
    *,
    gates: torch.Tensor,
    cell: torch.Tensor,
    squashed: torch.Tensor,
    hidden: torch.Tensor,
) -> None:
    """Take one step of the LSTM of :mod:`capsule.training.networks.recurrent`.

    Args:
        inputs: Contribution of the inputs to the gates, ``[rows, 4 units]``.
        recurrent: Contribution of the hidden state to the gates, ``[rows, 4 units]``.
        before: Cell before the step, ``[rows, units]``.
        gates: Memory for the gates ``i``, ``f``, ``g`` and ``o``, ``[rows, 4 units]``.
        cell: Memory for the cell after the step, ``[rows, units]``.
        squashed: Memory for the tanh of that cell, ``[rows, units]``.
        hidden: Memory for the hidden state after the step, ``[rows, units]``.
    """
    rows, units = before.shape
    pointers = map(_pointer, (inputs, recurrent, before, gates, cell, squashed, hidden))
    _library.capsule_lstm(*pointers, rows, units)


def lstm_backward(
    gates: torch.Tensor,
    before: torch.Tensor,
    squashed: torch.Tensor,
    hidden_gradient: torch.Tensor,
    *,
    cell_gradient: torch.Tensor,
    gate_gradients: torch.Tensor,
) -> None:
    """Differentiate :func:`lstm`.

    Args:
        gates: As :func:`lstm` computed them, ``[rows, 4 units]``.
        before: Cell before the step, ``[rows, units]``.
        squashed: As :func:`lstm` computed it, ``[rows, units]``.
        hidden_gradient: Gradient with respect to the hidden state after it, ``[rows, units]``.
        cell_gradient: Gradient with respect to the cell after the step, ``[rows, units]``; replaced
            by the gradient with respect to the cell before it.
        gate_gradients: Memory for the gradient with respect to ``inputs``, which is also the one
            with respect to ``recurrent``, ``[rows, 4 units]``.
    """
    rows, units = before.shape
    tensors = gates, before, squashed, hidden_gradient, cell_gradient, gate_gradients
    _library.capsule_lstm_backward(*map(_pointer, tensors), rows, units)


def exponentiate(numbers: torch.Tensor) -> torch.Tensor:
    """Return ``e^x``, of any shape, computed in float64.

    A result that is too small or too large for float32 is 0 or infinite.
    """
    result = _empty(*numbers.shape)
    _library.capsule_exponentiate(_pointer(numbers), _pointer(result), numbers.numel())
    return result


def log_softmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``ln p``, ``p = softmax(logits)`` and ``-sum p ln p`` of each row.

    They are computed in float64, with sums from first to last.

    Args:
        logits: ``[rows, actions]``.

    Returns:
        ``[rows, actions]`` twice, and ``[rows]``.
    """
    logarithms, probabilities = (_empty(*logits.shape) for _ in range(2))
    entropies = _empty(len(logits))
    tensors = logits, logarithms, probabilities, entropies
    _library.capsule_log_softmax(*map(_pointer, tensors), *logits.shape)
    return logarithms, probabilities, entropies


def log_softmax_backward(
    logarithms: torch.Tensor,
    probabilities: torch.Tensor,
    entropies: torch.Tensor,
    logarithm_gradients: torch.Tensor,
    entropy_gradients: torch.Tensor,
) -> torch.Tensor:
    """Differentiate :func:`log_softmax`, of which the first three arguments are the results.

    Args:
        logarithms: ``[rows, actions]``.
        probabilities: ``[rows, actions]``.
        entropies: ``[rows]``.
        logarithm_gradients: Gradient with respect to ``logarithms``, ``[rows, actions]``.
        entropy_gradients: Gradient with respect to ``entropies``, ``[rows]``.

    Returns:
        The gradient with respect to the logits, ``[rows, actions]``.
    """
    result = _empty(*logarithms.shape)
    known = logarithms, probabilities, entropies
    tensors = *known, logarithm_gradients, entropy_gradients, result
    _library.capsule_log_softmax_backward(*map(_pointer, tensors), *logarithms.shape)
    return result


def interleave(
    images: torch.Tensor, scale: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return uint8 images channels-last, as float32.

    Args:
        images: uint8 ``[batch, channels, height, width]``; copied first unless each channel of an
            image is contiguous. Frame stacks may share the memory of their frames.
        scale: Factor of every pixel.
        out: Memory for the result; new memory by default.

    Returns:
        float32 ``[batch, height, width, channels]``.
    """
    batch, channels, height, width = images.shape
    if images.stride()[2:] != (width, 1):
        images = images.contiguous()
    result = _empty(batch, height, width, channels) if out is None else out
    _library.capsule_interleave(
        _pointer(images),
        batch,
        images.stride(0),
        channels,
        images.stride(1),
        height * width,
        scale,
        _pointer(result),
    )
    return result


def limit_instruction_set(name: str) -> str:
    """Use no wider vector instructions than those of ``name`` from now on, in any thread.

    This changes the speed of products, and never a result. It is for tests and benchmarks.

    Args:
        name: One of :data:`INSTRUCTION_SETS`.

    Returns:
        The instruction set that is used: a narrower one where the processor lacks ``name``.

    Raises:
        ValueError: ``name`` is not one of them.
    """
    if name not in INSTRUCTION_SETS:
        raise ValueError(f"{name!r} is not one of {', '.join(map(repr, INSTRUCTION_SETS))}")
    return INSTRUCTION_SETS[_library.capsule_limit_instruction_set(INSTRUCTION_SETS.index(name))]


def instruction_set() -> str:
    """Return the element of :data:`INSTRUCTION_SETS` that products use."""
    return INSTRUCTION_SETS[_library.capsule_instruction_set()]


def has_products() -> bool:
    """Return whether this processor has AVX2 and FMA, which the functions below need."""
    return instruction_set() != "none"


def convolution(
    images: torch.Tensor,
    filters: torch.Tensor,
    bias: torch.Tensor,
    stride: int,
    *,
    rectified: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the convolution ``images * filters + bias``, ``[rows, down, across, filters]``.

    Args:
        images: ``[rows, height, width, channels]``.
        filters: ``[filters, size, size, channels]``.
        bias: ``[filters]``.
        stride: Stride in both directions.
        rectified: Whether negative results are set to zero.
        out: Memory for the result; new memory by default.
    """
    shape = _convolution(images.shape, filters.shape, stride)
    result = convolved(images, filters, stride) if out is None else out
    _library.capsule_convolution(
        ctypes.byref(shape),
        *map(_pointer, (images, filters, bias, result)),
        _scratch(filters.numel()),  # for the transposed filters
        rectified,
    )
    return result


def convolved(
    images: torch.Tensor, filters: torch.Tensor, stride: int, rows: int | None = None
) -> torch.Tensor:
    """Return memory for the results of :func:`convolution`, ``[rows, down, across, filters]``.

    Args:
        images: ``[batch, height, width, channels]``.
        filters: ``[filters, size, size, channels]``.
        stride: Stride in both directions.
        rows: Number of images for which there is room; as many as ``images`` by default.
    """
    shape = _convolution(images.shape, filters.shape, stride)
    return _empty(shape.rows if rows is None else rows, shape.down, shape.across, shape.filters)


def rectify(values: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Set ``values``, ``[rows, units]``, to ``max(values + bias, 0)``, and return it.

    Args:
        values: Changed in place.
        bias: ``[units]``.
    """
    _library.capsule_rectify(_pointer(values), _pointer(bias), *values.shape)
    return values


def relu_backward(
    gradient: torch.Tensor,
    outputs: torch.Tensor,
    bias: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Differentiate a rectifier and the bias before it.

    Args:
        gradient: Gradient with respect to ``outputs``, of their shape.
        outputs: Results of the rectifier, ``[rows, down, across, filters]`` or ``[rows, units]``.
        bias: Gradient with respect to the bias, ``[filters]`` or ``[units]``, to which the sum over
            these rows is added in place.
        out: Memory for the result; new memory by default.

    Returns:
        The gradient with respect to the rectifier's inputs, of the shape of ``outputs``.
    """
    through = _empty(*outputs.shape) if out is None else out
    *rows, columns = outputs.shape
    _library.capsule_relu_backward(
        *map(_pointer, (gradient, outputs, through, bias)), math.prod(rows), columns
    )
    return through


def conv2d_weight_grad(
    images: torch.Tensor, gradient: torch.Tensor, filters: torch.Tensor, stride: int
) -> None:
    """Differentiate a convolution with respect to its filters.

    Args:
        images: Its inputs, ``[rows, height, width, channels]``.
        gradient: Gradient with respect to its results, ``[rows, down, across, filters]``.
        filters: Gradient with respect to the filters, ``[filters, size, size, channels]``, to which
            the sum over these images is added in place.
        stride: Stride in both directions.
    """
    shape = _convolution(images.shape, filters.shape, stride)
    _library.capsule_conv2d_weight_grad(
        ctypes.byref(shape), *map(_pointer, (images, gradient, filters))
    )


def conv2d_input_grad(
    gradient: torch.Tensor,
    filters: torch.Tensor,
    images: torch.Size,
    stride: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient of a convolution with respect to its images.

    Args:
        gradient: Gradient with respect to its results, ``[rows, down, across, filters]``.
        filters: Its filters, ``[filters, size, size, channels]``.
        images: Shape of its images, which is that of the result.
        stride: Stride in both directions.
        out: Memory for the result; new memory by default.
    """
    result = _empty(*images) if out is None else out
    shape = _convolution(images, filters.shape, stride)
    _library.capsule_conv2d_input_grad(
        ctypes.byref(shape),
        *map(_pointer, (gradient, filters, result)),
        _scratch(filters.numel()),  # for the filters in another order
    )
    return result


def dense(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``inputs weight^T + bias``, ``[rows, units]``.

    Args:
        inputs: ``[rows, in]``.
        weight: ``[units, in]``.
        bias: ``[units]``; None for no bias.
        out: Memory for the result; new memory by default.
    """
    (rows, fan_in), units = inputs.shape, weight.shape[0]
    result = _empty(rows, units) if out is None else out
    tensors = inputs, weight, bias, result
    # With few rows or units the transposed product fills the vectors. Each element is the same
    # chain of multiply-adds in both, and so has the same bits.
    if min(rows, units) >= _WIDE:
        _library.capsule_dense(*map(_pointer, tensors), rows, fan_in, units)
    else:
        lanes = _lanes(rows)
        scratch = _scratch((fan_in + units) * lanes)
        _library.capsule_narrow_dense(*map(_pointer, tensors), scratch, rows, fan_in, units, lanes)
    return result


def matrix_product(
    left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``left right``, ``[rows, columns]``.

    Args:
        left: ``[rows, steps]``.
        right: ``[steps, columns]``.
        out: Memory for the result; new memory by default.
    """
    (rows, steps), columns = left.shape, right.shape[1]
    result = _empty(rows, columns) if out is None else out
    _library.capsule_matrix_product(*map(_pointer, (left, right, result)), rows, columns, steps)
    return result


def outer(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``left^T right``, ``[rows, columns]``.

    Args:
        left: ``[steps, rows]``; its rows need not follow one another in memory.
        right: ``[steps, columns]``.
        out: Memory for the result; new memory by default.
    """
    (steps, rows), columns = left.shape, right.shape[1]
    result = _empty(rows, columns) if out is None else out
    _library.capsule_outer(
        _pointer(left),
        left.stride(0),
        *map(_pointer, (right, result)),
        rows,
        columns,
        steps,
    )
    return result


def column_sums(matrix: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sum of the rows of a matrix, from first to last: ``[columns]``.

    Args:
        matrix: ``[rows, columns]``.
        out: Memory for the result; new memory by default.
    """
    result = _empty(matrix.shape[1]) if out is None else out
    _library.capsule_column_sums(_pointer(matrix), _pointer(result), *matrix.shape)
    return result


def _lanes(rows: int) -> int:
    """Return the smallest number of rows, at least ``rows``, that fills whole vectors."""
    return next((lanes for lanes in (1, 4, 8) if rows <= lanes), -(-rows // 16) * 16)


def _convolution(images: torch.Size, filters: torch.Size, stride: int) -> _Convolution:
    size = filters[1]
    down, across = (1 + (side - size) // stride for side in images[1:3])
    return _Convolution(*images, filters[0], size, stride, down, across)


def _empty(*shape: int) -> torch.Tensor:
    """Return uninitialized memory, aligned to :data:`ALIGNMENT`, which the caller fills.

    ``torch.empty`` would fill it with NaN first (``determinism.fill_uninitialized_memory``).
    """
    size = math.prod(shape)
    memory = torch.from_numpy(np.empty(size + ALIGNMENT // 4, np.float32))
    # numpy guarantees a smaller alignment.
    start = -memory.data_ptr() % ALIGNMENT // 4
    return memory[start : start + size].view(shape)


class _Scratch(threading.local):
    """Memory for the temporary results of a call, one for each thread."""

    def __init__(self) -> None:
        self.memory = _empty(0)


_scratch_memory = _Scratch()


def _scratch(size: int) -> int | None:
    """Return the address of memory for ``size`` numbers, which the next call may overwrite."""
    if _scratch_memory.memory.numel() < size:
        _scratch_memory.memory = _empty(size)
    return _pointer(_scratch_memory.memory)


def _pointer(tensor: torch.Tensor | None) -> int | None:
    """Return the address of a tensor's elements in the memory of this process; None for None.

    Raises:
        ValueError: The tensor is not on the CPU.
    """
    if tensor is None:
        return None
    if not tensor.is_cpu:
        raise ValueError(f"the kernels take tensors of the CPU, not of {tensor.device}")
    return tensor.data_ptr()
