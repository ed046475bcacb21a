"""How 'capsule run' begins: a new run makes its directory, and a resumed one has it."""

from unittest.mock import Mock

import pytest

from capsule.cli.beginning import NewRun, ResumedRun
from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import SourcesSpec
from capsule.host.run_directory import LOCK
from capsule.image import lockfile
from capsule.image.cache import Cache
from capsule.image.lockfile import read_lock, write_lock
from tests.refusals import refusal
from tests.verification.runs import make_lock

PROGRAM = {"name": "program", "trainer": {"command": ["true"], "outputs": ["one"]}}


@pytest.fixture
def lock_file(tmp_path):
    path = tmp_path / "program.lock.json"
    write_lock(path, make_lock(PROGRAM))
    return path


def test_a_new_run_makes_a_directory_of_its_own_with_the_lock(lock_file, tmp_path):
    new = NewRun(lock_file, [], tmp_path / "runs")
    lock, sources = new.lock(Cache(tmp_path / "cache"), print)
    assert (lock, sources) == (read_lock(lock_file), SourcesSpec())
    assert new.spec() == lock.spec
    assert not new.ended
    directories = {new.directory(lock) for _ in range(3)}
    assert len(directories) == 3
    for directory in directories:
        assert directory.parent == new.folder
        assert directory.name.startswith("program-")
        assert read_lock(directory / LOCK) == lock


def test_a_directory_whose_lock_cannot_be_written_is_removed(lock_file, tmp_path, monkeypatch):
    full = Mock(side_effect=CapsuleError("CAP-X003", "the disk is full", fix="Free space."))
    monkeypatch.setattr(lockfile, "write_lock", full)
    refusal("CAP-X003", NewRun(lock_file, [], tmp_path / "runs").directory, read_lock(lock_file))
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_resumed_run_has_its_directory_and_lock(lock_file, tmp_path):
    new = NewRun(lock_file, [], tmp_path / "runs")
    directory = new.directory(read_lock(lock_file))
    resumed = ResumedRun(directory, [])
    resumed.check_folder()
    lock, sources = resumed.lock(Cache(tmp_path / "cache"), print)
    assert (lock, sources) == (read_lock(lock_file), SourcesSpec())
    assert (resumed.spec(), resumed.directory(lock)) == (lock.spec, directory)
    assert not resumed.ended


def test_an_override_changes_a_new_run_only_before_it_is_locked(lock_file, tmp_path):
    with pytest.raises(CapsuleError, match="CAP-L003"):
        NewRun(lock_file, ["seeds.root=2"], tmp_path).lock(Cache(tmp_path / "cache"), print)
    directory = NewRun(lock_file, [], tmp_path).directory(read_lock(lock_file))
    with pytest.raises(CapsuleError, match="CAP-S006"):
        ResumedRun(directory, ["seeds.root=2"]).lock(Cache(tmp_path / "cache"), print)
