"""Area resize in exact integer arithmetic: equal bits on every machine and with every BLAS.

An output pixel is the mean of the input area under it (OpenCV's ``INTER_AREA``). For 210x160 to
84x84 the weights are multiples of 1/200, so the sums are integers and only ties between two grey
levels need a rule: half to even. OpenCV adds the same products in an unspecified floating-point
order, which is why its ties differ between machines.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

SIDE = 84  # Mnih et al. 2015, doi:10.1038/nature14236, Methods: frames are rescaled to 84 x 84
_FLOAT32_INTEGERS = 2**24  # float32 holds every integer up to here


class AreaResize:
    """Resize a uint8 image ``[height, width]`` to uint8 ``[84, 84]``.

    Rows and columns are resized by two float32 matrix products whose every partial sum is an
    integer below 2^24, hence exact in any order and with or without fused multiply-add. The last
    division is exact at ties, and elsewhere errs by less than the distance to the next tie, so
    ``rint`` (half to even) gives the rounding of the exact quotient.

    Raises:
        ValueError: The size is so odd that sums pass 2^24.
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
        # The weights of a block of rows are applied to each of the blocks by broadcasting.
        rows = np.matmul(self._rows, image.astype(np.float32).reshape(self._shape))
        sums: NDArray[np.float32] = np.matmul(
            rows.reshape(-1, self._columns.shape[0]), self._columns
        )
        sums /= self._total
        np.rint(sums, out=sums)
        return sums.astype(np.uint8).reshape(SIDE, SIDE)


def _block_weights(size: int, resized: int) -> NDArray[np.float32]:
    """Weigh the pixels of the smallest block that resizes to whole pixels.

    Returns:
        float32 ``[block, resized_block]``: how much of each input pixel lies under each output
        pixel, in units that make every entry an integer and every column sum to ``block``.
    """
    # For example, 210 rows are 42 blocks, in each of which 5 rows become 2.
    common = math.gcd(size, resized)
    block, resized_block = size // common, resized // common
    start = np.arange(block)[:, None] * resized_block
    target = np.arange(resized_block)[None, :] * block
    overlap = np.minimum(start + resized_block, target + block) - np.maximum(start, target)
    weights: NDArray[np.float32] = np.maximum(overlap, 0).astype(np.float32)
    return weights
