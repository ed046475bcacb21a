"""Layers are read as they were written, and in no other way."""

import io
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError
from capsule.image.archives.layer_reader import read_layer
from capsule.image.archives.layers import TarEntry, file_entry, padded, tar_header, write_tar

ENTRIES = [
    file_entry("a/b", "o", b"content"),
    file_entry("a/" + "long" * 40, "o", bytes(600), 0o755),
    TarEntry("l", "o", "symlink", 0o777, target="a/b"),
    TarEntry("é", "o", "symlink", 0o777, target="t" * 200),
    TarEntry("tmp", "o", "directory", 0o1777),
    TarEntry("empty", "o", "file", 0o600),
]


def written(entries=ENTRIES):
    buffer = io.BytesIO()
    write_tar(entries, buffer.write)
    return buffer.getvalue()


def read(data):
    return [
        (entry.path, entry.kind, entry.mode, entry.target, b"".join(entry.content()))
        for entry in read_layer(io.BytesIO(data), "layer")
    ]


def headed(entry, data=b""):
    return tar_header(entry) + padded(data)


GOOD = written()
END = bytes(1024)


def test_another_reader_finds_the_same():
    with tarfile.open(fileobj=io.BytesIO(GOOD)) as archive:
        expected = [
            (info.name, info.mode, info.linkname, archive.extractfile(info).read())
            if info.isreg()
            else (info.name, info.mode, info.linkname, b"")
            for info in archive
        ]
    assert [(path, mode, target, data) for path, _, mode, target, data in read(GOOD)] == expected


PARTS = st.text("abé \\-.", min_size=1, max_size=70).filter(lambda part: part not in (".", ".."))
PATHS = st.lists(PARTS, min_size=1, max_size=3).map("/".join)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(PATHS, st.binary(max_size=600), max_size=4))
def test_what_was_written_is_read(files):
    try:
        data = written([file_entry(path, "o", content) for path, content in files.items()])
    except CapsuleError:  # one is a folder of another
        return
    found = {path: content for path, kind, *_, content in read(data) if kind == "file"}
    assert found == files


EVIL = {
    "empty": b"",
    "no end": GOOD[:-1024],
    "half an end": GOOD[:-512],
    "data behind the end": GOOD + b"\0",
    "bytes in the padding": GOOD.replace(b"content\0", b"contentX"),
    "cut in content": GOOD[:1100],
    "set-user-id": headed(TarEntry("a", "o", "file", 0o4755)) + END,
    "hard link": headed(TarEntry("a", "o", "file", 0o644)) + END,
    "backwards": headed(file_entry("b", "o", b"")) + headed(file_entry("a", "o", b"")) + END,
    "twice": headed(file_entry("a", "o", b"")) * 2 + END,
    "larger than the file": headed(TarEntry("a", "o", "file", 0o644, 8**10)) + END,
    "another date": GOOD.replace(b"%011o" % 1_577_836_800, b"%011o" % 1, 1),
    "endless extended header": tarfile.TarInfo("x").tobuf().replace(b"\x000\0", b"\x00x\0") + END,
    "larger than any file": headed(TarEntry("a", "o", "file", 0o644, 10**30)) + END,
    "size of 64 bits": headed(TarEntry("a", "o", "file", 0o644, 2**63 - 513)) + END,
    "no parent": headed(file_entry("a/b", "o", b"")) + END,
    "long extended header": headed(file_entry("a" * 9000, "o", b"")) + END,
    "link to nothing": headed(TarEntry("a", "o", "symlink", 0o777, target="")) + END,
    "link to a NUL": headed(TarEntry("a", "o", "symlink", 0o777, target="b\0c")) + END,
    "file with a target": headed(TarEntry("a", "o", "file", 0o644, target="b")) + END,
    "long link": headed(TarEntry("a", "o", "symlink", 0o777, target="b" * 4096)) + END,
    "link with a size": headed(TarEntry("a", "o", "symlink", 0o777, 512, target="b")) + END * 2,
}
EVIL["hard link"] = EVIL["hard link"][:156] + b"1" + EVIL["hard link"][157:]


@pytest.mark.parametrize("name", EVIL)
def test_anything_else_is_refused(name):
    with pytest.raises(CapsuleError) as caught:
        read(EVIL[name])
    assert caught.value.code == "CAP-I110"


@pytest.mark.parametrize("path", ["../a", "/a", "a//b", "./a", "a/../b", "a\nb"])
def test_unsafe_paths_are_refused(path):
    with pytest.raises(CapsuleError) as caught:
        read(headed(file_entry(path, "o", b"")) + END)
    assert caught.value.code in ("CAP-I107", "CAP-I110")


def test_any_flipped_bit_of_a_header_is_refused_or_another_layer():
    for position in range(0, 1024, 3):
        data = bytearray(GOOD)
        data[position] ^= 1 << position % 8
        try:
            assert read(bytes(data)) != read(GOOD)
        except CapsuleError as error:
            assert error.code in ("CAP-I107", "CAP-I110")
