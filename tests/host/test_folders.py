"""New files of the user."""

import errno
import os
import stat

import pytest

from capsule.host.folders import write_new


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
