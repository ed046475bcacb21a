import hashlib
import io
import tarfile
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError
from capsule.image.archives.layers import (
    EPOCH,
    TarEntry,
    file_entry,
    read_tar,
    reject_collisions,
    safe_path,
    tar_header,
    write_tar,
)
from tests.image.conftest import LONG_NAME, Member, build_tar
from tests.refusals import refused

PROPERTY = settings(deadline=None, max_examples=150)
PARTS = st.text(st.characters(exclude_characters="/\0\n\r", exclude_categories=["Cs"]), min_size=1)
PATHS = st.lists(PARTS.filter(lambda part: part not in {".", ".."}), min_size=1, max_size=5).map(
    "/".join
)


def written(entries):
    buffer = io.BytesIO()
    facts = write_tar(entries, buffer.write)
    return buffer.getvalue(), facts


def read(data):
    return list(read_tar(io.BytesIO(data), "layer"))


@pytest.mark.slow
@PROPERTY
@given(PATHS, PATHS, st.sampled_from(["file", "directory", "symlink"]), st.integers(0, 2**40))
@example("a" * 100, "b" * 101, "symlink", 0)
@example("a" * 101, "é", "directory", 0)
@example("big", "", "file", 8**11 - 1)
@example("bigger", "", "file", 8**11)
@example("p" * 91 + "/" + "q" * 8, "", "directory", 0)
def test_headers_mean_the_same_to_another_reader(path, target, kind, size):
    entry = TarEntry(path, "o", kind, 0o640, target=target if kind == "symlink" else "")
    entry = replace(entry, size=size if kind == "file" else 0)
    with tarfile.open(fileobj=io.BytesIO(tar_header(entry) + bytes(1024))) as archive:
        info = archive.next()
    assert (info.name, info.linkname, info.size) == (path, entry.target, entry.size)
    assert (info.isreg(), info.isdir(), info.issym()) == tuple(
        kind == k for k in ("file", "directory", "symlink")
    )
    assert (info.mode, info.mtime, info.uid, info.gid) == (0o640, EPOCH, 0, 0)
    assert (info.uname, info.gname, info.devmajor, info.devminor) == ("", "", 0, 0)


ENTRIES = [
    file_entry("usr/bin/b", "one", b"b" * 1000, 0o755),
    file_entry("usr/bin-a", "one", b""),
    file_entry(LONG_NAME, "one", b"text"),
    TarEntry("Tmp", "one", "directory"),
    TarEntry("tmp", "one", "directory", 0o1777),
    TarEntry("usr/bin/a", "one", "symlink", 0o777, target="b"),
    TarEntry("usr/lib", "two", "directory"),
]


@PROPERTY
@given(st.permutations(ENTRIES))
def test_order_of_entries_does_not_matter(entries):
    assert written(entries) == written(ENTRIES)


def test_a_layer_is_sorted_whole_and_plain():
    data, facts = written(ENTRIES)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = {member.name: member for member in archive}
        assert archive.extractfile("usr/bin/b").read() == b"b" * 1000
    assert list(members) == sorted(members, key=str.encode) == list(facts)
    assert {"usr", "usr/bin", "deep"} < members.keys()
    modes = {name: member.mode for name, member in members.items() if member.isdir()}
    assert modes.pop("tmp") == 0o1777
    assert set(modes.values()) == {0o755}
    assert facts["usr/bin/a"] == "symlink b"
    assert facts["usr/bin/b"] == f"file 0755 {hashlib.sha256(b'b' * 1000).hexdigest()}"
    assert facts["usr"] == "directory"
    assert data.endswith(bytes(1024))


def test_what_was_written_reads_and_writes_the_same():
    data, _ = written(ENTRIES)
    assert written(read(data))[0] == data


def test_shared_files_are_written_once():
    twice = [*ENTRIES, *(replace(entry, owner="other") for entry in ENTRIES)]
    assert written(twice) == written(ENTRIES)


@pytest.mark.parametrize(
    "other",
    [
        file_entry("usr/bin/b", "two", b"c" * 1000, 0o755),
        file_entry("usr/bin/b", "two", b"b" * 1000, 0o644),
        TarEntry("usr/bin/b", "two", "symlink", 0o777, target="a"),
        TarEntry("usr/bin/b", "two", "directory"),
        file_entry("usr/bin/b/below", "two", b""),
    ],
)
def test_collisions_name_both_owners(other):
    message = refused("CAP-I109", written, [*ENTRIES, other])
    assert "/usr/bin/b differs between one and two" in message


def test_a_file_below_a_link_is_a_collision():
    below = file_entry("usr/bin/a/below", "two", b"")
    assert "/usr/bin/a" in refused("CAP-I109", written, [*ENTRIES, below])


def test_collisions_between_layers():
    _, facts = written(ENTRIES)
    reject_collisions([("base", facts), ("wheels", facts)])
    changed = facts | {"usr/bin/a": "directory"}
    message = refused("CAP-I109", reject_collisions, [("base", facts), ("wheels", changed)])
    assert "/usr/bin/a differs between layer base and layer wheels" in message


def test_content_must_have_the_announced_size():
    short = TarEntry("a", "pack", "file", 0o644, 5, lambda: iter([b"four"]))
    assert "pack: a has 4 bytes, not 5" in refused("CAP-I104", written, [short])


@pytest.mark.parametrize(
    "name",
    [
        *("/etc/passwd", "..", "a/../b", "a//b", "a/./b", "./../a", "a\0b", "a\nb", "\udcff"),
        *("/", "//", "é" * 128, "n" * 256, "a/" * 2048 + "b"),
    ],
)
def test_unsafe_paths(name):
    assert "pack" in refused("CAP-I107", safe_path, name, "pack")


@pytest.mark.parametrize(
    ("name", "path"),
    [
        *((".", ""), ("./", ""), ("./a/b", "a/b"), ("a/b/", "a/b"), ("a/...", "a/..."), ("é", "é")),
        *((path, path) for path in ("n" * 255, "a/" * 2047 + "bc")),
    ],
)
def test_safe_paths(name, path):
    assert safe_path(name, "pack") == path


@pytest.mark.parametrize(
    ("member", "code"),
    [
        (Member("su", mode=0o4755), "CAP-I108"),
        (Member("su", mode=0o2755), "CAP-I108"),
        (Member("null", kind=tarfile.CHRTYPE), "CAP-I108"),
        (Member("disk", kind=tarfile.BLKTYPE), "CAP-I108"),
        (Member("pipe", kind=tarfile.FIFOTYPE), "CAP-I108"),
        (Member("hard", kind=tarfile.LNKTYPE, target="nothing"), "CAP-I108"),
        (Member("hard", kind=tarfile.LNKTYPE, target="../../etc/shadow"), "CAP-I107"),
        (Member("hard", kind=tarfile.LNKTYPE, target="/etc/shadow"), "CAP-I107"),
        (Member("soft", kind=tarfile.SYMTYPE, target=""), "CAP-I107"),
        (Member("/etc/passwd"), "CAP-I107"),
        (Member("a/../../b"), "CAP-I107"),
    ],
)
def test_dangerous_members(member, code):
    assert "layer" in refused(code, read, build_tar([member]))


def test_hard_links_become_copies():
    hard = Member("b", kind=tarfile.LNKTYPE, target="./a")
    data, facts = written(read(build_tar([Member("./a", b"x", mode=0o755), hard])))
    assert facts["a"] == facts["b"]
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert all(member.isreg() for member in archive)


GOOD = written(ENTRIES)[0]


@PROPERTY
@given(st.integers(0, len(GOOD) - 1), st.binary(min_size=1, max_size=8))
def test_damaged_archives_are_read_or_refused(position, junk):
    damaged = GOOD[:position] + junk + GOOD[position + len(junk) :]
    try:
        written(read(damaged))
    except CapsuleError as error:
        assert error.code in {"CAP-I104", "CAP-I107", "CAP-I108", "CAP-I109"}


@PROPERTY
@given(st.binary(max_size=2000))
def test_junk_is_read_or_refused(junk):
    try:
        read(junk)
    except CapsuleError as error:
        assert error.code in {"CAP-I104", "CAP-I107", "CAP-I108"}
