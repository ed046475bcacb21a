import errno
import hashlib
import io
import os
import stat
import struct
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.bundle.archive import (
    MAX_SIZE,
    ArchiveReader,
    create_file,
    header,
    open_archive,
    write,
)
from capsule.experiment.errors import CapsuleError, ExitCode

MEMBERS = {"claims.json": b'{"a":1}', "run/a.bin": b"y" * 700, "run/empty": b""}


def archive(members: dict[str, bytes] = MEMBERS) -> bytes:
    stream = io.BytesIO()
    write(stream, [(name, len(data), data) for name, data in members.items()])
    return stream.getvalue()


GOOD = archive()


def unpack(data: bytes, folder: Path) -> dict[str, bytes]:
    """Read an archive that must hold MEMBERS, the first one without knowing its size."""
    path = folder / "archive.tar"
    path.write_bytes(data)
    first, *rest = MEMBERS
    with open_archive(path) as stream:
        reader = ArchiveReader(stream)
        found = {first: reader.read(first, 1000)}
        for name in rest:
            content = MEMBERS[name]
            digest = hashlib.sha256(content).hexdigest()
            offset = reader.check(name, len(content), digest)
            found[name] = data[offset : offset + len(content)]
        reader.finish()
    return found


def forge(change: Callable[[tarfile.TarInfo], None], form: int = tarfile.USTAR_FORMAT) -> bytes:
    """Let tarfile write the second member, changed, between the canonical others."""
    info = tarfile.TarInfo("run/a.bin")
    info.size = len(MEMBERS["run/a.bin"])
    change(info)
    *extension, block = split(info.tobuf(form))
    if not extension:  # tarfile leaves the device numbers of plain files empty, GNU tar does not
        block = mended(block[:329] + b"0000000\0" * 2 + block[345:])
    return GOOD[:1024] + b"".join(extension) + block + GOOD[1536:]


def split(data: bytes) -> list[bytes]:
    return [data[start : start + 512] for start in range(0, len(data), 512)]


def mended(block: bytes) -> bytes:
    """Return a header block with its checksum made right."""
    total = sum(block[:148]) + 8 * 32 + sum(block[156:])
    return block[:148] + b"%06o\0 " % total + block[156:]


def setting(**values: object) -> Callable[[tarfile.TarInfo], None]:
    def change(info: tarfile.TarInfo) -> None:
        for name, value in values.items():
            setattr(info, name, value)

    return change


def patched(offset: int, new: bytes, *, checksum: bool = True) -> bytes:
    """Overwrite bytes of the second member's header and mend its checksum."""
    block = GOOD[1024 : 1024 + offset] + new + GOOD[1024 + offset + len(new) : 1536]
    return GOOD[:1024] + (mended(block) if checksum else block) + GOOD[1536:]


def extra(name: str, data: bytes = b"?") -> bytes:
    return header(name, len(data)) + data + bytes(-len(data) % 512)


def compressed(module: str) -> bytes:
    import bz2
    import gzip
    import lzma

    import zstandard

    compress = {
        "gzip": gzip.compress,
        "bzip2": bz2.compress,
        "xz": lzma.compress,
        "zstd": zstandard.compress,
    }[module]
    return compress(GOOD)


def zipped() -> bytes:
    import zipfile

    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as target:
        target.writestr("claims.json", b"{}")
    return stream.getvalue()


EVIL = {
    # members: extra, missing, swapped, duplicated (cases 21, 22)
    "extra member at the end": (lambda: GOOD[:-1024] + extra("x") + bytes(1024), "CAP-B109"),
    "extra member between": (lambda: GOOD[:1024] + extra("x") + GOOD[1024:], "CAP-B107"),
    "duplicate member": (lambda: GOOD[:1024] + GOOD, "CAP-B107"),
    "duplicate at the end": (lambda: GOOD[:-1024] + GOOD[:1024] + bytes(1024), "CAP-B109"),
    "missing member": (lambda: GOOD[:1024] + GOOD[2560:], "CAP-B107"),
    "other order": (lambda: archive(dict(reversed(MEMBERS.items()))), "CAP-B107"),
    "other content": (lambda: archive({**MEMBERS, "run/a.bin": b"z" * 700}), "CAP-B108"),
    "shorter content": (lambda: archive({**MEMBERS, "run/a.bin": b"y" * 699}), "CAP-B107"),
    "longer content": (lambda: archive({**MEMBERS, "run/a.bin": b"y" * 701}), "CAP-B107"),
    "padding of a document": (lambda: GOOD[:1023] + b"x" + GOOD[1024:], "CAP-B106"),
    # names (case 23)
    "parent folder": (lambda: forge(setting(name="../a.bin")), "CAP-B107"),
    "absolute name": (lambda: forge(setting(name="/run/a.bin")), "CAP-B107"),
    "dot component": (lambda: forge(setting(name="./run/a.bin")), "CAP-B107"),
    "empty component": (lambda: forge(setting(name="run//a.bin")), "CAP-B107"),
    "backslash": (lambda: forge(setting(name="run\\a.bin")), "CAP-B107"),
    "NUL tail in the name": (lambda: patched(10, b"x"), "CAP-B107"),
    "split into prefix and name": (
        lambda: patched(0, b"a.bin".ljust(100, b"\0") + GOOD[1124:1369] + b"run"),
        "CAP-B107",
    ),
    # types (case 24)
    **{
        f"type {kind!r}": (lambda kind=kind: forge(setting(type=kind)), "CAP-B107")
        for kind in (b"\0", b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"S", b"x", b"g", b"L", b"?")
    },
    "symbolic link": (lambda: forge(setting(type=tarfile.SYMTYPE, linkname="/etc")), "CAP-B107"),
    "hard link": (lambda: forge(setting(type=tarfile.LNKTYPE, linkname="x")), "CAP-B107"),
    "link name of a plain file": (lambda: patched(157, b"/etc/passwd"), "CAP-B107"),
    # extension headers (case 25)
    "PAX path": (
        lambda: forge(setting(pax_headers={"path": "evil"}), tarfile.PAX_FORMAT),
        "CAP-B107",
    ),
    "PAX comment": (
        lambda: forge(setting(pax_headers={"comment": "hello"}), tarfile.PAX_FORMAT),
        "CAP-B107",
    ),
    "GNU long name": (lambda: forge(setting(name="x" * 200), tarfile.GNU_FORMAT), "CAP-B107"),
    "GNU magic": (lambda: patched(257, b"ustar  \0"), "CAP-B107"),
    "base-256 size": (lambda: patched(124, b"\x80" + struct.pack(">xxxQ", 700)), "CAP-B107"),
    "size padded with spaces": (lambda: patched(124, b"       1274\0"), "CAP-B107"),
    "size closed by a space": (lambda: patched(124, b"00000001274 "), "CAP-B107"),
    # metadata and slack (case 26)
    "set-user-id": (lambda: forge(setting(mode=0o4755)), "CAP-B107"),
    "owner": (lambda: forge(setting(uid=1000)), "CAP-B107"),
    "group": (lambda: forge(setting(gid=1000)), "CAP-B107"),
    "owner name": (lambda: forge(setting(uname="root")), "CAP-B107"),
    "date": (lambda: forge(setting(mtime=1)), "CAP-B107"),
    "bytes after the header": (lambda: patched(500, b"x"), "CAP-B107"),
    "wrong checksum": (lambda: patched(148, b"000000\0 ", checksum=False), "CAP-B107"),
    "padding": (lambda: GOOD[:2559] + b"x" + GOOD[2560:], "CAP-B106"),
    # ends (case 27)
    "empty": (lambda: b"", "CAP-B104"),
    "cut in the first header": (lambda: GOOD[:100], "CAP-B104"),
    "cut in a later header": (lambda: GOOD[:1100], "CAP-B104"),
    "cut in data": (lambda: GOOD[:1600], "CAP-B104"),
    "cut in padding": (lambda: GOOD[:2300], "CAP-B104"),
    "no end": (lambda: GOOD[:-1024], "CAP-B104"),
    "half an end": (lambda: GOOD[:-512], "CAP-B104"),
    "only an end": (lambda: bytes(1024), "CAP-B104"),
    "early end": (lambda: GOOD[:1024] + bytes(1024) + GOOD[1024:], "CAP-B104"),
    "spoilt end": (lambda: GOOD[:-1] + b"x", "CAP-B106"),
    "one byte after the end": (lambda: GOOD + b"\0", "CAP-B109"),
    "three zero blocks": (lambda: GOOD + bytes(512), "CAP-B109"),
    "record padding": (lambda: GOOD.ljust(10240, b"\0"), "CAP-B109"),
    "two archives": (lambda: GOOD + GOOD, "CAP-B109"),
    "member after one zero block": (lambda: GOOD[:-512] + GOOD, "CAP-B106"),
    # wrapping (cases 29, 30)
    **{
        f"{module} wrapping": (lambda module=module: compressed(module), "CAP-B103")
        for module in ("gzip", "bzip2", "xz", "zstd")
    },
    "zip": (zipped, "CAP-B103"),
    "tar and zip at once": (lambda: GOOD + zipped(), "CAP-B109"),
    "noise": (lambda: b"\xff" * 4096, "CAP-B107"),
}


def test_the_canonical_archive_is_accepted(tmp_path):
    assert unpack(GOOD, tmp_path) == MEMBERS


@pytest.mark.parametrize("name", EVIL)
def test_anything_else_is_refused(name, tmp_path):
    make, code = EVIL[name]
    assert make() != GOOD
    with pytest.raises(CapsuleError) as caught:
        unpack(make(), tmp_path)
    assert (caught.value.code, caught.value.exit_code) == (code, ExitCode.TAMPERED)
    assert caught.value.message.isprintable()
    assert {path.name for path in tmp_path.iterdir()} == {"archive.tar"}


def test_a_forgery_that_changes_nothing_is_the_canonical_archive():
    # The twin of every forgery above: what is refused there is what was changed there.
    assert forge(setting()) == forge(setting(), tarfile.PAX_FORMAT) == GOOD
    assert forge(setting(type=tarfile.REGTYPE, mode=0o644, uid=0, uname="", mtime=0)) == GOOD
    assert patched(0, b"run/a.bin") == GOOD


def test_the_error_names_the_field_that_differs(tmp_path):
    with pytest.raises(CapsuleError, match=r"'mode' of run/a.bin is '0004755', must be '0000644'"):
        unpack(forge(setting(mode=0o4755)), tmp_path)


def test_an_empty_file_is_said_to_be_empty(tmp_path):
    with pytest.raises(CapsuleError, match="CAP-B104 the bundle is an empty file"):
        unpack(b"", tmp_path)


def test_control_sequences_in_names_are_never_printed(tmp_path):
    with pytest.raises(CapsuleError) as caught:
        unpack(forge(setting(name="\x1b[2Jevil")), tmp_path)
    assert "\x1b" not in str(caught.value)
    assert r"\x1b[2Jevil" in str(caught.value)


def test_gnu_tar_writes_the_same_bytes(tmp_path):
    for name, data in MEMBERS.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    options = "--format=ustar --numeric-owner --owner=0 --group=0 --mtime=@0 --mode=0644 -b 1"
    command = ["tar", *options.split(), "-cf", "-", *MEMBERS]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=True).stdout == GOOD


def test_the_format_does_not_drift():
    digest = "23a216bf85d61761de13b4b7229285bc62dc7c7ed9bfeffad07f486feb03fedd"
    data = archive({"claims.json": b'{"a":1}', "run/a.bin": b"yyyy", "run/empty": b""})
    assert hashlib.sha256(data).hexdigest() == digest


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../a", "a/..", "a/../b", "/a", "./a", "a//b", "a/", "a\\b", "C:a"),
        *("a\0b", "-rf", "a/-b", ".ssh", "a/.b", "a\n", "a b", "é", "a\u202eb", "x" * 101),
    ],
)
def test_names_outside_the_alphabet_have_no_header(name):
    with pytest.raises(ValueError, match="not a canonical member name"):
        header(name, 0)


@pytest.mark.parametrize("name", ["a", "A-1._", "_", "0/1/2", "a..b", "x" * 100])
def test_names_inside_the_alphabet_have_one(name):
    assert header(name, 0)[:100].rstrip(b"\0").decode() == name


@pytest.mark.parametrize(("size", "fits"), [(0, 1), (MAX_SIZE, 1), (MAX_SIZE + 1, 0), (-1, 0)])
def test_sizes(size, fits):
    if fits:
        assert int(header("a", size)[124:135], 8) == size
    else:
        with pytest.raises(ValueError, match="does not fit"):
            header("a", size)


COMPONENT = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,8}", fullmatch=True)
NAMES = st.lists(COMPONENT, min_size=1, max_size=4).map("/".join)


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(st.dictionaries(NAMES, st.binary(max_size=1500), max_size=5))
def test_tarfile_reads_what_was_written(members):
    with tarfile.open(fileobj=io.BytesIO(archive(members))) as tar:
        infos = tar.getmembers()
        found = {info.name: tar.extractfile(info).read() for info in infos}
    assert found == members
    assert all(info.isreg() and info.mode == 0o644 for info in infos)
    assert all((info.uid, info.gid, info.mtime, info.uname) == (0, 0, 0, "") for info in infos)


def test_the_writer_reports_what_it_wrote():
    digests = write(io.BytesIO(), [("a", 2, b"hi"), ("b", 2, lambda: io.BytesIO(b"hi, longer"))])
    assert digests == dict.fromkeys("ab", hashlib.sha256(b"hi").hexdigest())


def test_a_source_shorter_than_its_size_is_an_error():
    with pytest.raises(EOFError):
        write(io.BytesIO(), [("a", 3, b"hi")])


def test_the_size_of_the_archive_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr("capsule.bundle.archive.MAX_ARCHIVE", len(GOOD))
    assert unpack(GOOD, tmp_path) == MEMBERS
    monkeypatch.setattr("capsule.bundle.archive.MAX_ARCHIVE", len(GOOD) - 1)
    with pytest.raises(CapsuleError, match="CAP-B105"):
        unpack(GOOD, tmp_path)


@pytest.mark.parametrize(("limit", "fits"), [(7, True), (6, False)])
def test_a_document_is_not_read_beyond_its_limit(limit, fits, tmp_path):
    path = tmp_path / "archive.tar"
    path.write_bytes(GOOD)
    with open_archive(path) as stream:
        reader = ArchiveReader(stream)
        if fits:
            assert reader.read("claims.json", limit) == MEMBERS["claims.json"]
        else:
            with pytest.raises(CapsuleError, match="CAP-B105"):
                reader.read("claims.json", limit)


def test_a_sparse_giant_is_refused_by_its_size(tmp_path):
    path = tmp_path / "archive.tar"
    with path.open("wb") as stream:
        stream.truncate(20 << 30)
    with open_archive(path) as stream, pytest.raises(CapsuleError, match="CAP-B105"):
        ArchiveReader(stream)


def _link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [os.mkfifo, _link_to_a_device])
def test_a_bundle_is_a_regular_file(make, tmp_path):
    make(tmp_path / "bundle")
    with pytest.raises(CapsuleError) as caught:
        open_archive(tmp_path / "bundle")  # a pipe without a writer must not block
    assert (caught.value.code, caught.value.exit_code) == ("CAP-B102", ExitCode.TAMPERED)


def test_a_folder_is_a_usage_error(tmp_path):
    with pytest.raises(CapsuleError) as caught:
        open_archive(tmp_path)
    assert (caught.value.code, caught.value.exit_code) == ("CAP-B101", ExitCode.USAGE)
    assert caught.value.message == f"{str(tmp_path)!r} is a folder"


def test_a_folder_that_cannot_be_opened_is_a_usage_error(monkeypatch):
    """As on Windows, even without any name in its path."""

    def denied(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("capsule.bundle.archive.open_regular", denied)
    with pytest.raises(CapsuleError) as caught:
        open_archive(Path())
    assert (caught.value.code, caught.value.exit_code) == ("CAP-B101", ExitCode.USAGE)


def test_a_missing_bundle_is_a_usage_error(tmp_path):
    with pytest.raises(CapsuleError) as caught:
        open_archive(tmp_path / "bundle")
    assert (caught.value.code, caught.value.exit_code) == ("CAP-B101", ExitCode.USAGE)


def test_replacing_the_path_after_opening_changes_nothing(tmp_path):
    path = tmp_path / "archive.tar"
    path.write_bytes(GOOD)
    with open_archive(path) as stream:
        path.unlink()
        path.write_bytes(b"evil" * 1000)
        assert ArchiveReader(stream).read("claims.json", 100) == MEMBERS["claims.json"]


def test_growth_after_opening_is_noticed(tmp_path):
    path = tmp_path / "archive.tar"
    path.write_bytes(archive({"a": b""}))
    with open_archive(path) as stream:
        reader = ArchiveReader(stream)
        with path.open("ab") as other:
            other.write(extra("late"))
        assert reader.read("a", 1) == b""
        with pytest.raises(CapsuleError, match="CAP-B109"):
            reader.finish()


def test_staged_files_are_private_and_new(tmp_path):
    with create_file(tmp_path, "a/b/c") as stream:
        stream.write(b"x")
    assert stat.S_IMODE((tmp_path / "a/b/c").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "a/b").stat().st_mode) == 0o700
    with pytest.raises(FileExistsError):
        create_file(tmp_path, "a/b/c")


def test_staging_follows_no_planted_link(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    root = tmp_path / "root"
    root.mkdir()
    (root / "folder").symlink_to(outside)
    (root / "file").symlink_to(outside / "file")
    for name in ("folder/a", "file"):
        with pytest.raises(OSError, match=r"Not a directory|File exists|symbolic links"):
            create_file(root, name)
    assert not any(outside.iterdir())


@pytest.mark.parametrize(("offset", "field"), [(329, "devmajor"), (151, "chksum")])
def test_a_wrong_checksum_is_named_only_if_the_other_fields_are_right(offset, field, tmp_path):
    data = bytearray(GOOD)
    data[151] ^= 1  # of the checksum
    data[offset] = ord("1")
    with pytest.raises(CapsuleError, match=f"header field '{field}' of claims.json is "):
        unpack(bytes(data), tmp_path)
