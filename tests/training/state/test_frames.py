"""Frames of several images and numbers: their layout, and their bytes as written down."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from capsule.training.state.frames import FrameLayout


def test_a_packed_frame_is_the_image_and_then_little_endian_numbers():
    layout = FrameLayout((1, 3), 1)
    packed = layout.pack([np.array([[1, 2, 3]], np.uint8)], [np.array([-2.0])])
    assert packed.tobytes() == bytes([1, 2, 3, 0, 0, 0, 0xC0])


@pytest.mark.parametrize(
    ("layout", "packed", "parts"),
    [
        (FrameLayout((4,)), False, [4, 0]),
        (FrameLayout((3, 5, 6)), False, [90, 0]),
        (FrameLayout((3, 5, 6), 2), True, [90, 8]),
        (FrameLayout((3, 5, 6), 0, ((1, 2),)), True, [90, 2, 0]),
        (FrameLayout((3, 5, 6), 1, ((1, 2), (7, 7))), True, [90, 2, 49, 4]),
    ],
)
def test_a_frame_is_packed_if_there_is_more_in_it_than_one_image(layout, packed, parts):
    assert layout.packed == packed
    assert layout.part_bytes == parts
    assert layout.packed_shape == (sum(parts),)
    assert layout.images[0] == layout.image
    assert layout.images[1:] == layout.further


SIDES = st.tuples(st.integers(1, 3), st.integers(1, 4))


@settings(max_examples=40)
@given(
    st.lists(SIDES, min_size=1, max_size=3),
    st.lists(st.integers(0, 3), max_size=2),
    st.lists(st.integers(1, 3), max_size=2),
    st.data(),
)
def test_each_row_has_its_images_in_order_and_then_its_numbers(shapes, counts, rows, data):
    layout = FrameLayout(shapes[0], sum(counts), tuple(shapes[1:]))
    images = [data.draw(arrays.arrays(np.uint8, (*rows, *shape))) for shape in shapes]
    floats = st.floats(allow_nan=False, width=32)
    numbers = [
        data.draw(arrays.arrays(np.float32, (*rows, count), elements=floats)) for count in counts
    ]
    packed = layout.pack(images, numbers)
    assert packed.dtype == np.uint8
    assert packed.shape == (*rows, *layout.packed_shape)
    for row in np.ndindex(*rows):
        expected = b"".join(image[row].tobytes() for image in images)
        expected += b"".join(struct.pack("<f", x) for part in numbers for x in part[row].tolist())
        assert packed[row].tobytes() == expected


@pytest.mark.parametrize("kind", [np.float64, np.int64, np.bool_, ">f4"])
def test_numbers_of_any_type_become_float32(kind):
    packed = FrameLayout((1,), 2).pack([np.array([9], np.uint8)], [np.array([1, 0], kind)])
    assert packed.tobytes() == bytes([9]) + struct.pack("<2f", 1.0, 0.0)


def test_images_and_numbers_need_not_be_contiguous():
    images = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)[:, :, ::2]
    numbers = np.arange(8, dtype=np.float32).reshape(2, 4)[:, 1::2]
    packed = FrameLayout((3, 2), 2).pack([images], [numbers])
    assert packed[1, :6].tolist() == [12, 14, 16, 18, 20, 22]
    assert packed[1, 6:].tobytes() == struct.pack("<2f", 5.0, 7.0)
