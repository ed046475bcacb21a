"""Arrays in files: zeros at first, then whatever the process before has left."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from capsule.experiment.errors import CapsuleError
from capsule.training.state.rings import mapped_array


@pytest.mark.parametrize("kept", [True, False], ids=["file", "memory"])
def test_a_new_array_is_zeros_and_can_be_written(tmp_path, kept):
    array = mapped_array(tmp_path if kept else None, "rewards", np.float32, (3, 2))
    assert (array.shape, array.dtype) == ((3, 2), np.float32)
    assert not array.any()
    array[1, 0] = 7
    assert array.tolist() == [[0, 0], [7, 0], [0, 0]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rewards.bin"] * kept


def test_a_file_holds_the_elements_in_c_order(tmp_path):
    array = mapped_array(tmp_path / "replay" / "inner", "frames", "<u2", (2, 3))
    array[:] = [[1, 2, 3], [4, 5, 0x1234]]
    wanted = bytes([1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 0x34, 0x12])
    assert (tmp_path / "replay" / "inner" / "frames.bin").read_bytes() == wanted


@settings(max_examples=30)
@given(
    arrays.arrays(
        np.int16, arrays.array_shapes(max_dims=3, max_side=4), elements=st.integers(-9, 9)
    )
)
def test_what_was_written_is_found_again(tmp_path_factory, values):
    folder = tmp_path_factory.mktemp("mapped")
    mapped_array(folder, "x", values.dtype, values.shape)[:] = values
    again = mapped_array(folder, "x", values.dtype, values.shape)
    np.testing.assert_array_equal(again, values)
    (path,) = folder.iterdir()
    assert path.read_bytes() == values.tobytes()


WRITES_AND_DIES = """
import os, pathlib, signal, sys
from capsule.training.state.rings import mapped_array
mapped_array(pathlib.Path(sys.argv[1]), "x", "u1", (4,))[:] = [3, 1, 4, 1]
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_array_outlives_a_process_that_is_killed(tmp_path):
    done = subprocess.run([sys.executable, "-c", WRITES_AND_DIES, tmp_path], timeout=600)
    assert done.returncode == -9
    assert mapped_array(tmp_path, "x", "u1", (4,)).tolist() == [3, 1, 4, 1]


@pytest.mark.parametrize(("before", "after"), [(3, 5), (5, 3)])
def test_a_file_takes_the_size_of_its_array_and_keeps_what_fits(tmp_path, before, after):
    mapped_array(tmp_path, "x", np.uint8, (before,))[:] = 9
    array = mapped_array(tmp_path, "x", np.uint8, (after,))
    assert array.tolist() == ([9] * before + [0] * after)[:after]
    assert (tmp_path / "x.bin").stat().st_size == after


def test_an_array_without_elements_has_no_file(tmp_path):
    array = mapped_array(tmp_path / "replay", "numbers", np.float32, (4, 0))
    assert array.shape == (4, 0)
    assert not (tmp_path / "replay").exists()


def test_the_room_of_a_file_is_reserved_at_once(tmp_path):
    mapped_array(tmp_path, "x", np.uint8, (1 << 20,))
    assert (tmp_path / "x.bin").stat().st_blocks * 512 >= 1 << 20


def test_an_array_without_room_is_an_error_that_names_its_file_size_and_remedy(tmp_path):
    with pytest.raises(CapsuleError) as refused:
        mapped_array(tmp_path, "frames", np.uint8, (1 << 60,))
    error = refused.value
    assert error.code == "CAP-T221"
    assert f"replay file frames.bin of {1 << 60} bytes cannot be made: " in error.message
    assert "limits.disk_mb" in error.fix
    assert "trainer.replay_capacity" in error.fix


def test_a_folder_that_cannot_be_made_is_named_with_its_reason(tmp_path):
    (tmp_path / "replay").write_bytes(b"")
    with pytest.raises(CapsuleError, match=r"CAP-T221 .*x\.bin of 8 bytes.*File exists"):
        mapped_array(tmp_path / "replay", "x", np.int64, (1,))
