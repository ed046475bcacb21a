"""Frames that are several images, or images and numbers, as bytes.

An agent may see two cameras, or numbers beside an image: a direction, an energy. Such a frame is a
vector of uint8: the images in C order, one after the other, then each number as a little-endian
float32. So replays, unrolls, traces and the messages of actors hold it like any other frame; only
the network takes it apart.
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
        numbers: How many numbers follow the images.
        further: Shapes of the images after the first.
    """

    image: tuple[int, ...]
    numbers: int = 0
    further: tuple[tuple[int, ...], ...] = ()

    @property
    def packed(self) -> bool:
        """Whether a frame is a vector of bytes; others have any element type."""
        return bool(self.numbers or self.further)

    @property
    def images(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of all images."""
        return (self.image, *self.further)

    @property
    def part_bytes(self) -> list[int]:
        """Bytes of each image in a packed frame, and of the numbers."""
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
            images: ``[..., *image]`` of each image.
            numbers: Of any type, ``[..., n]`` each.

        Returns:
            uint8 ``[..., *packed_shape]``.
        """
        rows = images[0].shape[: images[0].ndim - len(self.image)]
        flat = [image.reshape(*rows, -1) for image in images]
        flat += [np.ascontiguousarray(each, _NUMBER).view(np.uint8) for each in numbers]
        packed: NDArray[np.uint8] = np.concatenate(flat, axis=-1)
        return packed
