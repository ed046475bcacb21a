"""For all tests of studies."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from capsule.bundle.keys import generate
from capsule.study.directory import MEMBERS, StudyDirectory
from capsule.study.running import RunOptions
from tests.study.corpus import CORPUS, results_of
from tests.study.corpus import MEMBERS as CORPUS_MEMBERS
from tests.study.short_runs import write_study
from tests.study.small_studies import Resolutions, locked, write


def end_as_planned(script):
    """Write a program that takes the place of Python and of 'capsule run'; return its path."""
    source = Path(__file__).with_name("fake_run.py").read_text()
    script.write_text(f"#!{sys.executable} -ISE\n{source}")
    script.chmod(0o700)
    return str(script)


@pytest.fixture
def resolutions(monkeypatch):
    return Resolutions(monkeypatch)


@pytest.fixture
def directory(tmp_path, resolutions):
    """The folder of a study of four members, none of which has begun."""
    return StudyDirectory.create(tmp_path / "out", locked(write(tmp_path)), resume=False)


@pytest.fixture
def planned(monkeypatch, tmp_path, directory):
    """Have members end as a plan says, without being run."""
    monkeypatch.setattr(sys, "executable", end_as_planned(tmp_path / "python"))

    def plan(**words):
        folder = directory.path / MEMBERS
        folder.mkdir(exist_ok=True)
        (folder / "plan").write_text(
            json.dumps({name.replace("_", "."): words[name] for name in words})
        )

    plan()
    return plan


@pytest.fixture(scope="session")
def results():
    """The results of the study of the corpus."""
    return results_of("study")


@pytest.fixture
def folder(tmp_path):
    """A folder with the bundles of all members of this study, each in a folder of its own."""
    for name in CORPUS_MEMBERS:
        (tmp_path / name).mkdir()
        source = CORPUS / "study.members" / f"{name}.capsule.tar"
        shutil.copyfile(source, tmp_path / name / "x.capsule.tar")
    return tmp_path


@pytest.fixture
def workplace(tmp_path):
    """A folder with a study of short runs, and a key."""
    generate(tmp_path / "alice")
    return write_study(tmp_path)


@pytest.fixture
def options(workplace):
    return RunOptions(workplace / "alice", engine="process")
