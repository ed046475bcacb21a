"""Bytecode for runs: who gets it, and what of a task's files is kept."""

import os
import stat
from dataclasses import replace

import pytest

from capsule.engine.bytecode import FOLDER, KIND, prepare_bytecode
from capsule.engine.interface import Exit
from capsule.experiment.errors import CapsuleError
from capsule.experiment.trainers import CommandTrainer

COMPILED = "bytecode/usr/lib/module.cpython-311.pyc"


class Compiler:
    """An engine whose tasks write the given files, and end in the given way."""

    def __init__(self, *files, ended=Exit(0, "exited")):  # noqa: B008 - it is frozen
        self.files, self.ended, self.tasks = files, ended, []

    def run(self, task, on_poll=None):  # noqa: ARG002 - the interface
        self.tasks.append(task)
        for name in self.files:
            path = task.run_directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(name.encode())
            path.chmod(0o600)
        return self.ended


@pytest.fixture
def lock(make_lock):
    return make_lock(wheels=[("torch", "0" * 64)])


@pytest.fixture
def program(lock):
    trainer = CommandTrainer(command=("true",))
    return lock.model_copy(update={"spec": lock.spec.model_copy(update={"trainer": trainer})})


@pytest.fixture
def image(make_image):
    return make_image()


@pytest.fixture
def prepare(lock, image, cache):
    said = []
    cache.folder("objects")

    def prepare(engine, lock=lock, image=image):
        found = prepare_bytecode(engine, lock, image, cache, said.append)
        return found, said

    return prepare


def test_it_is_made_once_and_mounted_for_tasks(prepare):
    engine = Compiler(COMPILED)
    (first, said), (second, _) = prepare(engine), prepare(engine)
    assert first == second
    assert len(engine.tasks) == 1
    assert said == ["compiling the modules that runs import"]
    [(folder, place)] = first
    assert place == FOLDER
    kept = folder / COMPILED.removeprefix("bytecode/")
    assert kept.read_bytes() == COMPILED.encode()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o644
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o755


def test_a_program_has_what_torchs_optimizers_import_too(prepare, program):
    engine = Compiler(COMPILED)
    (trainers, _), (programs, _) = prepare(engine), prepare(engine, program)
    assert trainers != programs
    imported = [task.arguments[-3:] for task in engine.tasks]
    assert imported[0][1:] == ("capsule.training.__main__", "torch")
    assert imported[1] == ("capsule.training.__main__", "torch", "torch._dynamo")


def test_another_source_tree_needs_no_other_bytecode_and_other_packages_do(prepare, image):
    *below, top = image.layers
    trees = [replace(top, name="project", diff_id=f"sha256:{digit * 64}") for digit in "12"]
    engine = Compiler(COMPILED)
    of = [prepare(engine, image=replace(image, layers=(*below, tree)))[0] for tree in trees]
    assert of[0] == of[1]
    assert len(engine.tasks) == 1
    assert prepare(engine)[0] != of[0]


def test_images_without_torch_have_none(prepare, make_lock):
    assert prepare(engine := Compiler(), make_lock()) == ([], [])
    assert engine.tasks == []


def test_a_cache_that_cannot_be_written_gets_none(prepare, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    assert prepare(Compiler(COMPILED)) == ([], [])


def test_only_bytecode_in_regular_files_is_kept(prepare, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("private")

    class Hostile(Compiler):
        def run(self, task, **options):
            ended = super().run(task, **options)
            (task.run_directory / "bytecode" / "link.pyc").symlink_to(secret)
            (task.run_directory / "bytecode" / "folder").symlink_to(secret.parent)
            os.mkfifo(task.run_directory / "bytecode" / "pipe.pyc")
            return ended

    [(made, _)], _ = prepare(Hostile(COMPILED, "bytecode/notes.txt", "elsewhere.pyc"))
    files = [path for path in made.rglob("*") if not path.is_dir()]
    assert files == [made / COMPILED.removeprefix("bytecode/")]


def test_a_bytecode_folder_that_is_a_link_leads_nowhere(prepare, tmp_path):
    elsewhere = tmp_path / "private"
    elsewhere.mkdir()
    (elsewhere / "mine.pyc").write_text("private")

    class Hostile(Compiler):
        def run(self, task, **options):
            (task.run_directory / "bytecode").symlink_to(elsewhere)
            return super().run(task, **options)

    [(made, _)], _ = prepare(Hostile())
    assert list(made.iterdir()) == []


def test_a_failure_is_told_and_the_runs_do_without(prepare):
    engine = Compiler(COMPILED, ended=Exit(1, "exited"))
    ([(made, _)], said), _ = prepare(engine), prepare(engine)
    assert said[-1] == "compiling ended with status 1; each process compiles them itself"
    assert list(made.iterdir()) == []
    assert len(engine.tasks) == 1  # not again at every start


def test_an_interruption_keeps_nothing(prepare, cache):
    with pytest.raises(CapsuleError, match="interrupted") as caught:
        prepare(Compiler(COMPILED, ended=Exit(143, "interrupted")))
    assert caught.value.code == "CAP-E012"
    assert list(cache.folder(KIND).iterdir()) == []
    prepare(engine := Compiler(COMPILED))
    assert len(engine.tasks) == 1


def test_bytecode_that_someone_changed_is_made_again(prepare):
    [(made, _)], _ = prepare(engine := Compiler(COMPILED))
    kept = made / COMPILED.removeprefix("bytecode/")
    kept.write_text("something else")
    [(again, _)], _ = prepare(engine)
    assert (again / kept.relative_to(made)).read_bytes() == COMPILED.encode()
    assert len(engine.tasks) == 2
