"""Arrays of numpy and safetensors files are compared element by element, against numpy."""

import io
import json
import re
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save as save_safetensors

from capsule.verification.content.arrays import compare_numpy, compare_safetensors, note_tensors
from capsule.verification.content.parts import Findings, NotComparableError
from capsule.verification.content.tensor_comparison import Tensor
from tests.verification.content.comparing import CONTEXT, Trap, compare, facts, npy, npz, summary


def test_arrays_are_compared_element_by_element():
    left = np.linspace(0, 1, 12, dtype=np.float64).reshape(3, 4)
    right = left.copy()
    right[1, 1] = np.nextafter(right[1, 1], 2)
    found = compare(npy(left), npy(right))
    assert found.format == "numpy array"
    assert found.parts[0].found == "1 of 12 elements differs, up to 1 ulp apart"
    assert summary(compare(npy(left), npy(left.T))) == [("header", "content")]
    found = compare(npz(w=left, b=np.ones(2)), npz(w=right, b=np.ones(2)))
    assert (found.equal, summary(found)) == (("b.npy",), [("w.npy: elements", "content")])
    objects = np.array([Trap("/nonexistent/x", 1)], dtype=object)
    assert compare(npy(objects), npy(left)).format == "bytes"


def test_safetensors_are_compared_tensor_by_tensor_and_by_their_metadata():
    tensors = {"a": np.ones(3, np.float32), "b": np.zeros(2, np.int64)}
    left = save_safetensors(tensors, {"made": "2024-11-22T07:55:01"})
    found = compare(left, save_safetensors(tensors, {"made": "2025-11-22T07:55:01"}))
    assert (found.format, set(found.equal)) == ("safetensors", {"a", "b"})
    assert summary(found) == [("metadata.made", "date")]
    other = save_safetensors({**tensors, "a": np.full(3, 2, np.float32)}, {"made": "x"})
    found = compare(left, other)
    assert summary(found) == [("a", "content"), ("metadata.made", "content")]


KINDS = ["<f8", "<f4", "<f2", "<i8", "<i4", "<i2", "|i1", "<u8", "<u4", "<u2", "|u1", ">f8", ">i4",
         "<c8", "|b1"]  # fmt: skip


@given(
    st.sampled_from(KINDS), st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1)
)
def test_as_many_elements_differ_as_numpy_counts(kind, pairs):
    left, right = (np.array(side).astype(kind) for side in zip(*pairs, strict=True))
    differing = int((left != right).sum())
    found = compare_numpy(npy(left), npy(right), CONTEXT)
    if differing:
        nouns, verb = "s" * (len(pairs) > 1), "differs" if differing == 1 else "differ"
        said = f"{differing} of {len(pairs)} element{nouns} {verb}"
        assert re.match(rf"{said}\b", found.parts[0].found)
    else:
        assert (found.nature, found.equal) == ("packaging", ("elements",))


@pytest.mark.parametrize(
    ("kind", "named", "ending"),
    [
        ("<f8", "F64 [1]", ", up to 4,503,599,627,370,496 ulp apart"),
        ("<f4", "F32 [1]", ", up to 8,388,608 ulp apart"),
        ("<f2", "F16 [1]", "1 of 1 element differs"),
        (">f4", "F32, big-endian [1]", "1 of 1 element differs"),
        ("|u1", "U8 [1]", "1 of 1 element differs"),
    ],
)
def test_little_endian_floats_of_four_and_eight_bytes_have_a_distance(kind, named, ending):
    left, right = (npy(np.array([number], kind)) for number in (1, 2))
    ((_, claimed, found),) = facts(compare_numpy(left, right, CONTEXT))
    assert claimed == named
    assert found.endswith(ending)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (3,), (2, 1, 2)])
def test_arrays_of_every_shape_are_read(shape):
    array = np.ones(shape)
    assert compare_numpy(npy(array), npy(array), CONTEXT).equal == ("elements",)
    assert compare_numpy(npy(array), npy(array.astype("<f4")), CONTEXT).parts[0].where == "header"


def test_the_order_of_the_elements_is_part_of_the_header():
    array = np.arange(6).reshape(2, 3)
    found = compare_numpy(npy(array), npy(np.asfortranarray(array)), CONTEXT)
    assert found.parts[0].where == "header"
    assert "'fortran_order': True" in found.parts[0].found


def test_the_version_of_the_format_is_packaging():
    first = npy(np.ones(3))
    length = int.from_bytes(first[8:10], "little")
    second = b"\x93NUMPY\x02\x00" + struct.pack("<I", length) + first[10:]
    assert np.array_equal(np.load(io.BytesIO(second)), np.ones(3))
    assert compare(first, second).nature == "packaging"


def test_a_header_of_a_later_version_has_a_longer_length():
    files = []
    for last in (2, 3):
        stream = io.BytesIO()
        np.lib.format.write_array(stream, np.array([1.0, last]), version=(2, 0))
        files.append(stream.getvalue())
    found = compare_numpy(*files, CONTEXT)
    assert found.parts[0].found.startswith("1 of 2 elements differs")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY\x01\x00",
        b"\x93NUMPY\x01\x63" + npy(np.ones(3))[8:],
        b"\x93NUMPY\x04\x00" + npy(np.ones(3))[8:],
        npy(np.ones(3))[:-1],
        npy(np.ones(3)) + b"\0",
        npy(np.array(["text"])),
        npy(np.array([(1, 2.0)], dtype=[("a", "<i4"), ("b", "<f8")])),
        npy(np.array(["2024-01-01"], dtype="M8[D]")),
        npy(np.ones(3)).replace(b"'shape': (3,)", b"'shape': (4,)"),
    ],
    ids=[
        "empty",
        "cut",
        "minor version",
        "version",
        "short",
        "long",
        "texts",
        "structured",
        "dates",
        "shape",
    ],
)
def test_a_file_that_is_not_an_array_of_numbers_is_not_compared(data):
    with pytest.raises(NotComparableError):
        compare_numpy(data, npy(np.ones(3)), CONTEXT)


# --- safetensors ----------------------------------------------------------------------------------


def test_a_tensor_that_is_missing_or_of_another_kind_is_described():
    one = np.ones(2, np.float32)
    left = save_safetensors({"a": one, "b": one, "c": one, "same": one})
    right = save_safetensors({"b": one.astype("f8"), "c": one.reshape(1, 2), "d": one, "same": one})
    found = compare_safetensors(left, right, CONTEXT)
    assert facts(found) == [
        ("a", "F32 [2]", "missing"),
        ("b", "F32 [2]", "F64 [2]"),
        ("c", "F32 [2]", "F32 [1, 2]"),
        ("d", "missing", "F32 [2]"),
    ]
    assert found.equal == ("same",)


def test_another_order_of_the_header_is_packaging():
    data = save_safetensors({"a": np.ones(1, np.float32), "b": np.ones(1, np.float32)})
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    turned = json.dumps(dict(reversed(header.items()))).encode()
    other = struct.pack("<Q", len(turned)) + turned + data[8 + length :]
    assert compare_safetensors(data, other, CONTEXT).nature == "packaging"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        save_safetensors({"a": np.ones(2)})[:-1],
        save_safetensors({"a": np.ones(2)}) + b"\0",
        struct.pack("<Q", 2) + b"[]",
    ],
    ids=["empty", "endless header", "cut", "longer", "a list"],
)
def test_a_malformed_safetensors_file_is_not_compared(data):
    good = save_safetensors({"a": np.ones(2)})
    for pair in ((data, good), (good, data)):
        with pytest.raises(NotComparableError, match="not a well-formed safetensors file"):
            compare_safetensors(*pair, CONTEXT)


def test_a_tensor_is_noted_as_equal_or_with_its_differences():
    left, right = (
        Tensor("I32", (3,), memoryview(struct.pack("<3i", 1, 2, last))) for last in (3, 4)
    )
    found = Findings("test")
    note_tensors("same", left, left, found)
    note_tensors("other", left, right, found)
    note_tensors("gone", left, None, found)
    assert found.equal == ["same"]
    assert facts(found) == [
        ("other", "I32 [3]", "1 of 3 elements differs"),
        ("gone", "I32 [3]", "missing"),
    ]
