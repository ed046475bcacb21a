"""The fused loops of ``libcapsule-kernels.so``, on CPU tensors' memory.

They give the bits of the same operations done one by one; numpy does them in the tests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from capsule.native import native_part

_library = ctypes.CDLL(str(native_part("libcapsule-kernels.so")))  # calls release the GIL


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
    """Update in place as ``capsule.training.optimizer`` has it.

    Args:
        weights: float32 ``[size]``, contiguous, as are the others.
        mean: Running mean of the gradient.
        square: Running mean of its square.
        parts: The gradient is their sum, in this order.
        decay: Gradient momentum.
        square_decay: Squared gradient momentum.
        floor: Minimum squared gradient.
        rate: Learning rate.
    """
    pointers = (ctypes.c_void_p * len(parts))(*(part.data_ptr() for part in parts))
    _library.capsule_centred_rmsprop(
        ctypes.c_void_p(weights.data_ptr()),
        ctypes.c_void_p(mean.data_ptr()),
        ctypes.c_void_p(square.data_ptr()),
        pointers,
        ctypes.c_int64(len(parts)),
        ctypes.c_int64(weights.numel()),
        *map(ctypes.c_float, (decay, 1 - decay, square_decay, 1 - square_decay, floor, rate)),
    )


def interleave(images: torch.Tensor, scale: float) -> torch.Tensor:
    """Return images channels-last, as numbers.

    Args:
        images: uint8 ``[batch, channels, height, width]``; each image contiguous.
        scale: Factor of every number.

    Returns:
        float32 ``[batch, height, width, channels]``.
    """
    batch, channels, height, width = images.shape
    # Not torch.empty, which fills new memory when algorithms must be deterministic.
    result = torch.from_numpy(np.empty((batch, height, width, channels), np.float32))
    _library.capsule_interleave(
        ctypes.c_void_p(images.data_ptr()),
        ctypes.c_int64(batch),
        ctypes.c_int64(images.stride(0)),
        ctypes.c_int64(channels),
        ctypes.c_int64(height * width),
        ctypes.c_float(scale),
        ctypes.c_void_p(result.data_ptr()),
    )
    return result
