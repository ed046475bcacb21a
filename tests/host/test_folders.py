"""New files of the user."""

import errno
import os
import stat

import pytest

from capsule.host.errors import CapsuleError
from capsule.host.folders import user_folder, user_path, write_new


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


def full(descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_without_a_home_directory_a_variable_names_the_folder(no_home, monkeypatch, tmp_path):
    for name in ("CAPSULE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    asked = ("CAPSULE_CACHE", "XDG_CACHE_HOME", ".cache")
    with pytest.raises(CapsuleError, match="HOME is not set") as caught:
        user_folder(*asked)
    assert caught.value.code == "CAP-X006"
    assert caught.value.fix.startswith("Set HOME or CAPSULE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_folder(*asked) == tmp_path / "capsule"
    monkeypatch.setenv("CAPSULE_CACHE", str(tmp_path))
    assert user_folder(*asked) == tmp_path


@pytest.mark.parametrize(
    ("text", "said"), [("~no-such-user/x", "home directory"), ("a\0b", "NUL character")]
)
def test_a_path_that_no_file_has_is_rejected(text, said):
    with pytest.raises(ValueError, match=said):
        user_path(text)
