"""Outputs of commands: places that are rejected, and files that are complete or absent."""

import errno
import fcntl
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from capsule.experiment.files import NotRegularError
from capsule.export.folders import new_folder
from capsule.host.errors import CapsuleError, ExitCode
from capsule.host.outputs import (
    append,
    open_file,
    open_output,
    require_file,
    require_folder,
    write_file,
    write_new,
    write_output,
)
from capsule.host.owner import temporary_folder


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


def test_a_device_that_is_named_as_output_stays_one():
    write_output(Path(os.devnull), b"{}")
    assert Path(os.devnull).is_char_device()


def test_an_output_goes_into_the_pipe_of_a_process_substitution():
    reader, writer = os.pipe()
    write_output(Path(f"/dev/fd/{writer}"), b"{}")
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        assert stream.read() == b"{}"


def test_what_others_planted_where_an_output_goes_is_neither_followed_nor_waited_for(tmp_path):
    path = tmp_path / "report.json"
    path.symlink_to("/dev/full")  # writing into it would fail
    write_output(path, b"{}")
    assert path.read_bytes() == b"{}"
    assert not path.is_symlink()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(NotRegularError):
        write_output(path, b"{}")
    assert path.is_fifo()
    with pytest.raises(NotRegularError):
        write_output(tmp_path, b"{}")


def test_a_new_file_is_written_with_its_mode(tmp_path):
    write_new(tmp_path / "secret", b"content", mode=0o600)
    assert (tmp_path / "secret").read_bytes() == b"content"
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_missing_folders_are_made(tmp_path):
    write_new(tmp_path / "new" / "folder" / "file", b"content")
    assert (tmp_path / "new" / "folder" / "file").read_bytes() == b"content"


def test_nothing_that_exists_is_replaced(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(FileExistsError):
            write_new(tmp_path / name, b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert not (tmp_path / "nowhere").exists()


def test_a_file_that_cannot_be_written_whole_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_new(tmp_path / "file", b"content")
    assert list(tmp_path.iterdir()) == []


def full(_descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_new_file_is_whole_on_a_file_system_without_hard_links(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    write_new(tmp_path / "file", b"content", mode=0o600)
    assert contents(tmp_path) == {"file": b"content"}
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "file", b"new")
    assert contents(tmp_path) == {"file": b"content"}


def exported(path):
    with new_folder(path) as folder:
        (folder / "file").write_bytes(b"content")


@pytest.fixture(params=[0o002, 0o022, 0o077], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize(
    "write",
    [written, lambda path: write_output(path, b""), lambda path: write_new(path, b""), exported],
)
def test_the_umask_decides_who_may_read_an_output(tmp_path, umask, write):
    write(tmp_path / "output")
    found = (tmp_path / "output").stat().st_mode
    assert stat.S_IMODE(found) == (0o777 if stat.S_ISDIR(found) else 0o666) & ~umask


KILLED = """
import os, signal, sys
from pathlib import Path
from capsule.export.folders import new_folder
from capsule.host.outputs import open_output
path = Path(sys.argv[2])
with {"file": open_output, "folder": new_folder}[sys.argv[1]](path) as output:
    if sys.argv[1] == "file":
        output.write(b"half")
    else:
        (output / "half").mkdir()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_the_next_output_removes_what_a_killed_process_left(tmp_path, kind):
    subprocess.run([sys.executable, "-c", KILLED, kind, tmp_path / "output"], check=False)
    (left,) = tmp_path.iterdir()
    assert list(left.iterdir())
    written(tmp_path / "another")
    assert contents(tmp_path) == {"another": b"content"}


def test_an_output_does_not_remove_other_folders_of_killed_processes(tmp_path):
    """The container of a killed process may still write there."""
    with temporary_folder("capsule-verify-", tmp_path) as left:
        pass
    left.mkdir()
    written(tmp_path / "output")
    assert left.exists()


def test_an_unfinished_output_of_a_living_process_stays(tmp_path):
    with open_output(tmp_path / "one") as one, new_folder(tmp_path / "folder") as folder:
        one.write(b"content")
        written(tmp_path / "two")
        (folder / "file").write_bytes(b"content")
    found = contents(tmp_path)
    assert found.pop("folder") is False
    assert found == dict.fromkeys(("one", "two", "file"), b"content")


def test_an_output_needs_no_locks(tmp_path, monkeypatch):
    def unlockable(*_, **__):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("capsule.host.locks.lock_file", unlockable)
    monkeypatch.setattr("capsule.host.owner.lock_file", unlockable)
    written(tmp_path / "output")
    assert contents(tmp_path) == {"output": b"content"}


def test_data_that_does_not_fit_is_not_appended_in_part(tmp_path):
    path = tmp_path / "metrics"
    append(path, b"one\n", heading=b"heading\n")
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15, hard))  # as on a disk with three bytes left
    try:
        with pytest.raises(OSError, match="File too large"):
            append(path, b"two\nthree\n", heading=b"heading\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"heading\none\n"
    append(path, b"two\n", heading=b"heading\n")
    assert path.read_bytes() == b"heading\none\ntwo\n"


def test_a_new_file_that_does_not_fit_is_removed(tmp_path):
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            append(tmp_path / "metrics", b"content")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_of_a_shell_is_appended_to_without_a_heading():
    reader, writer = os.pipe()
    for _ in range(2):
        append(Path(f"/dev/fd/{writer}"), b"row\n", heading=b"heading\n")
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        assert stream.read() == b"row\nrow\n"


def test_a_file_that_another_process_has_locked_is_appended_to(tmp_path):
    """The other process may have been stopped, and a run does not wait for it."""
    append(tmp_path / "metrics", b"one\n")
    with (tmp_path / "metrics").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        append(tmp_path / "metrics", b"two\n")
    assert (tmp_path / "metrics").read_bytes() == b"one\ntwo\n"


APPENDING = """
import sys
from pathlib import Path
from capsule.host.outputs import append
for number in range(200):
    append(Path(sys.argv[1]), b"row\\n", heading=b"heading\\n")
"""


def test_processes_that_append_at_one_time_write_one_heading(tmp_path):
    command = [sys.executable, "-c", APPENDING, tmp_path / "metrics"]
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert (tmp_path / "metrics").read_bytes() == b"heading\n" + b"row\n" * 600
