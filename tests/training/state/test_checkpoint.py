"""Tensor digests by hand; resume states that survive, and damaged ones that are refused."""

import hashlib
import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError
from capsule.training.state.checkpoint import (
    ResumeState,
    collective_digest,
    load_resume_state,
    load_tensors,
    save_resume_state,
    save_tensors,
    tensor_digests,
)

SPEC = "5" * 64
TENSORS = {
    "parameters/w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "parameters/b": np.array([0.5], np.float32),
}


def state(step, tensors=TENSORS):
    return ResumeState(
        spec=SPEC,
        step=step,
        seconds=1.5,
        tensors=tensor_digests(tensors),
        streams={"minibatch": {"draws": 3}},
        trace={"offset": 9},
        trainer={"episodes": 2},
        checkpoints=(),
    )


def tensor_digest(array):
    return tensor_digests({"x": array})["x"]


def test_a_tensor_digest_by_hand():
    header, data = b'{"dtype":"F32","shape":[2]}', struct.pack("<2f", 1.0, -2.0)
    expected = hashlib.sha256(header + data).hexdigest()
    assert tensor_digest(np.array([1, -2], np.float32)) == expected


def test_a_digest_sees_dtype_shape_and_order():
    array = np.arange(6, dtype=np.float32)
    digests = {
        tensor_digest(variant)
        for variant in (array, array.reshape(2, 3), array.reshape(3, 2), array.astype(np.int64))
    }
    assert len(digests) == 4
    turned = np.asfortranarray(array.reshape(2, 3))
    assert tensor_digest(turned) == tensor_digest(array.reshape(2, 3))


def test_the_collective_digest_by_hand():
    names = {name: tensor_digest(array) for name, array in TENSORS.items()}
    text = json.dumps(names, sort_keys=True, separators=(",", ":"))
    assert collective_digest(TENSORS) == hashlib.sha256(text.encode()).hexdigest()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 6 * 4 - 1), st.integers(1, 255))
def test_any_flipped_byte_changes_the_digest(position, flip):
    data = bytearray(TENSORS["parameters/w"].tobytes())
    data[position] ^= flip
    changed = np.frombuffer(bytes(data), np.float32).reshape(2, 3)
    assert tensor_digest(changed) != tensor_digest(TENSORS["parameters/w"])


def test_tensors_come_back_as_they_were(tmp_path):
    save_tensors(tmp_path / "x.safetensors", TENSORS)
    loaded = load_tensors(tmp_path / "x.safetensors", tensor_digests(TENSORS))
    assert loaded.keys() == TENSORS.keys()
    assert all(np.array_equal(loaded[name], TENSORS[name]) for name in TENSORS)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:0],
        lambda data: data[:-1],
        lambda data: data[:-4] + b"\0\0\0\0",
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data.replace(b"parameters/b", b"parameters/c"),
    ],
)
def test_a_damaged_tensor_file_is_refused(tmp_path, damage):
    path = tmp_path / "x.safetensors"
    save_tensors(path, TENSORS)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CapsuleError, match=r"CAP-T132 x\.safetensors"):
        load_tensors(path, tensor_digests(TENSORS))


def test_only_the_newest_state_is_kept(tmp_path):
    for step in (4, 8):
        save_resume_state(tmp_path, state(step), TENSORS)
    loaded, tensors = load_resume_state(tmp_path, SPEC)
    assert loaded == state(8)
    assert tensor_digests(tensors) == loaded.tensors
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "resume.json",
        "tensors-8.safetensors",
    ]


def test_nothing_is_resumed_from_nothing(tmp_path):
    assert load_resume_state(tmp_path, SPEC) is None


def test_a_death_between_the_two_files_keeps_the_state_before(tmp_path):
    save_resume_state(tmp_path, state(4), TENSORS)
    save_tensors(tmp_path / "tensors-8.safetensors", TENSORS)
    loaded, _ = load_resume_state(tmp_path, SPEC)
    assert loaded.step == 4


def test_a_file_that_cannot_be_written_keeps_the_state_before(tmp_path):
    save_resume_state(tmp_path, state(4), TENSORS)
    (tmp_path / "tensors-8.safetensors").mkdir()  # even root cannot rename a file over it
    with pytest.raises(CapsuleError, match=r"CAP-T131 tensors-8\.safetensors"):
        save_resume_state(tmp_path, state(8), TENSORS)
    assert load_resume_state(tmp_path, SPEC)[0].step == 4


@pytest.mark.parametrize(
    ("damage", "spec", "code"),
    [
        (lambda text: text[:-1], SPEC, "CAP-T132"),
        (lambda text: text.replace('"step":4', '"step":"4"'), SPEC, "CAP-T132"),
        (lambda text: text.replace('"step":4', '"steps":4'), SPEC, "CAP-T132"),
        (lambda text: text, "6" * 64, "CAP-T133"),
    ],
)
def test_a_damaged_or_foreign_state_is_refused(tmp_path, damage, spec, code):
    save_resume_state(tmp_path, state(4), TENSORS)
    path = tmp_path / "resume.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(CapsuleError, match=code):
        load_resume_state(tmp_path, spec)
