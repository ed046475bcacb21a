"""``capsule init``: the specs that it writes, and the files that it leaves alone."""

import json
import shlex

import pytest

from capsule.cli.init import TEMPLATES
from capsule.experiment.spec import CodeSpec
from capsule.experiment.trainers import CommandTrainer
from capsule.host.spec_file import load_spec
from tests.cli.conftest import SMALL, SPECS, capsule
from tests.command_lines import parse


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_init_writes_a_spec_that_is_valid_and_never_overwrites(empty):
    done = capsule("init")
    assert (done.exit_code, done.stdout) == (0, "wrote capsule.yaml\n")
    written = (empty / "capsule.yaml").read_bytes()
    again = capsule("init")
    assert again.exit_code == 2
    assert "CAP-S005: capsule.yaml already exists and was not changed" in again.stderr
    assert "fix: Choose another file name." in again.stderr
    assert (empty / "capsule.yaml").read_bytes() == written == SMALL.read_bytes()
    assert load_spec(empty / "capsule.yaml").trainer.algorithm == "dqn"


def test_init_writes_a_spec_for_an_own_program(empty):
    done = capsule("init", "--template", "own-program", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout) == {"schema": "capsule/init/v1", "spec": "capsule.yaml"}
    spec = load_spec(empty / "capsule.yaml")
    assert isinstance(spec.trainer, CommandTrainer)
    assert "{seed}" in spec.trainer.command
    assert spec.code == CodeSpec(path=".")
    plain = capsule("init", "other.yaml", "--template", "own-program")
    assert "put your command into it" in plain.stderr


@pytest.mark.parametrize("name", ["dqn", "r2d2", "impala"])
def test_init_writes_specs_of_all_algorithms(empty, name):
    done = capsule("init", f"{name}.yaml", "--template", name)
    assert done.exit_code == 0, done.stderr
    assert load_spec(empty / f"{name}.yaml").trainer.algorithm == name


def test_an_unknown_template_is_refused_and_the_known_ones_are_named(empty):
    done = capsule("init", "--template", "ppo")
    assert done.exit_code == 2
    assert "own-program" in done.stderr
    assert list(empty.iterdir()) == []
    assert "own-program" in capsule("init", "--help").stdout


def test_every_template_is_a_shipped_spec_that_the_option_names():
    shown = capsule("init", "--template", "nothing").stderr
    assert all(f"'{name}'" in shown for name in TEMPLATES)
    assert {SPECS / file for file in TEMPLATES.values()} <= set(SPECS.iterdir())


def test_the_next_command_is_one_that_the_application_accepts():
    for words in (["init"], ["init", "mine.yaml", "--template", "own-program"]):
        line = capsule(*words).stderr
        parse(shlex.join(["capsule", *line.rpartition("capsule ")[2].split()]))


def test_a_link_that_leads_nowhere_is_not_followed(empty):
    (empty / "capsule.yaml").symlink_to(empty / "elsewhere.yaml")
    done = capsule("init")
    assert (done.exit_code, "already exists" in done.stderr) == (2, True)
    assert not (empty / "elsewhere.yaml").exists()


def test_a_missing_folder_is_made(empty):
    assert capsule("init", "new/folder/spec.yaml").exit_code == 0
    assert (empty / "new" / "folder" / "spec.yaml").read_bytes() == SMALL.read_bytes()


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("file/spec.yaml", "Not a directory"),
        ("/proc/spec.yaml", "No such file or directory"),
    ],
)
def test_a_place_that_cannot_be_written_is_named_with_the_reason(empty, path, reason):
    (empty / "file").touch()
    done = capsule("init", path, "--json")
    assert done.exit_code == 2
    document = json.loads(done.stdout)
    assert document["code"] == "CAP-S005"
    assert document["message"] == f"cannot write {path}: {reason}"
    assert document["fix"] == "Choose a folder that you may write to."
    assert [each.name for each in empty.iterdir()] == ["file"]


def test_the_next_command_takes_the_path_as_one_word(empty):
    done = capsule("init", "my specs/first one.yaml")
    command = done.stderr.strip().removeprefix("next: ")
    assert shlex.split(command) == ["capsule", "build", "my specs/first one.yaml"]
