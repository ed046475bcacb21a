"""Reading tensors without a tensor library, against safetensors itself."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from capsule.experiment.contract import tensor_digest
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.verification.consistency import tensor_digests


def test_digests_are_those_of_the_tensors(tmp_path):
    tensors = {
        "weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "count": np.array([7], dtype=np.int64),
        "empty": np.zeros((0, 2), dtype=np.float32),
    }
    save_file(tensors, tmp_path / "t.safetensors")
    names = {"float32": "F32", "int64": "I64"}
    assert tensor_digests(tmp_path / "t.safetensors") == {
        name: tensor_digest(names[str(array.dtype)], array.shape, array.tobytes())
        for name, array in tensors.items()
    }


def test_shape_and_dtype_are_part_of_the_digest():
    data = bytes(16)
    assert len({tensor_digest("F32", (4,), data), tensor_digest("F32", (2, 2), data),
                tensor_digest("I32", (4,), data)}) == 3  # fmt: skip


HEADER = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        len(HEADER).to_bytes(8, "little") + HEADER + b"\0\0\0",
        (2).to_bytes(8, "little") + b"[]",
        (9).to_bytes(8, "little") + b'{"w": {}}',
    ],
)
def test_a_malformed_file_is_a_coded_error(tmp_path, data):
    (tmp_path / "bad").write_bytes(data)
    with pytest.raises(CapsuleError) as caught:
        tensor_digests(tmp_path / "bad")
    assert (caught.value.code, caught.value.exit_code) == ("CAP-V011", ExitCode.TAMPERED)


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=80))
def test_no_bytes_give_anything_but_digests_or_a_coded_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "file"
    path.write_bytes(data)
    try:
        assert isinstance(tensor_digests(path), dict)
    except CapsuleError as error:
        assert error.code == "CAP-V011"
