"""Bytecode for trainers: who gets it, and what of a task's files is kept."""

import os
import stat

import pytest

from capsule.engine.bytecode import FOLDER, KIND, NO_BYTECODE, VARIABLE, prepare_bytecode
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
def prepare(lock, make_image, cache):
    image, said = make_image(), []
    cache.folder("objects")

    def prepare(engine, lock=lock):
        found = prepare_bytecode(engine, lock, image, cache, said.append)
        return found, said

    return prepare


def test_it_is_made_once_and_mounted_for_tasks(prepare, make_task):
    engine = Compiler(COMPILED)
    (first, said), (second, _) = prepare(engine), prepare(engine)
    assert first == second
    assert len(engine.tasks) == 1
    assert said == ["compiling the modules that trainers import"]
    assert first.mounts == [(first.folder, FOLDER)]
    kept = first.folder / COMPILED.removeprefix("bytecode/")
    assert kept.read_bytes() == COMPILED.encode()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o644
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o755
    task = first.used_by(make_task("true", environment={"A": "1"}))
    assert task.environment == {VARIABLE: FOLDER, "A": "1"}


def test_programs_of_users_and_images_without_torch_have_none(prepare, lock, make_lock, make_task):
    trainer = CommandTrainer(command=("true",))
    program = lock.model_copy(update={"spec": lock.spec.model_copy(update={"trainer": trainer})})
    engine = Compiler()
    for each in (program, make_lock()):
        assert prepare(engine, each) == (NO_BYTECODE, [])
    assert engine.tasks == []
    task = make_task("true")
    assert NO_BYTECODE.used_by(task) is task
    assert NO_BYTECODE.mounts == []


def test_a_cache_that_cannot_be_written_gets_none(prepare, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    assert prepare(Compiler(COMPILED)) == (NO_BYTECODE, [])


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

    made, _ = prepare(Hostile(COMPILED, "bytecode/notes.txt", "elsewhere.pyc"))
    files = [path for path in made.folder.rglob("*") if not path.is_dir()]
    assert files == [made.folder / COMPILED.removeprefix("bytecode/")]


def test_a_bytecode_folder_that_is_a_link_leads_nowhere(prepare, tmp_path):
    elsewhere = tmp_path / "private"
    elsewhere.mkdir()
    (elsewhere / "mine.pyc").write_text("private")

    class Hostile(Compiler):
        def run(self, task, **options):
            (task.run_directory / "bytecode").symlink_to(elsewhere)
            return super().run(task, **options)

    made, _ = prepare(Hostile())
    assert list(made.folder.iterdir()) == []


def test_a_failure_is_told_and_the_runs_do_without(prepare):
    engine = Compiler(COMPILED, ended=Exit(1, "exited"))
    (made, said), _ = prepare(engine), prepare(engine)
    assert said[-1] == "compiling ended with status 1; each process compiles them itself"
    assert list(made.folder.iterdir()) == []
    assert len(engine.tasks) == 1  # not again at every start


def test_an_interruption_keeps_nothing(prepare, cache):
    with pytest.raises(CapsuleError, match="interrupted") as caught:
        prepare(Compiler(COMPILED, ended=Exit(143, "interrupted")))
    assert caught.value.code == "CAP-E012"
    assert list(cache.folder(KIND).iterdir()) == []
    prepare(engine := Compiler(COMPILED))
    assert len(engine.tasks) == 1


def test_bytecode_that_someone_changed_is_made_again(prepare):
    made, _ = prepare(engine := Compiler(COMPILED))
    kept = made.folder / COMPILED.removeprefix("bytecode/")
    kept.write_text("something else")
    again, _ = prepare(engine)
    assert (again.folder / kept.relative_to(made.folder)).read_bytes() == COMPILED.encode()
    assert len(engine.tasks) == 2
