"""Reading, measuring and removing a folder that a stranger's program has prepared."""

import os
import stat

import pytest

from capsule.experiment import beneath
from capsule.experiment.beneath import (
    UnboundedError,
    entries_beneath,
    give_folder,
    open_beneath,
    remove_folder,
)
from capsule.experiment.files import NotRegularError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/secret").write_text("secret")
    (tmp_path / "folder/below").mkdir(parents=True)
    (tmp_path / "folder/below/file").write_text("content")
    return tmp_path / "folder"


def dig(folder, levels, name="d" * 100):
    """Make nested folders, deeper than a path can say, without such a path."""
    descriptor = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=descriptor)
        below = os.open(name, os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
class TestGiving:
    def test_everything_in_the_folder_changes_its_owner_and_nothing_else_does(self, folder):
        (folder / "link").symlink_to(folder.parent / "elsewhere")
        (folder / "below" / "to-file").symlink_to(folder.parent / "elsewhere/secret")
        give_folder(folder, 61183)
        for path in (folder, *folder.rglob("*")):
            facts = path.lstat()
            assert (facts.st_uid, facts.st_gid) == (61183, 61183), path
        assert (folder.parent / "elsewhere").stat().st_uid == 0
        assert (folder.parent / "elsewhere/secret").stat().st_uid == 0

    def test_a_folder_exchanged_for_a_link_meanwhile_is_not_followed(self, folder, monkeypatch):
        """The swap happens between the look at the folder and its opening."""
        look = os.lstat

        def swap(name, **options):
            facts = look(name, **options)
            if name == "below":
                (folder / "below").rename(folder.parent / "moved")
                (folder / "below").symlink_to(folder.parent / "elsewhere")
            return facts

        monkeypatch.setattr("capsule.experiment.beneath.os.lstat", swap)
        with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
            give_folder(folder, 61183)
        monkeypatch.undo()
        assert (folder.parent / "elsewhere/secret").stat().st_uid == 0

    def test_a_folder_of_endless_depth_is_refused(self, folder):
        dig(folder, beneath.MAX_DEPTH + 1)
        with pytest.raises(UnboundedError):
            give_folder(folder, 61183)
        remove_folder(folder)


def test_a_file_is_opened_by_its_path(folder):
    with open_beneath(folder, "below/file") as stream:
        assert stream.read() == b"content"


def test_no_component_may_be_a_link(folder):
    (folder / "link").symlink_to(folder.parent / "elsewhere")
    (folder / "leaf").symlink_to("below/file")
    (folder / "loop").symlink_to("loop")
    for path in ("link/secret", "leaf", "loop", "loop/x"):
        with pytest.raises(OSError, match=r"Too many levels|Not a directory"):
            open_beneath(folder, path)


@pytest.mark.parametrize("path", ["../elsewhere/secret", "/etc/passwd", "below//file", "./x", ""])
def test_only_plain_relative_paths(folder, path):
    with pytest.raises(OSError, match="plain relative"):
        open_beneath(folder, path)


def test_what_is_no_regular_file_is_not_waited_for(folder):
    os.mkfifo(folder / "pipe")
    for path in ("pipe", "below"):
        with pytest.raises(NotRegularError):
            open_beneath(folder, path)


def test_everything_is_listed_and_links_are_not_entered(folder):
    (folder / "link").symlink_to(folder.parent / "elsewhere")
    os.mkfifo(folder / "pipe")
    found = {entry.path: stat.S_IFMT(entry.facts.st_mode) for entry in entries_beneath(folder)}
    assert found == {
        "below": stat.S_IFDIR,
        "below/file": stat.S_IFREG,
        "link": stat.S_IFLNK,
        "pipe": stat.S_IFIFO,
    }


def test_a_folder_that_becomes_a_link_while_it_is_listed_is_not_entered(folder, monkeypatch):
    opened = beneath.open_folder

    def swap(name, above=None):
        if name == "below":
            (folder / "below").rename(folder / "moved")
            (folder / "below").symlink_to(folder.parent / "elsewhere")
        return opened(name, above)

    monkeypatch.setattr(beneath, "open_folder", swap)
    assert not any("secret" in entry.path for entry in entries_beneath(folder))


def test_depth_and_number_are_bounded(folder, monkeypatch):
    dig(folder, beneath.MAX_DEPTH - 1)
    assert sum(1 for _ in entries_beneath(folder)) == beneath.MAX_DEPTH + 1
    monkeypatch.setattr(beneath, "MAX_ENTRIES", beneath.MAX_DEPTH + 1)
    assert sum(1 for _ in entries_beneath(folder)) == beneath.MAX_DEPTH + 1
    (folder / "one more").touch()
    with pytest.raises(UnboundedError, match="entries"):
        list(entries_beneath(folder))
    monkeypatch.undo()
    dig(folder, beneath.MAX_DEPTH, "e")
    with pytest.raises(UnboundedError, match="deep"):
        list(entries_beneath(folder))


@pytest.mark.slow
def test_a_folder_is_removed_however_deep_and_whatever_it_forbids(folder):
    dig(folder, 3000)  # more than Python recurses, more than descriptors, longer than paths
    dig(folder / "below", 3)
    (folder / "link").symlink_to(folder.parent / "elsewhere")
    os.mkfifo(folder / "pipe")
    (folder / os.fsdecode(b"\xff\n")).mkdir()
    (folder / "0").mkdir()  # like the names that sub-folders get
    (folder / "0/file").touch()
    (folder / "below").chmod(0)
    folder.chmod(0)
    remove_folder(folder)
    assert not folder.exists()
    assert (folder.parent / "elsewhere/secret").read_text() == "secret"
