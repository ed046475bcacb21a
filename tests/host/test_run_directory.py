"""Finding run directories: a folder itself, those in it, and those of the studies in it."""

import shutil
from collections import Counter
from pathlib import Path

import pytest

from capsule.host.run_directory import is_run_directory, run_directories


def made(folder):
    """Make a folder as ``capsule run`` does: it is known by its lock."""
    folder.mkdir(parents=True)
    (folder / "lock.json").write_text("{}")
    return folder


def test_a_folder_with_a_lock_is_a_run_directory(tmp_path):
    assert is_run_directory(made(tmp_path / "run"))


@pytest.mark.parametrize("name", ["none", "file", "empty", "folder"])
def test_anything_else_is_not_a_run_directory(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder" / "lock.json").mkdir(parents=True)
    assert not is_run_directory(tmp_path / name)
    assert list(run_directories(tmp_path / name)) == []


def test_a_run_directory_is_the_only_one_in_itself(tmp_path):
    run = made(tmp_path / "run")
    made(run / "work")
    made(run / "members" / "seeds.1")
    assert list(run_directories(run)) == [run]


def test_the_runs_of_a_folder_and_of_its_studies_are_found_once_each(tmp_path):
    runs = [
        made(tmp_path / "one"),
        made(tmp_path / "two"),
        made(tmp_path / "study" / "members" / "seeds.1"),
        made(tmp_path / "study" / "members" / "seeds.2"),
        made(tmp_path / "other" / "members" / "seeds.1"),
    ]
    made(tmp_path / "deep" / "deeper" / "run")  # neither in the folder nor in a study
    (tmp_path / "notes.txt").write_text("")
    assert Counter(run_directories(tmp_path)) == Counter(runs)


def test_the_runs_of_a_study_are_its_members(tmp_path):
    member = made(tmp_path / "members" / "seeds.1")
    (tmp_path / "study.lock.json").write_text("{}")
    (tmp_path / "members" / "seeds.2").mkdir()  # not begun
    assert list(run_directories(tmp_path)) == [member]


def test_a_study_that_is_removed_meanwhile_has_no_runs(tmp_path, monkeypatch):
    run, study = made(tmp_path / "one"), tmp_path / "study"
    made(study / "members" / "seeds.1")
    iterdir = Path.iterdir

    def removed_first(folder):
        if folder.parent == study:
            shutil.rmtree(study)
        return iterdir(folder)

    monkeypatch.setattr(Path, "iterdir", removed_first)
    assert list(run_directories(tmp_path)) == [run]
