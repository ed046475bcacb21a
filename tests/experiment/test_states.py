"""Kept states: files as blocks of a MiB, each digest of one size, and a pack of known blocks."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from capsule.experiment.states import MAX_FILES, FilePath, ResumeState, StateFile, StateIndex

MEBIBYTE = 1024 * 1024


def digest(number):
    return hashlib.sha256(str(number).encode()).hexdigest()


def file(size, first=0):
    """Return a file whose blocks are numbered from one on."""
    count = len(range(0, size, MEBIBYTE))
    return StateFile(size=size, blocks=tuple(digest(first + number) for number in range(count)))


def index(files, packed=()):
    return StateIndex(step=4, files=files, packed=tuple(packed))


@pytest.mark.parametrize(
    ("size", "blocks"),
    [(0, 0), (1, 1), (MEBIBYTE, 1), (MEBIBYTE + 1, 2), (3 * MEBIBYTE, 3), (10**9, 954)],
)
def test_a_file_is_cut_into_mebibytes(size, blocks):
    assert StateFile(size=size, blocks=(digest(0),) * blocks).size == size
    for wrong in {blocks - 1, blocks + 1} - {-1}:
        with pytest.raises(ValidationError, match=f"{size} bytes are not {wrong} blocks"):
            StateFile(size=size, blocks=(digest(0),) * wrong)


@given(st.integers(0, 20 * MEBIBYTE))
def test_the_blocks_of_a_file_add_up_to_it(size):
    found = file(size)
    sizes = [found.block_size(number) for number in range(len(found.blocks))]
    assert sum(sizes) == size
    assert sizes[:-1] == [MEBIBYTE] * (len(sizes) - 1)
    assert all(0 < each <= MEBIBYTE for each in sizes)


def test_an_index_knows_the_size_of_each_block_and_of_all_files():
    found = index({"a": file(MEBIBYTE + 5), "b/c": file(7, first=9)}, [digest(9), digest(1)])
    assert found.block_sizes() == {digest(0): MEBIBYTE, digest(1): 5, digest(9): 7}
    assert found.size == MEBIBYTE + 12


def test_a_block_that_two_files_have_is_counted_in_the_size_of_both():
    found = index({"a": file(7), "b": file(7)}, [digest(0)])
    assert (found.size, found.block_sizes()) == (14, {digest(0): 7})


def test_one_digest_of_two_sizes_is_rejected():
    with pytest.raises(ValidationError, match=f"block {digest(0)} has two sizes"):
        index({"a": file(7), "b": file(8)})


@pytest.mark.parametrize("packed", [[digest(5)], [digest(0), digest(0)], [digest(0), digest(5)]])
def test_a_pack_names_blocks_of_the_files_and_each_once(packed):
    with pytest.raises(ValidationError, match="packed must name blocks of the files, each once"):
        index({"a": file(2 * MEBIBYTE)}, packed)


@pytest.mark.parametrize("packed", [[], [digest(0)], [digest(1), digest(0)]])
def test_a_pack_is_any_part_of_the_blocks_in_any_order(packed):
    found = index({"a": file(2 * MEBIBYTE)}, packed)
    assert found.packed == tuple(packed)
    assert StateIndex.parse(found.document()) == found


def test_a_state_has_only_so_many_files():
    files = {f"f{number}": file(0) for number in range(MAX_FILES)}
    assert len(index(files).files) == MAX_FILES
    with pytest.raises(ValidationError, match="files"):
        index({**files, "more": file(0)})


paths = TypeAdapter(FilePath)


@pytest.mark.parametrize(
    "path", ["resume.json", "replay/rewards.bin", "_a/B-c/0.x", "a..b", "a" * 100]
)
def test_paths_below_the_folder_are_accepted(path):
    assert paths.validate_python(path) == path


@pytest.mark.parametrize(
    "path",
    [
        "", "/a", "a/", "a//b", "..", "a/../b", ".hidden", "a/.b", "-x", "a/-x", "a b", "a\\b",
        "a\n", "a\0", "é", "C:x", "a" * 101,
    ],
)  # fmt: skip
def test_paths_that_lead_elsewhere_are_rejected(path):
    with pytest.raises(ValidationError):
        paths.validate_python(path)
    with pytest.raises(ValidationError, match="files"):
        index({path: file(0)})


@given(st.text("aZ0._-/", max_size=12))
def test_an_accepted_path_stays_below_the_folder(path):
    try:
        paths.validate_python(path)
    except ValidationError:
        return
    parts = path.split("/")
    assert all(part and part[0] not in ".-" for part in parts)


def test_what_a_run_resumes_from_is_read_back():
    state = ResumeState(
        spec=digest(0), step=4, seconds=1.5, tensors={"parameters/a": digest(1)},
        streams={"no-op": {"draws": 3}}, trainer={"return": (0.5).hex()}, trace={"records": 1},
        checkpoints=(),
    )  # fmt: skip
    assert ResumeState.parse(state.document()) == state
    with pytest.raises(ValueError, match="omits a field"):
        ResumeState.parse(state.document().replace(b'"schema":"capsule/resume/v1",', b""))


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_a_state_with_a_number_that_is_not_finite_is_not_written(number):
    state = ResumeState(
        spec=digest(0), step=4, seconds=1.5, tensors={}, streams={}, trainer={"returns": [number]},
        trace={}, checkpoints=(),
    )  # fmt: skip
    with pytest.raises(ValueError, match="not canonicalisable"):
        state.document()
