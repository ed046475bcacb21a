"""Outputs of commands: places that are rejected, and files that are complete or absent."""

import os
import stat
from pathlib import Path

import pytest

from capsule.host.errors import CapsuleError, ExitCode
from capsule.host.outputs import open_file, require_file, require_folder, write_file


def contents(folder):
    return {path.name: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def written(path):
    with open_file(path) as stream:
        stream.write(b"content")


@pytest.fixture
def place(tmp_path):
    """A folder with a file, a folder, a pipe and a link."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"earlier")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("file")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "code", "status", "reason"),
    [
        ("folder", "CAP-X004", ExitCode.USAGE, "it is a folder"),
        ("pipe", "CAP-X004", ExitCode.USAGE, "not a regular file"),
        ("/proc/x", "CAP-X004", ExitCode.USAGE, "No such file or directory"),
        ("/proc/new/x", "CAP-X004", ExitCode.USAGE, "No such file or directory"),
        ("file/x", "CAP-X003", ExitCode.INCONCLUSIVE, "Not a directory"),
    ],
)
@pytest.mark.parametrize("write", [require_file, lambda path: write_file(path, b"new"), written])
def test_a_file_that_cannot_be_written_is_named(place, write, name, code, status, reason):
    (place / "link").unlink()
    files = (path for path in place.rglob("*") if not path.is_fifo())
    before = {path: path.is_file() and path.read_bytes() for path in files}
    with pytest.raises(CapsuleError) as caught:
        write(place / name)
    assert (caught.value.code, caught.value.exit_code) == (code, status)
    assert caught.value.message == f"the output '{place / name}' cannot be written: {reason}"
    assert caught.value.fix == "Name another place, in a folder that you may write to."
    assert all(path.is_dir() or path.read_bytes() == data for path, data in before.items())
    assert len(list(place.rglob("*"))) == len(before) + 1


def test_letters_of_other_languages_are_shown_as_they_are(tmp_path):
    (tmp_path / "Läufe").touch()
    with pytest.raises(CapsuleError, match="Läufe/x' cannot be written"):
        write_file(tmp_path / "Läufe" / "x", b"")


@pytest.mark.parametrize("name", ["file", "link", "folder/../file"])
def test_an_input_is_not_replaced(place, name):
    with pytest.raises(CapsuleError, match="would replace a file that the command reads") as caught:
        require_file(place / name, [place / "folder", place / "file"])
    assert caught.value.code == "CAP-X004"
    require_file(place / "new", [place / "file", place / "missing"])
    require_file(Path("/dev/null"), [Path("/dev/null")])


def test_a_place_that_cannot_be_looked_up_is_named_beside_inputs(place):
    long = place / ("x" * 300)
    with pytest.raises(CapsuleError, match="cannot be written: File name too long") as caught:
        require_file(long, [place / "file"])
    assert caught.value.code == "CAP-X003"
    require_file(place / "new", [long])  # reading it fails later, with its own error


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        ("file", "CAP-X004", "not a folder"),
        ("pipe", "CAP-X004", "not a folder"),
        ("file/x", "CAP-X003", "Not a directory"),
        ("/proc/new", "CAP-X004", "No such file or directory"),
    ],
)
def test_a_folder_that_cannot_be_made_is_named(place, name, code, reason):
    with pytest.raises(CapsuleError) as caught:
        require_folder(place / name)
    assert caught.value.code == code
    assert caught.value.message == f"the output '{place / name}' cannot be written: {reason}"


def test_a_check_makes_nothing(tmp_path):
    (tmp_path / "folder").mkdir()
    for name in ("folder", "new", "new/folder"):
        require_folder(tmp_path / name)
        require_file(tmp_path / name / "file")
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


@pytest.mark.parametrize("write", [lambda path: write_file(path, b"content"), written])
@pytest.mark.parametrize("name", ["new", "new/folder/file", "file", "link"])
def test_a_file_is_made_with_its_folders_and_replaces_a_file_or_a_link(place, write, name):
    write(place / name)
    path = place / name
    assert path.read_bytes() == b"content"
    assert stat.S_IMODE(path.lstat().st_mode) == 0o644
    assert [each.name for each in path.parent.glob(".*")] == []
    if name != "file":
        assert (place / "file").read_bytes() == b"earlier"


def test_a_file_that_is_not_written_whole_leaves_the_earlier_one(tmp_path):
    (tmp_path / "file").write_bytes(b"earlier")
    with pytest.raises(KeyError), open_file(tmp_path / "file") as stream:
        stream.write(b"half")
        raise KeyError
    assert contents(tmp_path) == {"file": b"earlier"}


def test_a_device_and_the_pipe_of_a_shell_are_written_to():
    before = Path("/dev/null").stat()
    written(Path("/dev/null"))
    assert Path("/dev/null").stat().st_ino == before.st_ino
    reader, writer = os.pipe()
    written(Path(f"/dev/fd/{writer}"))
    os.close(writer)
    assert os.read(reader, 99) == b"content"
    os.close(reader)
