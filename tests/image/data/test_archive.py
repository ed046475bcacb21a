"""Archives of data sets: sizes known beforehand, the same content after unpacking, by tar, too."""

import io
import os
import subprocess
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.experiment.beneath import remove_folder
from capsule.experiment.canonical import sha256_file
from capsule.host.errors import CapsuleError
from capsule.image.archives.layers import TarEntry, tar_header
from capsule.image.data.archive import archive_size, read_data, unpack_data, write_data
from capsule.image.data.listing import list_data

NAMES = st.from_regex(r"[a-zäß]{1,60}", fullmatch=True)
FILES = st.dictionaries(st.lists(NAMES, min_size=1, max_size=3).map(tuple), st.binary(max_size=999))


def pack(place, listing):
    packed = io.BytesIO()
    write_data(listing, place, packed.write)
    return packed.getvalue()


@given(FILES.filter(bool))
@pytest.mark.slow
def test_a_data_set_is_the_same_after_unpacking(tmp_path_factory, files):
    root = tmp_path_factory.mktemp("set")
    for parts, content in files.items():
        path = (root / "in").joinpath(*parts)
        if not any(each.is_file() for each in path.parents):
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.write_bytes(content)
    (root / "in" / "LINK").symlink_to("nowhere")
    (root / "in" / "EMPTY").mkdir()
    listing = list_data("digits", root / "in", sha256_file)
    (root / "archive").write_bytes(pack(root / "in", listing))
    assert (root / "archive").stat().st_size == archive_size(listing)
    assert read_data(root / "archive") == listing
    unpack_data(root / "archive", root / "out")
    assert list_data("digits", root / "out", sha256_file, for_everyone=True) == listing


def test_tar_unpacks_the_same(tmp_path):
    place = tmp_path / "in"
    (place / ("long" * 30)).mkdir(parents=True)
    (place / ("long" * 30) / "ä").write_text("hello")
    listing = list_data("digits", place, sha256_file)
    (tmp_path / "archive").write_bytes(pack(place, listing))
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-xf", "archive", "-C", "out"], cwd=tmp_path, check=True)
    assert list_data("digits", tmp_path / "out", sha256_file) == listing


def test_a_single_file_is_packed_under_its_locked_name(tmp_path):
    (tmp_path / "renamed").write_text("hello")
    listing = list_data("digits", tmp_path / "renamed", sha256_file, called="hello.txt")
    (tmp_path / "archive").write_bytes(pack(tmp_path / "renamed", listing))
    unpack_data(tmp_path / "archive", tmp_path / "out")
    assert (tmp_path / "out" / "hello.txt").read_text() == "hello"


@pytest.mark.parametrize("content", ["other", "longer than before"])
def test_a_file_that_changes_while_it_is_packed_is_noticed(tmp_path, content):
    (tmp_path / "a").write_text("hello")
    listing = list_data("digits", tmp_path, sha256_file)
    (tmp_path / "a").write_text(content)
    with pytest.raises(CapsuleError) as caught:
        pack(tmp_path, listing)
    assert caught.value.code == "CAP-I104"
    assert caught.value.fix == "Do not change the data set until the bundle is written."


def test_a_file_that_is_removed_while_it_is_packed_is_noticed(tmp_path):
    (tmp_path / "a").write_text("hello")
    listing = list_data("digits", tmp_path, sha256_file)
    (tmp_path / "a").unlink()
    with pytest.raises(CapsuleError, match="CAP-I104"):
        pack(tmp_path, listing)


def test_nothing_lies_below_a_link(tmp_path):
    link = TarEntry("a", "x", "symlink", 0o777, target="b")
    file = TarEntry("a/c", "x", "file", 0o644, 0, lambda: iter(()))
    (tmp_path / "archive").write_bytes(tar_header(link) + tar_header(file) + bytes(1024))
    with pytest.raises(CapsuleError, match="CAP-I110"):
        read_data(tmp_path / "archive")


def test_an_archive_of_another_program_is_refused(tmp_path):
    with tarfile.open(tmp_path / "archive", "w") as archive:
        archive.add(os.devnull, "null")
    with pytest.raises(CapsuleError) as caught:
        read_data(tmp_path / "archive")
    assert caught.value.code == "CAP-I110"


@pytest.mark.parametrize(
    ("parts", "code"),
    [(["a"] * 1500, None), (["n" * 255] * 16, "CAP-I107"), (["n" * 256], "CAP-I107")],
)
def test_a_deep_or_long_path_is_written_or_rejected(tmp_path, parts, code):
    """With the folder that it is unpacked into, a path may be too long where its archive is not."""
    paths = ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]
    folders = [TarEntry(path, "o", "directory") for path in paths[:-1]]
    entries = [*folders, TarEntry(paths[-1], "o", "file", 0o644)]
    archive = b"".join(map(tar_header, entries)) + bytes(1024)
    (tmp_path / "archive").write_bytes(archive)
    if code is None:
        unpack_data(tmp_path / "archive", tmp_path / "out")
        assert (tmp_path / "out" / paths[-1]).is_file()
        remove_folder(tmp_path / "out")  # too deep for the Python standard library
        return
    with pytest.raises(CapsuleError) as caught:
        unpack_data(tmp_path / "archive", tmp_path / "out")
    assert caught.value.code == code
