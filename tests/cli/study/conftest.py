"""For all tests of ``capsule study``, whose members are not executed."""

import json

import pytest

from capsule.host.run_directory import MEMBERS
from tests.cli.conftest import capsule
from tests.study.conftest import end_as_planned


@pytest.fixture
def place(place, monkeypatch):
    """A folder with a study and a key, in which members end at once."""
    monkeypatch.setattr("sys.executable", end_as_planned(place / "python"))
    plan(place)
    return place


def study(command, *words):
    done = capsule("study", command, *words)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def run(*words):
    return study("run", "tiny.yaml", "--key", "alice", "--quiet", *words)


def plan(folder, **words):
    members = folder / "studies" / "tiny" / MEMBERS
    members.mkdir(parents=True, exist_ok=True)
    text = json.dumps({name.replace("_", "."): word for name, word in words.items()})
    (members / "plan").write_text(text)
