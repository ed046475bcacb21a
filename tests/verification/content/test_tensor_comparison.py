"""Tensors of two checkpoints are compared in mapped files, against numpy and safetensors."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors.numpy import save_file

from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.verification.content.tensor_comparison import (
    PIECE_BYTES,
    Tensor,
    compare_tensor,
    compare_tensors,
    map_tensors,
)
from capsule.verification.verdict import TensorDifference


@pytest.mark.slow
@given(
    arrays(np.float32, array_shapes(max_dims=2, max_side=5), elements=st.floats(width=32)),
    st.integers(0, 24),
)
def test_tensors_are_read_as_safetensors_wrote_them(tmp_path_factory, array, place):
    folder = tmp_path_factory.mktemp("tensors")
    other = array.copy()
    index = place % array.size
    other.view(np.int32).flat[index] ^= 1
    save_file({"w": array, "n": np.arange(3)}, folder / "a")
    save_file({"w": other, "n": np.arange(3)}, folder / "b")
    tensors = map_tensors(folder / "a")
    assert tensors["w"].data == array.tobytes()
    assert tensors["w"].shape == array.shape
    assert compare_tensors(folder / "a", folder / "a") == ()
    (found,) = compare_tensors(folder / "a", folder / "b")
    assert (found.name, found.elements, found.differing) == ("w", array.size, 1)
    assert found.ulp == int(np.isfinite(array.flat[index]) and np.isfinite(other.flat[index]))


def test_tensors_of_other_kinds_shapes_and_sizes(tmp_path):
    big = np.zeros(PIECE_BYTES // 2, np.float32)
    end = big.copy()
    end[-1] = 1.0
    left = {"big": big, "count": np.arange(4), "gone": np.zeros(2), "shape": np.zeros((2, 3))}
    right = {"big": end, "count": np.array([0, 1, 9, 9]), "shape": np.zeros((3, 2))}
    save_file(left, tmp_path / "a")
    save_file(right, tmp_path / "b")
    found = {each.name: each for each in compare_tensors(tmp_path / "a", tmp_path / "b")}
    assert found["big"].relative == 1.0
    assert (found["count"].differing, found["count"].ulp) == (2, None)
    assert (found["gone"].differing, found["shape"].differing) == (2, 6)


def test_what_cannot_be_compared_is_refused(tmp_path):
    (tmp_path / "bad").write_bytes(b"\xff" * 8)
    for name, code in (("bad", "CAP-V011"), ("missing", "CAP-V072")):
        with pytest.raises(CapsuleError) as caught:
            compare_tensors(tmp_path / name, tmp_path / name)
        assert caught.value.code == code


def test_a_link_in_place_of_a_checkpoint_is_not_followed(tmp_path):
    save_file({"w": np.ones(1)}, tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(CapsuleError, match="link cannot be read") as caught:
        map_tensors(tmp_path / "link")
    assert caught.value.code == "CAP-V072"
    assert "bundle or run directory" in caught.value.fix


def test_a_malformed_file_is_named_and_is_tampering(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(CapsuleError, match="empty is not a well-formed safetensors file") as caught:
        map_tensors(tmp_path / "empty")
    assert (caught.value.code, caught.value.exit_code) == ("CAP-V011", ExitCode.TAMPERED)


def floats(*numbers, kind="F32", shape=None):
    data = struct.pack(f"<{len(numbers)}{'f' if kind == 'F32' else 'd'}", *numbers)
    return Tensor(kind, (len(numbers),) if shape is None else shape, memoryview(data))


@pytest.mark.parametrize(("shape", "elements"), [((), 1), ((0, 5), 0), ((2, 3, 4), 24)])
def test_the_number_of_elements_is_the_product_of_the_sizes(shape, elements):
    assert Tensor("F32", shape, memoryview(b"")).elements == elements


def test_equal_tensors_have_no_difference():
    assert compare_tensor("w", floats(1, 2), floats(1, 2)) is None
    assert compare_tensor("w", floats(), floats()) is None
    nan = floats(float("nan"))
    assert compare_tensor("w", nan, nan) is None


@pytest.mark.parametrize(
    ("left", "right", "elements"),
    [
        (floats(1, 2), None, 2),
        (None, floats(1, 2, 3), 3),
        (floats(1, 2), floats(1, 2, 3), 3),
        (floats(1, 2), floats(1, 2, shape=(2, 1)), 2),
        (floats(1, 2), floats(1, 2, kind="F64"), 2),
    ],
)
def test_tensors_that_do_not_correspond_differ_as_a_whole(left, right, elements):
    found = compare_tensor("w", left, right)
    assert found == TensorDifference(name="w", elements=elements, differing=elements)
    assert (found.ulp, found.relative) == (None, None)


def test_numbers_that_are_not_finite_are_counted_apart():
    found = compare_tensor("w", floats(1, float("inf"), 3), floats(2, 1, 3))
    assert (found.elements, found.differing, found.nonfinite) == (3, 2, 1)
    assert (found.ulp, found.relative) == (1 << 23, 0.5)  # of 1 and 2 in float32


def test_doubles_have_a_distance_of_their_own():
    found = compare_tensor("w", floats(1, kind="F64"), floats(2, kind="F64"))
    assert found.ulp == 1 << 52


def test_the_most_distant_tensors_come_first_after_those_without_a_distance(tmp_path):
    one = np.ones(1, np.float32)
    left = {"near": one, "far": one, "count": np.zeros(1, np.int32), "same": one}
    right = {"near": np.nextafter(one, 2, dtype=np.float32), "far": one * 2,
             "count": np.ones(1, np.int32), "same": one}  # fmt: skip
    save_file(left, tmp_path / "a")
    save_file(right, tmp_path / "b")
    found = compare_tensors(tmp_path / "a", tmp_path / "b")
    assert [each.name for each in found] == ["count", "far", "near"]


def test_a_difference_in_a_later_piece_is_found():
    numbers = PIECE_BYTES // 8 + 2
    data = bytearray(numbers * 8)
    other = bytearray(data)
    other[-8:] = struct.pack("<d", 1.0)
    left, right = (Tensor("F64", (numbers,), memoryview(each)) for each in (data, other))
    found = compare_tensor("w", left, right)
    assert (found.elements, found.differing, found.relative) == (numbers, 1, 1.0)
