"""The interpreters of runs read bytecode that their image made, and cannot write it."""

import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from capsule import execution
from capsule.engine import containers
from capsule.engine.interface import Task
from capsule.engine.select import open_engine
from capsule.experiment import contract
from capsule.experiment.spec import SourcesSpec
from capsule.image.cache import Cache
from capsule.image.lockfile import read_lock

pytestmark = [pytest.mark.engine, pytest.mark.network, pytest.mark.slow]

# With -v, an interpreter says from which file it took the code of each module.
IMPORT = """\
import capsule.training.lifecycle, email
open("/bytecode/usr/lib/python3.11/new.pyc", "w")
"""
CODE = re.compile(
    r"^# code object from '?(/.*?/(?:lifecycle|email/__init__)\..*?)'?$", re.MULTILINE
)


@pytest.mark.parametrize("name", ["docker", "bwrap"])
def test_runs_import_bytecode_and_cannot_write_it(micro, tmp_path, name):
    lock, engine = read_lock(micro.directory / "lock.json"), open_engine(name, progress=print)
    execution.prepare(lock, engine, Cache(), sources=SourcesSpec(), reporter=Mock())
    folder = tmp_path / "closed" / "run"
    folder.parent.mkdir(mode=0o700)
    folder.mkdir()

    def imported(*options):
        arguments = ("python3.11", *options, "-v", "-c", IMPORT)
        task = Task(
            run_directory=folder,
            environment={},
            limits=lock.spec.limits,
            arguments=arguments,
        )
        assert engine.run(task).status == 1
        log = (folder / contract.LOG).read_text()
        assert "Read-only file system: '/bytecode/usr/lib/python3.11/new.pyc'" in log
        return {(Path(path).parts[1], Path(path).suffix) for path in CODE.findall(log)}

    assert imported() == {("bytecode", ".pyc")}
    assert imported("-X", "pycache_prefix=/nowhere") == {("usr", ".py")}  # the log would show it


def test_a_run_without_bytecode_has_the_same_trace_and_ledger(micro, tmp_path, monkeypatch):
    lock, engine = read_lock(micro.directory / "lock.json"), open_engine("docker", progress=print)
    monkeypatch.setattr(containers, "prepare_bytecode", lambda *_: [])
    execution.prepare(lock, engine, Cache(), sources=SourcesSpec(), reporter=Mock())
    (folder := tmp_path / "closed").mkdir(mode=0o700)
    execution.execute(lock, engine, folder / "run", reporter=Mock())
    for name in (contract.TRACE, contract.CHECKPOINT_INDEX, contract.EVALUATION, contract.LEDGER):
        with_it = micro.directory / "work" / name
        assert (folder / "run" / name).read_bytes() == with_it.read_bytes(), name
