"""For all tests of studies."""

import json
import sys
from pathlib import Path

import pytest

from capsule.study.directory import MEMBERS, StudyDirectory
from tests.study.small_studies import Resolutions, locked, write


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
    script = tmp_path / "python"
    source = Path(__file__).with_name("fake_run.py").read_text()
    script.write_text(f"#!{sys.executable} -ISE\n{source}")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))

    def plan(**words):
        folder = directory.path / MEMBERS
        folder.mkdir(exist_ok=True)
        (folder / "plan").write_text(
            json.dumps({name.replace("_", "."): words[name] for name in words})
        )

    plan()
    return plan
