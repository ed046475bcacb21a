"""The lock file beside a spec: found, read and written."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.lock import Lock
from capsule.host.spec_file import parse_spec
from capsule.image.lockfile import MAX_LOCK_BYTES, lock_path, names_lock, read_lock, write_lock
from tests.image.conftest import SPEC
from tests.locked_images import locked_image


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tiny.lock.json"


@pytest.fixture(scope="module")
def lock():
    return Lock(spec=parse_spec(SPEC, "tiny"), image=locked_image())


@pytest.mark.parametrize(
    ("spec", "lock"),
    [
        ("x.yaml", "x.lock.json"),
        ("deep/x.yml", "deep/x.lock.json"),
        ("x.json", "x.lock.json"),
        ("v1.2.yaml", "v1.2.lock.json"),
        ("x", "x.lock.json"),
    ],
)
def test_a_lock_is_beside_its_spec(spec, lock):
    assert lock_path(Path(spec)) == Path(lock)
    assert names_lock(Path(lock))


@pytest.mark.parametrize(
    ("name", "is_lock"),
    [("runs/x/lock.json", True), ("x.yaml", False), ("lock.yaml", False), ("xlock.json", False)],
)
def test_a_lock_is_known_by_its_name(name, is_lock):
    assert names_lock(Path(name)) is is_lock


def test_a_lock_is_read_as_it_was_written(path, lock):
    write_lock(path, lock)
    assert path.read_bytes() == lock.document() + b"\n"
    assert read_lock(path) == lock
    path.write_bytes(lock.document())
    assert read_lock(path) == lock


@pytest.mark.parametrize("size", [None, 0, MAX_LOCK_BYTES, MAX_LOCK_BYTES + 1])
def test_a_file_that_cannot_be_a_lock_is_refused(path, size):
    if size is None:
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, size)
    reasons = {None: "Is a directory", MAX_LOCK_BYTES + 1: "it is larger than 4 MiB"}
    code = "CAP-L001" if size in reasons else "CAP-L002"
    with pytest.raises(CapsuleError) as caught:
        read_lock(path)
    assert (caught.value.code, caught.value.exit_code) == (code, ExitCode.USAGE)
    assert caught.value.message.startswith(f"lock file {path}: {reasons.get(size, '')}")
    assert "capsule lock" in caught.value.fix


def test_a_missing_lock_is_refused(path):
    with pytest.raises(CapsuleError, match="No such file") as caught:
        read_lock(path)
    assert caught.value.code == "CAP-L001"
    assert caught.value.fix == "Name an existing lock file, or make one with 'capsule lock'."
    path.touch()
    with pytest.raises(CapsuleError, match="Not a directory") as below:
        read_lock(path / "x.lock.json")
    assert (below.value.code, below.value.fix) == ("CAP-L001", caught.value.fix)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"capsule/lock/v1", b"capsule/lock/v2", "schema: Input should be 'capsule/lock/v1'"),
        (b'"assembler":', b'"assembler":"x', "JSON"),
        (b'"recipe":"cpu"', b'"recipe":"tpu"', "image.recipe: "),
        (b'"discount":0.99', b'"discount":1.5', "trainer"),
        (b'{"image":', b'{"extra":1,"image":', "extra: Extra inputs"),
        (b'{"image":', b'{ "image":', "canonical"),
        (b',"project":null', b"", "omits a field"),
        (b"\n", b"\n\n", "canonical"),
    ],
)
def test_what_is_wrong_with_a_lock_is_named(path, lock, old, new, reason):
    document = lock.document() + b"\n"
    assert old in document
    path.write_bytes(document.replace(old, new, 1))
    with pytest.raises(CapsuleError) as caught:
        read_lock(path)
    assert caught.value.code == "CAP-L002"
    assert str(path) in caught.value.message
    assert reason in caught.value.message


def test_a_lock_that_cannot_be_written_is_named(tmp_path, lock):
    (tmp_path / "file").touch()
    with pytest.raises(CapsuleError, match=r"x\.lock\.json' cannot be written") as caught:
        write_lock(tmp_path / "file" / "x.lock.json", lock)
    assert caught.value.code in {"CAP-X003", "CAP-X004"}


@given(noise=st.binary(max_size=40))
def test_no_noise_is_a_lock(tmp_path_factory, noise):
    place = tmp_path_factory.getbasetemp() / "noise.lock.json"
    place.write_bytes(noise)
    with pytest.raises(CapsuleError, match="CAP-L002"):
        read_lock(place)
