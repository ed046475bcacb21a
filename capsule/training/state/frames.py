"""Frames that are an image and numbers, as bytes.

An agent may see numbers beside an image: a direction, an energy. Such a frame is a vector of
uint8: the image in C order, then each number as a little-endian float32. So replays, unrolls,
traces and the messages of actors hold it like any other frame; only the network takes it apart.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_NUMBER = np.dtype("<f4")


class FrameLayout(NamedTuple):
    """The layout of a frame.

    Attributes:
        image: Shape of the image, or of the whole frame if there are no numbers.
        numbers: How many numbers follow it; 0: the frame is not packed, and has any element type.
    """

    image: tuple[int, ...]
    numbers: int = 0

    @property
    def image_bytes(self) -> int:
        """Bytes of the image in a packed frame."""
        return math.prod(self.image)

    @property
    def packed_shape(self) -> tuple[int]:
        """Shape of a packed frame."""
        return (self.image_bytes + self.numbers * _NUMBER.itemsize,)

    def pack(self, images: NDArray[np.uint8], numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Return packed frames.

        Args:
            images: ``[..., *image]``.
            numbers: ``[..., numbers]``.

        Returns:
            uint8 ``[..., *packed_shape]``.
        """
        rows = images.shape[: images.ndim - len(self.image)]
        flat = images.reshape(*rows, self.image_bytes)
        as_bytes = np.ascontiguousarray(numbers, _NUMBER).view(np.uint8)
        packed: NDArray[np.uint8] = np.concatenate((flat, as_bytes), axis=-1)
        return packed
