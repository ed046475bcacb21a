from __future__ import annotations

import errno
import fcntl
import hashlib
import multiprocessing
import os
import shutil
import stat
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.image.cache import Cache, HashMismatchError, default_root, folder_state

CONTENT = b"content" * 50_000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    return path


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"CAPSULE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/capsule"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/someone/.cache/capsule"),
        ({}, "/home/someone/.cache/capsule"),
    ],
)
def test_root_follows_the_environment(monkeypatch, variables, expected):
    for name in ("CAPSULE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/someone", **variables}.items():
        monkeypatch.setenv(name, value)
    assert default_root() == Path(expected)


def test_adds_content_under_its_hash(cache, source):
    assert not cache.has(SHA256)
    path = cache.add(source, SHA256)
    assert path == cache.path(SHA256)
    assert path.read_bytes() == CONTENT
    assert cache.has(SHA256)
    assert source.exists()


def test_adding_twice_is_harmless(cache, source):
    assert cache.add(source, SHA256) == cache.add(source, SHA256)


def test_wrong_content_is_refused_and_leaves_nothing(cache, source):
    with pytest.raises(HashMismatchError) as caught:
        cache.add(source, "0" * 64)
    assert caught.value.code == "CAP-I301"
    assert SHA256 in caught.value.message
    assert [path.name for path in cache.root.rglob("*") if path.is_file()] == ["use"]


def test_wrong_content_does_not_replace_right_content(cache, source, tmp_path):
    cache.add(source, SHA256)
    forged = tmp_path / "forged"
    forged.write_bytes(b"forged")
    with pytest.raises(HashMismatchError):
        cache.add(forged, SHA256)
    assert cache.path(SHA256).read_bytes() == CONTENT


def test_content_is_readable_by_others_whatever_the_umask(cache, source):
    previous = os.umask(0o077)
    try:
        path = cache.add(source, SHA256)
    finally:
        os.umask(previous)
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("sha256", ["", "..", "0" * 63, "0" * 65, "A" * 64, "../" + "0" * 61])
def test_refuses_what_is_not_a_hash(cache, sha256):
    with pytest.raises(ValueError, match="not a SHA-256"):
        cache.path(sha256)


@pytest.mark.parametrize("name", ["", "derived", "environments"])
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_folder_that_others_can_write_is_refused(cache, name, mode):
    cache.folder("derived")
    cache.folder("environments")
    (cache.root / name).chmod(mode)
    with pytest.raises(CapsuleError, match="CAP-I308") as refusal:
        cache.folder(name or "derived")
    assert refusal.value.exit_code == ExitCode.USAGE
    assert str(cache.root / name) in refusal.value.message
    (cache.root / name).chmod(0o755)
    cache.folder(name or "derived")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_folder_of_somebody_else_is_refused(cache):
    os.chown(cache.folder("derived"), 4711, 4711)
    with pytest.raises(CapsuleError, match="belongs to uid 4711"):
        cache.folder("derived")


def test_folders_are_made_for_their_owner_whatever_the_umask(tmp_path, source):
    before = os.umask(0)
    try:
        cache = Cache(tmp_path / "above" / "cache")
        cache.add(source, SHA256)
        cache.folder("derived")
    finally:
        os.umask(before)
    folders = [cache.root, *(path for path in cache.root.rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o755}


def test_digest_is_remembered_until_the_file_changes(cache, source):
    assert cache.digest(source) == SHA256
    assert cache.digest(source) == SHA256
    source.write_bytes(b"changed")
    assert cache.digest(source) == hashlib.sha256(b"changed").hexdigest()


def test_digest_is_not_remembered_by_a_time_that_programs_set(cache, source, tmp_path):
    (tmp_path / "link").symlink_to(source)
    for content in (b"one", b"two"):
        source.write_bytes(content)
        os.utime(source, (1e9, 1e9))
        for path in (source, tmp_path / "link"):
            assert cache.digest(path) == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("below", [".", "a/b"])
def test_a_file_in_the_place_of_the_cache_is_named(source, below):
    with pytest.raises(CapsuleError, match="a file is in its place") as caught:
        Cache(source / below).folder("objects")
    assert caught.value.code == "CAP-I308"
    assert "CAPSULE_CACHE" in caught.value.fix


def test_a_cache_that_can_only_be_read_is_locked_all_the_same(cache, monkeypatch):
    """Another user prepared it, who may prune it. On NFS, only readers' locks are possible then."""
    for name in ("a", "b"):
        with cache.lock(name):
            pass
    opened = os.open

    def denied(path, flags, *how, **further):
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, flags, *how, **further)

    def of_nfs(descriptor, kind):
        is_exclusive = kind & fcntl.LOCK_EX
        if is_exclusive and not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_RDWR:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        locked(descriptor, kind)

    locked = fcntl.flock
    reader = Cache(cache.root)
    del cache
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", denied)
        patched.setattr(fcntl, "flock", of_nfs)
        with reader.lock("a"):
            pass
        with pytest.raises(PermissionError), reader.exclusive():
            pass
        with pytest.raises(PermissionError), reader.lock("new"):
            pass
    pruning = Cache(reader.root)
    with pytest.raises(CapsuleError, match="another Capsule process"), pruning.exclusive():
        pass


def test_a_document_that_cannot_be_kept_is_made_all_the_same(cache, monkeypatch):
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with monkeypatch.context() as patched:
        patched.setattr("capsule.image.cache.write_atomic", full)
        assert cache.document("name", [b"part"], lambda: b"first") == b"first"
    assert cache.document("name", [b"part"], lambda: b"second") == b"second"
    assert cache.document("name", [b"part"], lambda: b"third") == b"second"


def test_digest_of_a_file_whose_name_is_not_utf_8(cache, source):
    renamed = source.rename(os.fsdecode(os.fsencode(source) + b"\xff"))
    assert cache.digest(renamed) == SHA256


def test_scratch_is_empty_and_goes_away(cache):
    with cache.scratch() as folder:
        assert list(folder.iterdir()) == []
        (folder / "file").write_bytes(b"")
    assert not folder.exists()


@pytest.mark.parametrize("deed", ["change", "plant", "remove", "forget"])
def test_a_recorded_folder_is_made_again_if_anything_of_it_changed(cache, deed):
    made = []

    def make(folder: Path) -> None:
        made.append(folder)
        folder.mkdir()
        (folder / "file").write_text("honest")

    folder = cache.recorded_folder("projects", "key", make)
    assert cache.recorded_folder("projects", "key", make) == folder
    assert len(made) == 1
    facts = (folder / "file").stat()
    if deed == "change":  # with its size and its date
        (folder / "file").write_text("edited")
        os.utime(folder / "file", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    elif deed == "plant":
        (folder / "other").touch()
    elif deed == "remove":
        (folder / "file").unlink()
    else:
        folder.with_name("key.state").unlink()
    cache.recorded_folder("projects", "key", make)
    assert len(made) == 2
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert (folder / "file").read_text() == "honest"


@pytest.mark.parametrize("deed", ["backup", "copy"])
def test_a_folder_that_runs_use_stays_if_only_its_times_and_inodes_changed(cache, tmp_path, deed):
    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "file").write_text("honest")
        (folder / "link").symlink_to("file")
        os.mkfifo(folder / "pipe")
        (folder / "unreadable").touch(mode=0o100)

    folder = cache.recorded_folder("projects", "key", make)
    before = folder_state(folder)
    if deed == "backup":
        os.link(folder / "file", tmp_path / "file")
    else:
        (folder / "file").rename(tmp_path / "file")
        shutil.copy2(tmp_path / "file", folder / "file")
    assert folder_state(folder) != before
    file = (folder / "file").stat().st_ino
    for _ in range(2):
        assert cache.recorded_folder("projects", "key", pytest.fail) == folder
    assert (folder / "file").stat().st_ino == file
    assert folder.with_name("key.state").read_text().startswith(folder_state(folder))


def test_processes_look_at_a_recorded_folder_at_the_same_time(cache):
    folder = cache.recorded_folder("projects", "key", Path.mkdir)
    with cache.lock("projects-key", shared=True):
        assert cache.recorded_folder("projects", "key", pytest.fail) == folder


def test_a_folder_that_another_process_makes_meanwhile_is_not_made_again(cache, monkeypatch):
    lock, made = Cache.lock, []

    def waited_for(self, name, *, shared=False):
        if not shared and not made:
            made.append("by the other")
            Cache(cache.root).recorded_folder("projects", "key", Path.mkdir)
        return lock(self, name, shared=shared)

    monkeypatch.setattr(Cache, "lock", waited_for)
    assert cache.recorded_folder("projects", "key", pytest.fail).is_dir()
    assert made


def test_a_file_system_without_locks_is_refused(cache, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(CapsuleError) as refused:
        cache.folder("objects")
    assert refused.value.code == "CAP-Y020"


def test_a_file_system_that_executes_no_programs_is_named(tmp_path, monkeypatch):
    Cache(tmp_path / "made later").require_programs()
    mounted = os.statvfs(tmp_path)
    noexec = os.statvfs_result((*mounted[:8], mounted.f_flag | os.ST_NOEXEC, mounted.f_namemax))
    monkeypatch.setattr(os, "statvfs", {tmp_path: noexec}.__getitem__)
    with pytest.raises(CapsuleError) as refused:
        Cache(tmp_path / "made later").require_programs()
    assert (refused.value.code, refused.value.exit_code) == ("CAP-E020", ExitCode.NO_ENGINE)
    assert "made later" in refused.value.message
    assert "CAPSULE_CACHE" in refused.value.fix


def _add(root: Path, source: Path) -> None:
    for _ in range(5):
        Cache(root).add(source, SHA256)


@pytest.mark.slow
def test_many_processes_may_add_at_once(cache, source):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_add, args=(cache.root, source)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert cache.path(SHA256).read_bytes() == CONTENT
    assert len(list(cache.path(SHA256).parent.iterdir())) == 1


def _enter_and_leave(root: Path, journal: Path) -> None:
    with Cache(root).lock("name"), journal.open("a") as stream:
        for line in ("in\n", "out\n"):
            stream.write(line)
            stream.flush()
            time.sleep(0.05)


@pytest.mark.slow
def test_lock_admits_one_process_at_a_time(cache, tmp_path):
    journal = tmp_path / "journal"
    context = multiprocessing.get_context("spawn")
    arguments = (cache.root, journal)
    workers = [context.Process(target=_enter_and_leave, args=arguments) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert journal.read_text() == "in\nout\n" * 3
