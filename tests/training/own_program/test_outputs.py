"""What a program wrote: told by content from a source tree, whatever the times of files say."""

import errno
import json
import os
import shutil
import socket

import pytest

from capsule.experiment import contract
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.contract import MAX_OUTPUTS, Job
from capsule.experiment.errors import CapsuleError
from capsule.experiment.trainers import CommandTrainer
from capsule.training.own_program import outputs
from capsule.training.own_program.outputs import Watch, collect_outputs, make_workspace
from tests.experiment.test_beneath import dig
from tests.training.conftest import CARTPOLE, make_spec, tree_facts

LONG_AGO = 1_577_836_800 * 10**9
TREE = {"train.py": b"", "best": b"0\n", "cand0": b"0\n", "cand1": b"1\n", "sub/table.csv": b"1\n"}


@pytest.fixture
def tree():
    """The facts of the source tree; the working folder of the other fixture starts with it."""
    return {}


@pytest.fixture
def workspace(tmp_path, tree):
    folder = tmp_path / contract.WORKSPACE
    for name, data in TREE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        os.utime(folder / name, ns=(LONG_AGO, LONG_AGO))
    tree.update(tree_facts(folder))
    return folder


def trainer(**facts):
    document = {"command": ["x"], "standard_output": False} | facts
    return CommandTrainer.model_validate_json(json.dumps(document))


def collect(workspace, tree, **facts):
    return collect_outputs(workspace.parent, tree, trainer(**facts))


def test_a_program_starts_over_whatever_it_left(tmp_path):
    workspace, state = tmp_path / contract.WORKSPACE, tmp_path / contract.STATE
    for folder in (workspace, state):
        (folder / "a/b").mkdir(parents=True)
        dig(folder, 1_100)
        (folder / "a").chmod(0)
    assert not make_workspace(tmp_path, Job(spec=make_spec(CARTPOLE), tree={}), trainer())
    assert [*workspace.iterdir(), *state.iterdir()] == []


@pytest.mark.parametrize("target", ["elsewhere", "nowhere"])
def test_a_program_that_starts_over_loses_links_in_the_place_of_its_folders(tmp_path, target):
    workspace, state = tmp_path / contract.WORKSPACE, tmp_path / contract.STATE
    kept = tmp_path / "elsewhere/file"
    kept.parent.mkdir(mode=0o755)
    kept.touch()
    for folder in (workspace, state):
        folder.symlink_to(tmp_path / target)
    assert not make_workspace(tmp_path, Job(spec=make_spec(CARTPOLE), tree={}), trainer())
    assert not workspace.is_symlink()
    assert not state.is_symlink()
    assert [*workspace.iterdir(), *state.iterdir()] == []
    assert kept.exists()
    assert kept.parent.stat().st_mode & 0o777 == 0o755


def test_an_unchanged_source_tree_is_no_output_even_if_it_is_written_again(workspace, tree):
    (workspace / "train.py").write_bytes(TREE["train.py"])
    found = collect(workspace, tree)
    assert (found.files, found.deleted, found.empty_folders) == ({}, (), ())


def rename(folder):
    (folder / "cand1").rename(folder / "best")


def replace_by_a_new_file(folder):
    (folder / "sub/new").write_bytes(b"1\n")
    os.utime(folder / "sub/new", ns=(LONG_AGO, LONG_AGO))
    (folder / "sub/new").replace(folder / "best")


def copy_with_times(folder):
    shutil.copy2(folder / "cand1", folder / "best")


def write_and_set_the_time_back(folder):
    (folder / "best").write_bytes(b"1\n")
    os.utime(folder / "best", ns=(LONG_AGO, LONG_AGO))


def hard_link(folder):
    (folder / "best").unlink()
    (folder / "best").hardlink_to(folder / "cand1")


@pytest.mark.parametrize(
    ("deed", "deleted"),
    [
        (rename, ("cand1",)),
        (replace_by_a_new_file, ()),
        (copy_with_times, ()),
        (write_and_set_the_time_back, ()),
        (hard_link, ()),
    ],
)
def test_other_content_is_claimed_however_it_came_to_the_path(workspace, tree, deed, deleted):
    deed(workspace)
    found = collect(workspace, tree)
    assert {path: each.sha256 for path, each in found.files.items()} == {"best": sha256_hex(b"1\n")}
    assert found.deleted == deleted


def test_two_files_that_change_places_are_both_claimed(workspace, tree):
    (workspace / "cand0").rename(workspace / "x")
    (workspace / "cand1").rename(workspace / "cand0")
    (workspace / "x").rename(workspace / "cand1")
    assert list(collect(workspace, tree).files) == ["cand0", "cand1"]


def test_a_deletion_is_claimed_unless_it_is_left_out(workspace, tree):
    (workspace / "best").unlink()
    shutil.rmtree(workspace / "sub")
    assert collect(workspace, tree).deleted == ("best", "sub/table.csv")
    assert collect(workspace, tree, outputs=["*", "!sub/*"]).deleted == ("best",)


def test_a_file_that_becomes_a_pipe_is_deleted(workspace, tree):
    (workspace / "best").unlink()
    os.mkfifo(workspace / "best")
    found = collect(workspace, tree)
    assert (found.files, found.deleted) == ({}, ("best",))


def test_a_link_in_place_of_a_file_is_claimed_by_where_it_points(workspace, tree):
    (workspace / "best").unlink()
    (workspace / "best").symlink_to("cand0")
    assert collect(workspace, tree).files["best"].target == "cand0"


def test_the_executable_bit_is_claimed_and_other_modes_are_not(workspace, tree):
    (workspace / "cand0").chmod(0o600)
    assert collect(workspace, tree).files == {}
    (workspace / "cand0").chmod(0o700)
    assert collect(workspace, tree).files["cand0"].executable


def test_empty_folders_are_claimed(workspace, tree):
    (workspace / "runs/empty").mkdir(parents=True)
    (workspace / "sub/table.csv").unlink()
    found = collect(workspace, tree)
    assert found.empty_folders == ("runs/empty", "sub")
    assert collect(workspace, tree, outputs=["*", "!runs/*"]).empty_folders == ("sub",)


def test_a_new_file_is_an_output_whatever_its_time(workspace, tree):
    (workspace / "new").write_bytes(b"")
    os.utime(workspace / "new", ns=(LONG_AGO, LONG_AGO))
    assert list(collect(workspace, tree).files) == ["new"]


def test_patterns_choose_the_outputs(workspace, tree):
    for name in ("a.log", "runs/events", "runs/model", "result"):
        (workspace / name).parent.mkdir(exist_ok=True)
        (workspace / name).write_bytes(b"")
    patterns = ["*", "!*.log", "!runs/*", "runs/model"]
    assert list(collect(workspace, tree, outputs=patterns).files) == ["result", "runs/model"]


def test_pipes_and_sockets_are_no_outputs(workspace, tree, monkeypatch):
    os.mkfifo(workspace / "pipe")
    monkeypatch.chdir(workspace)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        assert collect(workspace, tree).files == {}


def write_a_name_that_is_not_utf8(folder):
    (folder / os.fsdecode(b"caf\xe9")).write_bytes(b"")


def make_a_folder_whose_name_is_not_utf8(folder):
    (folder / os.fsdecode(b"caf\xe9")).mkdir()


def link_to_a_name_that_is_not_utf8(folder):
    (folder / "link").symlink_to(os.fsdecode(b"caf\xe9"))


@pytest.mark.parametrize(
    "deed",
    [
        write_a_name_that_is_not_utf8,
        make_a_folder_whose_name_is_not_utf8,
        link_to_a_name_that_is_not_utf8,
    ],
)
def test_names_that_are_not_utf8_are_refused_unless_left_out(workspace, tree, deed):
    deed(workspace)
    with pytest.raises(CapsuleError, match="not UTF-8") as caught:
        collect(workspace, tree)
    assert caught.value.code == "CAP-T303"
    assert collect(workspace, tree, outputs=["*", "!caf*", "!link"]).files == {}


def test_folders_deeper_than_capsule_follows_are_refused(workspace, tree):
    (workspace / "/".join("d" * 70)).mkdir(parents=True)
    with pytest.raises(CapsuleError, match="deep") as caught:
        collect(workspace, tree)
    assert caught.value.code == "CAP-T303"


def test_a_file_that_cannot_be_read_is_named(workspace, tree, monkeypatch):
    def forbidden(_folder, path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(outputs, "open_beneath", forbidden)  # root could read any file
    with pytest.raises(CapsuleError, match=r"best.*Permission denied") as caught:
        collect(workspace, tree, outputs=["best"])
    assert caught.value.code == "CAP-T303"


def test_the_limits_are_checked_while_the_program_runs(workspace, tree, monkeypatch):
    monkeypatch.setattr(outputs, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(outputs, "MAX_OUTPUTS", 3)
    assert not Watch(workspace.parent, tree, trainer()).exceeded()
    for number in range(4):
        (workspace / f"{number}.txt").write_bytes(b"")
    watch = Watch(workspace.parent, tree, trainer())
    assert watch.exceeded()
    assert watch.error.code == "CAP-T303"
    left_out = Watch(workspace.parent, tree, trainer(outputs=["*", "!*.txt"]))
    assert not left_out.exceeded()


def test_changed_files_and_empty_folders_count_as_outputs(workspace, tree, monkeypatch):
    monkeypatch.setattr(outputs, "MAX_OUTPUTS", 3)
    for name in ("best", "cand0", "cand1"):
        (workspace / name).write_bytes(b"other\n")
    assert list(collect(workspace, tree).files) == ["best", "cand0", "cand1"]
    (workspace / "empty").mkdir()
    with pytest.raises(CapsuleError, match="the program wrote 4 files, more than 3") as caught:
        collect(workspace, tree)
    assert caught.value.code == "CAP-T303"
    assert collect(workspace, tree, outputs=["*", "!best"]).empty_folders == ("empty",)


def test_a_bundle_has_room_for_all_outputs():
    assert MAX_OUTPUTS * 2 <= 10_000
