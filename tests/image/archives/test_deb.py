import gzip
import io
import itertools
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError
from capsule.experiment.lock import LockedDebianPackage
from capsule.image.archives.deb import ar_members, control_fields, deb_entries
from capsule.image.archives.layers import write_tar
from tests.image.conftest import LONG_NAME, TINY_DEB, Member, build_ar, build_deb, build_tar

PROPERTY = settings(deadline=None, max_examples=150)
PACKAGE = LockedDebianPackage(
    name="tiny",
    version="1.0-1",
    architecture="all",
    pool="pool/main/t/tiny_1.0-1_all.deb",
    size=1,
    sha256="0" * 64,
    requested=True,
)


def unpack(data, folder, package=PACKAGE):
    """Return what an image would hold: path to fact, and path to content."""
    path = folder / "object"
    path.write_bytes(data)
    with (folder / "scratch").open("w+b") as scratch:
        entries = deb_entries(path, package, scratch)
        contents = {e.path: b"".join(e.content()) for e in entries if e.kind == "file"}
        return write_tar(entries, lambda _: None), contents


def refusal(code, data, folder, package=PACKAGE):
    with pytest.raises(CapsuleError) as caught:
        unpack(data, folder, package)
    assert caught.value.code == code
    assert "tiny_1.0-1_all.deb" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("suffix", [".xz", ".gz", ".zst"])
def test_unpacked_under_merged_usr(tmp_path, suffix):
    facts, contents = unpack(build_deb(TINY_DEB, suffix=suffix), tmp_path)
    assert contents["usr/bin/tool"] == contents["usr/bin/alias"] == b"#!/bin/sh\n"
    assert contents[f"usr/share/{LONG_NAME}"] == b"long\n"
    assert facts[f"usr/share/{LONG_NAME}"].startswith("file 0600 ")
    assert facts["usr/lib64/loader"] == "symlink /lib/loader.so"
    assert facts["var/local"] == facts["tmp"] == "directory"
    assert not {"bin", "lib64"} & facts.keys()
    assert contents["var/lib/dpkg/status.d/tiny"].startswith(b"Package: tiny\nVersion: 1.0-1\n")


def test_several_packages_share_one_scratch_file(tmp_path):
    (tmp_path / "a").write_bytes(build_deb([Member("a", b"1")]))
    (tmp_path / "b").write_bytes(build_deb([Member("b", b"2")]))
    with (tmp_path / "scratch").open("w+b") as scratch:
        entries = [e for name in "ab" for e in deb_entries(tmp_path / name, PACKAGE, scratch)]
        assert {e.path: b"".join(e.content()) for e in reversed(entries) if e.path in "ab"} == {
            "a": b"1",
            "b": b"2",
        }


def test_dpkg_deb_agrees(tmp_path):
    if not shutil.which("dpkg-deb"):
        pytest.skip("no dpkg-deb on this machine")
    facts, contents = unpack(build_deb(TINY_DEB), tmp_path)
    subprocess.run(["dpkg-deb", "-x", tmp_path / "object", tmp_path / "out"], check=True)
    for member in TINY_DEB:
        path = tmp_path / "out" / member.name
        ours = member.name.removeprefix("./").replace("bin/", "usr/bin/", 1)
        if path.is_file() and not path.is_symlink():
            assert path.read_bytes() == contents[ours]
            assert facts[ours].split()[1] == f"{path.stat().st_mode & 0o7777:04o}"


@pytest.mark.parametrize(
    ("field", "value"), [("name", "other"), ("version", "1.0-2"), ("architecture", "amd64")]
)
def test_another_package_than_the_locked_one(tmp_path, field, value):
    other = PACKAGE.model_copy(update={field: value})
    assert repr(value) in refusal("CAP-I104", build_deb(TINY_DEB), tmp_path, other)


GOOD = build_deb(TINY_DEB)
CONTROL = Member("control", b"Package: tiny\nVersion: 1.0-1\nArchitecture: all\n")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04 not an ar archive",
        GOOD[:-1],
        GOOD[:100],
        GOOD + b"tail",
        build_ar({"debian-binary": b"2.0\n"}),
        build_ar({"debian-binary": b"3.0\n", "control.tar.gz": b"", "data.tar.gz": b""}),
        build_ar({"debian-binary": b"2.0\n", "control.tar.gz": b"", "data.tar.gz": b""}),
        build_ar({"debian-binary": b"2.0\n", "control.tar.lzma": b"", "data.tar.gz": b""}),
        build_ar({"control.tar.gz": b"", "debian-binary": b"2.0\n", "data.tar.gz": b""}),
        GOOD.replace(b"\xfd7zXZ", b"\xfd7zXY"),
        build_ar(
            {
                "debian-binary": b"2.0\n",
                "control.tar.gz": gzip.compress(build_tar([CONTROL])),
                "data.tar.gz": gzip.compress(build_tar([])) + b"more",
            }
        ),
        build_ar(
            {
                "debian-binary": b"2.0\n",
                "control.tar.gz": gzip.compress(build_tar([])),
                "data.tar.gz": gzip.compress(build_tar([])),
            }
        ),
        build_deb([Member("./usr/share/x")], suffix=".gz").replace(
            b"\x1f\x8b\x08", b"\x1f\x8b\x09"
        ),
        build_deb([Member("x")], suffix=".zst").replace(b"\x28\xb5\x2f\xfd", b"\x28\xb5\x2f\xfe"),
    ],
    ids=itertools.count(),  # the bytes have the time in them
)
def test_broken_packages(tmp_path, data):
    refusal("CAP-I104", data, tmp_path)


@pytest.mark.parametrize(
    ("member", "code"),
    [
        (Member("./usr/bin/su", mode=0o4755), "CAP-I108"),
        (Member("./../escape"), "CAP-I107"),
    ],
)
def test_dangerous_packages(tmp_path, member, code):
    refusal(code, build_deb([member]), tmp_path)


@PROPERTY
@given(
    st.dictionaries(
        st.text("abcdefghijklmnopqrstuvwxyz.-_", min_size=1, max_size=15), st.binary(max_size=50)
    )
)
def test_ar_members_lie_where_the_index_says(members):
    data = build_ar(members)
    index = ar_members(io.BytesIO(data), "pack")
    assert {m.name: data[m.offset : m.offset + m.size] for m in index} == members


@PROPERTY
@given(st.binary(max_size=300), st.booleans())
def test_ar_junk_is_read_or_refused(junk, with_magic):
    data = b"!<arch>\n" * with_magic + junk
    try:
        members = ar_members(io.BytesIO(data), "pack")
        assert all(m.offset + m.size <= len(data) for m in members)
    except CapsuleError as error:
        assert error.code == "CAP-I104"


@settings(deadline=None, max_examples=100)
@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_a_flipped_byte_is_harmless_or_refused(tmp_path_factory, position, mask):
    damaged = bytearray(GOOD)
    damaged[position] ^= mask
    folder = tmp_path_factory.mktemp("deb")
    try:
        assert unpack(bytes(damaged), folder) == unpack(GOOD, folder)
    except CapsuleError as error:
        assert error.code == "CAP-I104"


def test_fields_are_first_lines():
    text = "Package: a\nDescription: short: text\n long: text\n .\nVersion: 1:2.0\n"
    assert control_fields(text) == {
        "Package": "a",
        "Description": "short: text",
        "Version": "1:2.0",
    }


@PROPERTY
@given(st.text())
def test_fields_survive_any_text(text):
    assert isinstance(control_fields(text), dict)
