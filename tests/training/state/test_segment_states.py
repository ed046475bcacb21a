"""States at checkpoints: which files they hold, block by block, and what is kept only once."""

import errno
import hashlib
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment import contract
from capsule.experiment.errors import CapsuleError
from capsule.experiment.states import BLOCK_BYTES, StateIndex
from capsule.training.state.segment_states import keep_state


def write_state(directory, files):
    """Replace the folder ``state`` of a run directory by one with these files."""
    folder = directory / contract.STATE
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def index_of(directory, step):
    path = directory / contract.SEGMENT_STATES / f"{contract.checkpoint_name(step)}.json"
    return StateIndex.parse(path.read_bytes())


def pack_of(directory, step):
    name = f"{contract.checkpoint_name(step)}.blocks"
    return (directory / contract.SEGMENT_STATES / name).read_bytes()


def names_of(directory):
    return sorted(path.name for path in (directory / contract.SEGMENT_STATES).iterdir())


def digest(data):
    return hashlib.sha256(data).hexdigest()


def test_a_block_is_kept_once(tmp_path):
    (tmp_path / contract.STATE).mkdir()
    ring = tmp_path / contract.STATE / "ring"
    ring.write_bytes(bytes(8 * BLOCK_BYTES))
    keep_state(tmp_path, 1)
    with ring.open("r+b") as stream:
        stream.seek(5 * BLOCK_BYTES + 7)
        stream.write(b"x")
    keep_state(tmp_path, 2)
    packs = sorted((tmp_path / contract.SEGMENT_STATES).glob("*.blocks"))
    assert [path.stat().st_size for path in packs] == [BLOCK_BYTES, BLOCK_BYTES]


def test_a_small_state_as_written_down(tmp_path):
    write_state(tmp_path, {"resume.json": b"{}", "replay/a.bin": b"xyz", "replay/empty": b""})
    keep_state(tmp_path, 400)
    assert names_of(tmp_path) == ["step-000000000400.blocks", "step-000000000400.json"]
    index = json.loads((tmp_path / contract.SEGMENT_STATES / "step-000000000400.json").read_bytes())
    assert index == {
        "schema": "capsule/state/v1",
        "step": 400,
        "files": {
            "replay/a.bin": {"size": 3, "blocks": [digest(b"xyz")]},
            "replay/empty": {"size": 0, "blocks": []},
            "resume.json": {"size": 2, "blocks": [digest(b"{}")]},
        },
        "packed": [digest(b"xyz"), digest(b"{}")],
    }
    assert pack_of(tmp_path, 400) == b"xyz{}"


def test_a_file_is_cut_into_blocks_of_one_mebibyte_of_which_the_last_is_shorter(tmp_path):
    first, last = b"a" * (1 << 20), b"b" * 5
    write_state(tmp_path, {"long": first + last})
    keep_state(tmp_path, 1)
    index = index_of(tmp_path, 1)
    assert index.files["long"].size == (1 << 20) + 5
    assert index.packed == index.files["long"].blocks == (digest(first), digest(last))
    assert pack_of(tmp_path, 1) == first + last


def test_what_only_the_evaluation_needs_is_left_out(tmp_path):
    kept = {"resume.json": b"{}", "replay/networks": b"1", "networks.bin": b"2"}
    left_out = {"networks/400.safetensors": b"3", "evaluation.json": b"4"}
    write_state(tmp_path, {**kept, **left_out})
    keep_state(tmp_path, 400)
    assert index_of(tmp_path, 400).files.keys() == kept.keys()
    assert sorted(pack_of(tmp_path, 400)) == sorted(b"{}12")


def test_a_state_that_is_kept_already_is_left_as_it_is(tmp_path):
    write_state(tmp_path, {"a": b"before"})
    keep_state(tmp_path, 1)
    before = index_of(tmp_path, 1)
    write_state(tmp_path, {"a": b"after"})
    keep_state(tmp_path, 1)
    assert index_of(tmp_path, 1) == before
    assert pack_of(tmp_path, 1) == b"before"


CONTENTS = st.dictionaries(
    st.sampled_from(["a", "b", "replay/a", "replay/b", "replay/deep/c"]),
    st.sampled_from([b"", b"one", b"two", b"three"]),
)


@settings(max_examples=25)
@given(st.lists(CONTENTS, min_size=1, max_size=3))
def test_the_packs_up_to_a_state_are_its_files_and_hold_no_block_twice(tmp_path_factory, states):
    folder = tmp_path_factory.mktemp("run")
    blocks, named = {}, []
    for step, files in enumerate(states):
        write_state(folder, files)
        (folder / contract.STATE).mkdir(exist_ok=True)
        keep_state(folder, step)
        index, pack = index_of(folder, step), pack_of(folder, step)
        sizes = index.block_sizes()
        for name in index.packed:
            blocks[name], pack = pack[: sizes[name]], pack[sizes[name] :]
            assert digest(blocks[name]) == name
        assert pack == b""
        named += index.packed
        found = {
            name: b"".join(blocks[block] for block in file.blocks)
            for name, file in index.files.items()
        }
        assert found == files
    assert len(set(named)) == len(named)


def test_the_files_of_a_state_can_be_read_by_other_users(tmp_path):
    write_state(tmp_path, {"a": b"1"})
    keep_state(tmp_path, 1)
    for path in (tmp_path / contract.SEGMENT_STATES).iterdir():
        assert path.stat().st_mode & 0o777 == 0o644


def test_what_a_killed_attempt_left_half_written_is_removed(tmp_path):
    write_state(tmp_path, {"a": b"1"})
    (tmp_path / contract.SEGMENT_STATES).mkdir()
    left = tmp_path / contract.SEGMENT_STATES / ".step-000000000001.blocks.qntkq3b_"
    left.write_bytes(b"half")
    keep_state(tmp_path, 1)
    assert names_of(tmp_path) == ["step-000000000001.blocks", "step-000000000001.json"]


@pytest.fixture
def disk_full_at(monkeypatch):
    """A function that lets the disk be full when a file is synced for this time, from 1."""

    def fail_at(number):
        sync, calls = os.fsync, []

        def fsync(file):
            calls.append(file)
            if len(calls) == number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            sync(file)

        monkeypatch.setattr(os, "fsync", fsync)

    return fail_at


def test_a_state_without_room_is_an_error_that_leaves_nothing_behind(tmp_path, disk_full_at):
    write_state(tmp_path, {"a": b"1"})
    disk_full_at(1)
    with pytest.raises(CapsuleError) as refused:
        keep_state(tmp_path, 7)
    error = refused.value
    assert (error.code, error.message) == (
        "CAP-T161",
        "the state at step 7 cannot be kept: No space left on device",
    )
    assert "limits.disk_mb" in error.fix
    assert "recording.segment_states" in error.fix
    assert names_of(tmp_path) == []


def test_a_pack_whose_index_was_not_written_is_kept_again(tmp_path, disk_full_at):
    write_state(tmp_path, {"a": b"1"})
    disk_full_at(2)  # the pack is synced before the index
    with pytest.raises(CapsuleError, match=r"CAP-T131 step-000000000007\.json .*No space left"):
        keep_state(tmp_path, 7)
    assert names_of(tmp_path) == ["step-000000000007.blocks"]
    keep_state(tmp_path, 7)
    assert index_of(tmp_path, 7).packed == (digest(b"1"),)
    assert pack_of(tmp_path, 7) == b"1"


def test_a_file_where_the_folder_of_states_should_be_is_named(tmp_path):
    write_state(tmp_path, {"a": b"1"})
    (tmp_path / contract.SEGMENT_STATES).write_bytes(b"")
    with pytest.raises(CapsuleError, match="CAP-T161 the state at step 7 cannot be kept: "):
        keep_state(tmp_path, 7)
