import base64
import gzip
import hashlib
import io
import subprocess
import sys
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError
from capsule.experiment.lock import LockedWheel
from capsule.image.archives import wheel
from capsule.image.archives.layers import write_tar
from capsule.image.archives.wheel import open_wheel, read_contents, wheel_entries
from capsule.image.distribution import DEBIAN_12
from capsule.image.recipe import load_recipe
from tests.image.conftest import TINY_WHEEL, Member, build_tar, build_wheel

SITE = DEBIAN_12.site

NAME = "small-1.0-py3-none-any.whl"
WHEEL = LockedWheel(name="small", version="1.0", filename=NAME, sha256="0" * 64)


def unpack(data, prune=(), wheel=WHEEL):
    """Return what an image would hold: path to fact, and path to content."""
    with open_wheel(io.BytesIO(data), wheel) as archive:
        entries = wheel_entries(archive, wheel, DEBIAN_12, prune)
        contents = {entry.path: b"".join(entry.content()) for entry in entries}
        return write_tar(entries, lambda _: None), contents


def refusal(code, data, wheel=WHEEL):
    with pytest.raises(CapsuleError) as caught:
        unpack(data, wheel=wheel)
    assert caught.value.code == code
    assert wheel.filename in str(caught.value)
    return str(caught.value)


def test_files_go_where_debian_s_python_finds_them():
    facts, contents = unpack(build_wheel(TINY_WHEEL))
    assert contents[f"{SITE}/small/data.bin"] == TINY_WHEEL["small/data.bin"]
    assert contents["usr/local/share/small/readme"] == b"read me\n"
    assert f"{SITE}/small-1.0.dist-info/RECORD" in contents
    assert contents["usr/local/bin/run"] == f"#!{DEBIAN_12.interpreter}\nprint(1)\n".encode()
    assert facts["usr/local/bin/run"].startswith("file 0755 ")
    assert not [path for path in contents if "__pycache__" in path]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("small-1.0.data/purelib/x.py", f"{SITE}/x.py"),
        ("small-1.0.data/platlib/x.so", f"{SITE}/x.so"),
        ("small-1.0.data/headers/x.h", "usr/local/include/python3.11/small/x.h"),
        ("small-1.0.data/data/etc/x", "usr/local/etc/x"),
        ("small-1.0.data/scripts/x", "usr/local/bin/x"),
        ("small-1.0.data.py", f"{SITE}/small-1.0.data.py"),
    ],
)
def test_installation_schemes(name, path):
    assert unpack(build_wheel({name: b"binary"}))[1][path] == b"binary"


@pytest.mark.parametrize(
    ("mode", "expected"), [(0o100755, "0755"), (0o100600, "0644"), (0, "0644")]
)
def test_modes_are_normalised(mode, expected):
    facts, _ = unpack(build_wheel({"small.py": b""}, modes={"small.py": mode}))
    assert facts[f"{SITE}/small.py"].split()[1] == expected


@pytest.mark.slow
def test_pip_installs_the_same(tmp_path):
    (tmp_path / NAME).write_bytes(build_wheel(TINY_WHEEL))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-index"]
    places = ["--find-links", tmp_path, "--target", tmp_path / "pip"]
    subprocess.run([*command, *places, "small"], check=True)
    by_pip = {
        path.relative_to(tmp_path / "pip").as_posix(): path.read_bytes()
        for path in (tmp_path / "pip").rglob("*")
        if path.is_file()
    }
    ours = {
        path.removeprefix(f"{SITE}/").removeprefix("usr/local/"): data
        for path, data in unpack(build_wheel(TINY_WHEEL))[1].items()
    }
    # pip keeps the wheel's compiled files, writes its own marks and its own interpreter's path.
    assert by_pip.keys() - ours.keys() == {
        "small-1.0.dist-info/INSTALLER",
        "small-1.0.dist-info/REQUESTED",
        "small/__pycache__/__init__.cpython-311.pyc",
    }
    different = {name for name, data in ours.items() if by_pip[name] != data}
    assert different == {"bin/run", "small-1.0.dist-info/RECORD"}


def test_pruning():
    patterns = ("*.pyi", "small/*", "!*/native.so")
    kept = {path.removeprefix(f"{SITE}/") for path in unpack(build_wheel(TINY_WHEEL), patterns)[1]}
    assert {path for path in kept if path.startswith("small/")} == {"small/native.so"}


def test_pruning_torch_keeps_what_torch_starts():
    patterns = load_recipe("cpu", "debian-12").prune_patterns("torch")
    gone = ["torch/bin/protoc", "torch/include/a/b.h", "torch/test/x", "torch/lib/liba_test.so"]
    kept = ["torch/bin/torch_shm_manager", "torch/lib/libtorch.so", "torch/testing/__init__.py"]
    data = build_wheel(dict.fromkeys([*gone, *kept, "torch/a.pyi"], b""), name="torch")
    wheel = WHEEL.model_copy(update={"name": "torch"})
    contents = unpack(data, patterns, wheel)[1]
    assert {p.removeprefix(f"{SITE}/") for p in contents if p.startswith(f"{SITE}/torch/")} == set(
        kept
    )


def lie(old, new):
    """Build a wheel whose RECORD says ``new`` where it should say ``old``."""
    wheel = build_wheel(TINY_WHEEL, record=lambda text: text.replace(old, new, 1))
    assert wheel != build_wheel(TINY_WHEEL)
    return wheel


@pytest.mark.parametrize(
    ("data", "finding"),
    [
        (lie("small/data.bin,sha256=", "small/data.bin,sha256=AAAA"), "another sha256 digest"),
        (lie(",10240", ",10241"), "has 10,240 bytes, not 10,241"),
        (lie("small/data.bin,", "small/other.bin,"), "small/other.bin is recorded but not in it"),
        (lie("small/native.so,sha256", "small/native.so,md5"), "is not acceptable"),
        (lie("small/native.so,sha256", "small/native.so,"), "is not acceptable"),
        (lie("small/native.so,", "small/native.so;"), "cannot be read"),
        (lie(",10240", ",many"), "cannot be read"),
        (build_wheel(TINY_WHEEL, record=lambda text: text.partition("\n")[2]), "is not recorded"),
        (build_wheel(TINY_WHEEL, record=lambda text: text + text), "is not acceptable"),
    ],
)
def test_lying_records(data, finding):
    assert finding in refusal("CAP-I106", data)


def test_a_record_may_leave_sizes_out_and_use_longer_digests():
    digest = base64.urlsafe_b64encode(hashlib.sha512(b"").digest()).rstrip(b"=").decode()
    data = build_wheel(
        {"empty.py": b""},
        record=lambda text: f"empty.py,sha512={digest},\n" + text.partition("\n")[2],
    )
    assert unpack(data)[1][f"{SITE}/empty.py"] == b""


def rewritten(change):
    """Build a wheel whose members went through ``change(name, data)``; None leaves one out."""
    source = zipfile.ZipFile(io.BytesIO(build_wheel(TINY_WHEEL)))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for member in source.infolist():
            data = change(member.filename.rpartition("/")[2], source.read(member))
            if data is not None:
                archive.writestr(member, data)
    return buffer.getvalue()


def without(gone):
    return rewritten(lambda name, data: None if name == gone else data)


def twice(name):
    buffer = io.BytesIO(build_wheel(TINY_WHEEL))
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr(name, b"again")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("make", "finding"),
    [
        (lambda: gzip.compress(build_tar([Member("small-1.0/setup.py")])), "not a zip file"),
        (lambda: build_wheel(TINY_WHEEL)[:-40], "not a zip file"),
        (lambda: without("RECORD"), "lacks WHEEL, METADATA or RECORD"),
        (lambda: without("WHEEL"), "lacks WHEEL, METADATA or RECORD"),
        (lambda: build_wheel({"other-2.dist-info/x": b""}), "its .dist-info folders are"),
        (lambda: build_wheel({}, version="1.1"), "the lock says small 1.0"),
        (lambda: build_wheel({}, name="large"), "the lock says small 1.0"),
        (lambda: build_wheel({}, version="new"), "the lock says small 1.0"),
        (lambda: build_wheel({"small-1.0.data/magic/x": b""}), "no installation scheme"),
        (lambda: twice("small/__init__.py"), "twice"),
        (lambda: rewritten(lambda _, d: d.replace(b"ion: 1.0", b"ion: 2.0")), "format b'2.0'"),
    ],
)
def test_not_a_wheel(make, finding):
    assert finding in refusal("CAP-I105", make())


@pytest.mark.parametrize(
    "text", ["a >", f"a; {'(' * 1_500}os_name == 'posix'{')' * 1_500}"], ids=["cut off", "nested"]
)
def test_a_wheel_needs_what_can_be_parsed(text):
    refused = pytest.raises(CapsuleError, match=f"CAP-I105 {NAME} has a malformed METADATA")
    data = io.BytesIO(build_wheel({}, requires=["a", text]))
    with open_wheel(data, WHEEL) as archive, refused:
        read_contents(archive, WHEEL, DEBIAN_12)


@pytest.mark.parametrize("name", ["../escape.py", "/etc/passwd", "a/../../b", "a//b"])
def test_paths_that_leave(name):
    refusal("CAP-I107", build_wheel({name: b""}))


@pytest.mark.parametrize("mode", [0o120777, 0o020644, 0o104755, 0o102755])
def test_links_and_privileges(mode):
    refusal("CAP-I108", build_wheel({"small/x": b"/etc/shadow"}, modes={"small/x": mode}))


@pytest.mark.parametrize("name", ["capsule/x.py", "small-1.0.data/purelib/capsule/x.py"])
def test_capsule_s_own_package_is_reserved(name):
    assert "Capsule's own code" in refusal("CAP-I109", build_wheel({name: b""}))


def test_damaged_content_is_noticed_while_it_is_read():
    plain = build_wheel({"small/data.bin": bytes(5000)})
    start = plain.index(b"small/data.bin") + len("small/data.bin")
    damaged = plain[:start] + b"\xff" + plain[start + 1 :]
    assert "damaged" in refusal("CAP-I105", damaged)


GOOD = build_wheel(TINY_WHEEL)


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_a_flipped_byte_never_changes_content(position, mask):
    damaged = bytearray(GOOD)
    damaged[position] ^= mask
    try:
        _, contents = unpack(bytes(damaged))
    except CapsuleError as error:
        assert error.code in {"CAP-I105", "CAP-I106", "CAP-I107", "CAP-I108"}
    else:
        known = unpack(GOOD)[1]
        assert {path: known.get(path) for path in contents} == contents


def contents_of(files, **how):
    with open_wheel(io.BytesIO(build_wheel(files, **how)), WHEEL) as archive:
        return read_contents(archive, WHEEL, DEBIAN_12)


@pytest.mark.parametrize(
    "text",
    [
        *("[torch.backends]\na = b", "x = y\n [ torch.backends ] \n", "[[torch.backends]]"),
        "[a]\r[torch.backends]",
    ],
)
def test_groups_of_entry_points_are_found(text):
    found = contents_of({"small-1.0.dist-info/entry_points.txt": text.encode()})
    assert "torch.backends" in found.entry_points


@pytest.mark.parametrize("text", ["\n" * 300_000 + "x", "[" + " " * 300_000 + "x\n"])
def test_groups_of_entry_points_are_found_in_linear_time(text):
    contents_of({"small-1.0.dist-info/entry_points.txt": text.encode()})


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("METADATA", {"requires": ["a"] * 1000}),
        ("RECORD", {"record": lambda text: text + "x" * 5000}),
        ("entry_points.txt", {}),
    ],
)
def test_a_document_that_is_too_large_is_not_read(monkeypatch, name, how):
    monkeypatch.setattr(wheel, "_MAX_DOCUMENT_BYTES", 5000)
    data = build_wheel({} if how else {f"small-1.0.dist-info/{name}": b"x" * 5001}, **how)

    def read():
        with open_wheel(io.BytesIO(data), WHEEL) as archive:
            read_contents(archive, WHEEL, DEBIAN_12)
            wheel_entries(archive, WHEEL, DEBIAN_12)

    with pytest.raises(CapsuleError, match=rf"{name} has [0-9,]+ bytes, more than 5,000") as caught:
        read()
    assert caught.value.code == "CAP-I105"


def test_a_wheel_may_not_have_any_number_of_requirements(monkeypatch):
    monkeypatch.setattr(wheel, "_MAX_REQUIREMENTS", 2)
    assert len(contents_of({}, requires=["a"] * 2).requires) == 2
    with pytest.raises(CapsuleError, match="3 requirements, more than 2") as caught:
        contents_of({}, requires=["a"] * 3)
    assert caught.value.code == "CAP-I105"
