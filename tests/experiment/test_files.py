"""Atomic writes; and files on systems without descriptors of folders and reads at offsets."""

import os

import pytest

from capsule.bundle.archive import create_file
from capsule.experiment import beneath, files
from capsule.experiment.beneath import entries_beneath, open_beneath, remove_folder
from capsule.experiment.canonical import sha256_file, sha256_hex
from capsule.experiment.files import open_regular, write_atomic
from capsule.host.errors import CapsuleError

NOT_ON_WINDOWS = (
    *("CON", "nul", "Nul.txt", "com1.tar.gz", "LPT9", "aux .log", "conin$", "COM¹"),
    *(
        "dot.",
        "dots...",
        "blank ",
        "a:b",
        "C:",
        "a\\b",
        "..\\b",
        'quote"',
        "what?",
        "*",
        "tab\tbed",
    ),
)
ON_WINDOWS = ("console", "nullify.txt", ".hidden", "a.b", "com", "com10", "a b", "ü", "prn_")


@pytest.fixture
def windows(monkeypatch):
    """Make the three modules take the ways of Windows."""
    monkeypatch.setattr(files, "FOLDERS_OPEN", False)
    monkeypatch.setattr(beneath, "FOLDERS_OPEN", False)


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "folder"
    (place / "below").mkdir(parents=True)
    (place / "below" / "file").write_bytes(b"a\r\nb")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_bytes(b"secret")
    return place


def test_a_file_below_a_folder_is_opened_and_made(folder, windows):
    with open_beneath(folder, "below/file") as stream:
        assert stream.read() == b"a\r\nb"
    with create_file(folder, "new/er/file") as stream:
        stream.write(b"a\nb")
    assert (folder / "new" / "er" / "file").read_bytes() == b"a\nb"
    with pytest.raises(FileExistsError):
        create_file(folder, "new/er/file")
    assert {entry.path for entry in entries_beneath(folder)} == {
        *("below", "below/file", "new", "new/er", "new/er/file")
    }


def test_links_are_followed_by_neither_reader_nor_writer(folder, windows):
    (folder / "file").symlink_to(folder.parent / "secret")
    (folder / "away").symlink_to(folder.parent / "elsewhere")
    for path in ("file", "away/secret"):
        with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
            open_beneath(folder, path)
        with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
            create_file(folder, path)
    with pytest.raises(OSError, match="symbolic links"):
        open_regular(folder / "file", follow=False)
    with open_regular(folder / "file") as stream:
        assert stream.read() == b"secret"
    assert not any("secret" in entry.path for entry in entries_beneath(folder))


def test_a_junction_is_a_link():
    class Facts:
        st_mode = 0o040777
        st_reparse_tag = 0xA0000003  # IO_REPARSE_TAG_MOUNT_POINT

    assert files.is_link(Facts)
    Facts.st_reparse_tag = (
        0x9000001A  # IO_REPARSE_TAG_CLOUD: a folder that OneDrive keeps elsewhere
    )
    assert not files.is_link(Facts)


@pytest.mark.parametrize("name", NOT_ON_WINDOWS)
def test_a_name_that_means_something_else_on_windows_is_rejected_there(folder, windows, name):
    for path in (name, f"below/{name}", f"{name}/file"):
        with pytest.raises(files.UnusableNameError):
            open_beneath(folder, path)
        with pytest.raises(CapsuleError, match="Windows cannot store the file") as refused:
            create_file(folder, path)
        assert refused.value.code == "CAP-B110"
    assert {entry.path for entry in entries_beneath(folder)} == {"below", "below/file"}


@pytest.mark.parametrize("name", ON_WINDOWS)
def test_other_names_are_used(folder, windows, name):
    create_file(folder, f"{name}/{name}").close()
    open_beneath(folder, f"{name}/{name}").close()


def test_linux_has_all_these_names(folder):
    for name in {*NOT_ON_WINDOWS, *ON_WINDOWS}:
        create_file(folder, name).close()


def test_a_folder_is_removed_without_descriptors(folder, windows):
    (folder / "away").symlink_to(folder.parent / "elsewhere")
    remove_folder(folder)
    assert not folder.exists()
    assert (folder.parent / "elsewhere" / "secret").exists()


@pytest.mark.parametrize("system", ["linux", "windows"])
def test_reading_at_an_offset_leaves_the_position(folder, system, monkeypatch):
    if system == "windows":
        monkeypatch.delattr(os, "preadv")
    with (folder / "below" / "file").open("rb", buffering=0) as stream:
        stream.seek(1)
        buffer = bytearray(3)
        assert files.read_at(stream.fileno(), memoryview(buffer), 2) == 2
        assert bytes(buffer) == b"\nb\0"
        assert files.read_at(stream.fileno(), memoryview(buffer), 4) == 0
        assert stream.tell() == 1


def test_flags_that_a_system_lacks_are_left_out(monkeypatch):
    monkeypatch.setattr(os, "O_BINARY", 1 << 29, raising=False)
    monkeypatch.delattr(os, "O_CLOEXEC")
    assert files.flags_of("RDONLY CLOEXEC BINARY") == os.O_RDONLY | 1 << 29


def test_an_atomic_write_replaces_or_leaves_alone(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "file"
    write_atomic(path, b"one")
    assert sha256_file(path) == sha256_hex(b"one")

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, b"two")
    assert path.read_bytes() == b"one"
    assert [item.name for item in path.parent.iterdir()] == ["file"]
