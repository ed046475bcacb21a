"""Area resize in exact integer arithmetic: equal bits on every machine and with every BLAS.

An output pixel is the mean of the input area under it (OpenCV's ``INTER_AREA``). From 210x160 to
84x84 the weights are multiples of 1/200, so sums of integers suffice, and only ties between two
grey levels need a rule: they are rounded half to even. OpenCV adds the same products in an
unspecified floating-point order, so its results at ties differ between machines.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

SIDE = 84  # Mnih et al. 2015, doi:10.1038/nature14236, Methods: frames are rescaled to 84 x 84
_FLOAT32_INTEGERS = 2**24  # float32 represents every integer up to this one


class AreaResize:
    """Resizes uint8 images ``[height, width]`` to uint8 ``[84, 84]``.

    Rows and columns are resized by two float32 matrix products. All partial sums are integers of at
    most 2^24, and therefore exact in any order and with or without fused multiply-add. The final
    division is exact at ties, and elsewhere its error is smaller than the distance to the next tie,
    so ``rint`` (half to even) rounds as it would round the exact quotient.

    Raises:
        ValueError: The greatest common divisors of the sides and 84 are so small that sums could
            exceed 2^24.
    """

    def __init__(self, height: int, width: int) -> None:
        self._rows = _block_weights(height, SIDE).T.copy()
        self._columns = _block_weights(width, SIDE)
        self._total = np.float32(self._rows.shape[1] * self._columns.shape[0])
        if 255 * self._total > _FLOAT32_INTEGERS:
            raise ValueError(f"cannot resize {height}x{width} exactly")
        self._shape = (-1, self._rows.shape[1], width)

    def __call__(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the resized image as a new uint8 ``[84, 84]``."""
        # The weights of one block of rows are applied to all blocks by broadcasting.
        rows = np.matmul(self._rows, image.astype(np.float32).reshape(self._shape))
        sums: NDArray[np.float32] = np.matmul(
            rows.reshape(-1, self._columns.shape[0]), self._columns
        )
        sums /= self._total
        np.rint(sums, out=sums)
        return sums.astype(np.uint8).reshape(SIDE, SIDE)


def _block_weights(size: int, resized: int) -> NDArray[np.float32]:
    """Return the weights of the smallest block of pixels that resizes to whole pixels.

    Returns:
        float32 ``[block, resized_block]``: the overlap of each input pixel with each output pixel,
        in units in which all weights are integers and each column sums to ``block``.
    """
    # For example, 210 rows consist of 42 blocks, in each of which 5 rows become 2.
    common = math.gcd(size, resized)
    block, resized_block = size // common, resized // common
    start = np.arange(block)[:, None] * resized_block
    target = np.arange(resized_block)[None, :] * block
    overlap = np.minimum(start + resized_block, target + block) - np.maximum(start, target)
    weights: NDArray[np.float32] = np.maximum(overlap, 0).astype(np.float32)
    return weights
