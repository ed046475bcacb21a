"""What engines without a daemon share: the variables and the command of a task, the unpacked image.

Tasks are run in tests of the engines.
"""

import json
from dataclasses import replace
from unittest.mock import Mock

import pytest

from capsule.engine.bubblewrap import BubblewrapEngine
from capsule.engine.interface import NATIVE, RUN_DIRECTORY
from capsule.engine.unpacked import program_command, program_variables
from capsule.host.errors import CapsuleError
from tests.refusals import refusal

NOEXEC = CapsuleError("CAP-E020", "the cache is mounted with noexec", fix="Set CAPSULE_CACHE.")
STATUS = r"CapEff:\t0\nCapBnd:\t0\nNoNewPrivs:\t1\nSeccomp:\t2\n"


def image_with(image, *variables):
    config = json.dumps({"config": {"Env": list(variables)}}).encode()
    return replace(image, config=config)


def test_variables_of_a_task_precede_those_of_its_image(make_image, make_task):
    image = image_with(make_image(), "PATH=/bin", "OPTIONS=a=b", "EMPTY=", "SEED=0")
    task = make_task("", environment={"SEED": "7", "OWN": "1"})
    assert program_variables(task, image) == {
        "PATH": "/bin",
        "OPTIONS": "a=b",
        "EMPTY": "",
        "SEED": "7",
        "OWN": "1",
        "HOSTNAME": "capsule",
    }


def test_the_host_name_is_a_variable_too(make_image, make_task):
    image = image_with(make_image(), "HOSTNAME=image")
    assert program_variables(make_task(""), image) == {"HOSTNAME": "capsule"}
    assert program_variables(make_task("", hostname="varied"), image) == {"HOSTNAME": "varied"}


def test_only_a_task_with_data_sets_is_told_where_they_are(make_image, make_task, data):
    image = image_with(make_image())
    assert program_variables(make_task("", data=data), image)["CAPSULE_DATA"] == "/data"
    assert "CAPSULE_DATA" not in program_variables(make_task(""), image)


def test_the_command_has_the_paths_of_containers(make_task):
    words = (f"{NATIVE}/capsule-launch", "--directory", f"{RUN_DIRECTORY}/start")
    task = replace(make_task(""), arguments=words, native="local/lib")
    assert program_command(task) == ["/usr/local/lib/capsule-launch", "--directory", "/out/start"]


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """An engine whose program says that it confines, and runs nothing."""
    program = tmp_path / "programs" / "bwrap"
    program.parent.mkdir()
    answer = f'[ "$1" = --version ] && echo bubblewrap 0.8.0 || printf "{STATUS}"'
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return BubblewrapEngine()


def test_no_task_runs_without_an_image(engine, make_lock, make_task, cache):
    with pytest.raises(ValueError, match="the engine bwrap needs an image"):
        engine.prepare(make_lock(), None, cache, progress=print)
    with pytest.raises(RuntimeError, match="prepare"):
        engine.run(make_task(""))


def test_no_image_is_unpacked_where_no_program_can_be_executed(
    engine, make_lock, make_image, cache, monkeypatch
):
    monkeypatch.setattr(cache, "require_programs", Mock(side_effect=NOEXEC))
    refusal("CAP-E020", engine.prepare, make_lock(), make_image(), cache, progress=print)
    assert list(cache.folder("roots").iterdir()) == []


def test_an_image_is_unpacked_once_and_what_is_less_confined_is_said_each_time(
    engine, make_lock, make_image, cache
):
    image, said = make_image("words"), []
    engine.prepare(make_lock(), image, cache, progress=said.append)
    (root,) = (path.parent for path in cache.folder("roots").glob("*/text"))
    assert (root / "text").read_text() == "words"
    assert (root / "bin" / "sh").readlink().name == "busybox"
    inode = (root / "text").stat().st_ino
    BubblewrapEngine().prepare(make_lock(), image, cache, progress=said.append)
    assert (root / "text").stat().st_ino == inode
    notes = [note for note in said if "confines a run less than a container engine" in note]
    assert len(notes) == 2
    assert notes[0].startswith("engine bwrap: ")
    assert len(said) == 3  # the image was unpacked in between
