"""Reading tensors without a tensor library, against safetensors itself."""

import io
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from capsule.experiment.contract import tensor_digest
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.verification.integrity.tensors import digests_of, tensor_digests


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


def entry(start=0, end=4, dtype="F32", shape=(1,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def file(header, body=bytes(4)):
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(data).to_bytes(8, "little") + data + body


MALFORMED = {
    "empty": b"",
    "header of 2^64 bytes": b"\xff" * 8,
    "cut off": file({"w": entry()}, bytes(3)),
    "bytes behind": file({"w": entry()}, bytes(5)),
    "a list": file(b"[]", b""),
    "no dtype": file({"w": {"shape": [1], "data_offsets": [0, 4]}}),
    "another key": file({"w": entry() | {"pickle": ""}}),
    "dtype of another library": file({"w": entry(dtype="O")}),
    "dtype that is not a text": file({"w": entry(dtype=["F32"])}),
    "shape of another size": file({"w": entry(shape=(2,))}),
    "negative size": file({"w": entry(shape=(-1,))}),
    "a size that is true": file({"w": entry(shape=(True,))}),
    "a size of many digits": file({"w": entry(shape=(10**400, 0), end=0)}, b""),
    "many dimensions": file({"w": entry(shape=[1] * 17)}),
    "offsets backwards": file({"w": entry(4, 0)}),
    "tensors upon each other": file({"v": entry(), "w": entry()}),
    "a hole": file({"v": entry(), "w": entry(8, 12)}, bytes(12)),
    "a name twice": file(b'{"w":%b,"w":%b}' % ((json.dumps(entry()).encode(),) * 2)),
    "nested a thousandfold": file(b'{"w":' + b"[" * 5000),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_a_coded_error(name, tmp_path):
    path = tmp_path / "bad"
    path.write_bytes(MALFORMED[name])
    with pytest.raises(CapsuleError) as caught:
        tensor_digests(path)
    assert (caught.value.code, caught.value.exit_code) == ("CAP-V011", ExitCode.TAMPERED)
    assert caught.value.message.isprintable()
    path.write_bytes(file({"w": entry()}))
    assert list(tensor_digests(path)) == ["w"]


def test_every_byte_is_read_once():
    # A header of 4 MiB could otherwise name the same gigabyte forty thousand times.
    class Counting(io.BytesIO):
        count = 0

        def read(self, size=-1):
            data = super().read(size)
            self.count += len(data)
            return data

    body = bytes(3 << 20)
    half = len(body) // 2
    tensors = {"a": entry(0, half, "U8", (half,)), "b": entry(half, 2 * half, "U8", (half,))}
    stream = Counting(file(tensors, body))
    digests_of(stream, len(stream.getvalue()), "t")
    assert stream.count == len(stream.getvalue())


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=80))
def test_no_bytes_give_anything_but_digests_or_a_coded_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "file"
    path.write_bytes(data)
    try:
        assert isinstance(tensor_digests(path), dict)
    except CapsuleError as error:
        assert error.code == "CAP-V011"
