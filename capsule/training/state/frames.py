"""Packed frames: several images, or images and numbers, as one vector of bytes.

An agent may see two cameras, or numbers beside an image, such as a direction. Such a frame is a
vector of uint8: the images in C order, one after the other, then each number as a little-endian
float32. Replay memories, unrolls, traces and actors treat it like any other frame; only the network
unpacks it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_NUMBER = np.dtype("<f4")


class FrameLayout(NamedTuple):
    """The layout of a frame.

    Attributes:
        image: Shape of the first image, or of the whole frame if it is not packed.
        numbers: Number of the numbers that follow the images.
        further: Shapes of the images after the first.
    """

    image: tuple[int, ...]
    numbers: int = 0
    further: tuple[tuple[int, ...], ...] = ()

    @property
    def packed(self) -> bool:
        """Whether a frame is a vector of bytes; other frames have any shape and element type."""
        return bool(self.numbers or self.further)

    @property
    def images(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of all images."""
        return (self.image, *self.further)

    @property
    def part_bytes(self) -> list[int]:
        """The number of bytes of each image in a packed frame, then of all numbers."""
        return [*map(math.prod, self.images), self.numbers * _NUMBER.itemsize]

    @property
    def packed_shape(self) -> tuple[int]:
        """Shape of a packed frame."""
        return (sum(self.part_bytes),)

    def pack(
        self, images: Sequence[NDArray[np.uint8]], numbers: Sequence[NDArray[Any]]
    ) -> NDArray[np.uint8]:
        """Return packed frames.

        Args:
            images: Each image, uint8 ``[..., *image]``.
            numbers: Vectors of any type, ``[..., n]`` each.

        Returns:
            uint8 ``[..., *packed_shape]``.
        """
        rows = images[0].shape[: images[0].ndim - len(self.image)]
        flat = [image.reshape(*rows, -1) for image in images]
        flat += [np.ascontiguousarray(each, _NUMBER).view(np.uint8) for each in numbers]
        packed: NDArray[np.uint8] = np.concatenate(flat, axis=-1)
        return packed
