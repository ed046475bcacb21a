"""Diagnoses of small programs and trainers, executed by the interpreter that runs the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import capsule
from capsule.diagnosis.attribution import line_findings, operator_findings
from capsule.diagnosis.diagnose import diagnose, read_reports
from capsule.diagnosis.findings import Finding
from capsule.engine.interface import Exit
from capsule.experiment import contract
from capsule.experiment.lock import Lock, LockedProject
from capsule.experiment.variables import environment_variables
from capsule.host.spec_file import parse_spec
from capsule.report.progress import SilentReporter
from tests.training.conftest import tree_facts

PACKAGE = Path(capsule.__file__).parent
NATIVE = str(PACKAGE / "native" / "lib").removeprefix("/")


WITHOUT_TORCH = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == "torch" else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""


class LocalEngine:
    """Runs a task with the packages of the tests, with what an image has beside them."""

    name = "docker"  # as far as the diagnosis asks

    def describe(self):
        return {"name": self.name}

    def __init__(self, folder: Path, project: Path | None, *, torch: bool = True) -> None:
        """Make the engine; without torch, which takes seconds to import, if it is not needed."""
        site = folder / "site"
        site.mkdir(parents=True)
        hooks = [path.read_text() for path in sorted((PACKAGE / "training").rglob("*.pth"))]
        if not torch:
            hooks.append(WITHOUT_TORCH)
        (site / "sitecustomize.py").write_text("".join(hooks))
        self._path = f"{site}:{PACKAGE.parent}"
        self._project = project

    def run(self, task, on_poll=lambda: None):
        environment = {
            **task.environment,
            "PATH": f"{Path(sys.executable).parent}:{os.defpath}",
            "PYTHONPATH": self._path,
            contract.PROJECT_VARIABLE: str(self._project),
        }
        directory = str(task.run_directory)
        with (task.run_directory / contract.LOG).open("wb") as log:
            done = subprocess.run(
                [
                    sys.executable if word == "python3.11" else word
                    for word in replace(task, native=NATIVE).command(
                        run_directory=directory, prefix=""
                    )
                ],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        on_poll()
        return Exit(done.returncode, "exited")


def parsed(program_spec, **settings):
    return parse_spec(json.dumps({**program_spec, **settings}).encode(), "test")


PROGRAM = {
    "name": "program",
    "accelerator": {"kind": "cpu", "numerics": "native"},
    "trainer": {"command": ["python", "train.py"]},
    "code": {"path": "."},
}


SYSTEM_CLOCK = {"entropy": {"clock": "system"}}


def locked(spec, project):
    """Return a lock of a spec with its source tree, and without an image."""
    tree = LockedProject.model_construct(files=tree_facts(project))
    return Lock.model_construct(spec=spec, project=tree)


WATCHED = """\
import sys
from capsule.training.instruments.hooks import install
install()
if torch_flags := {flags}:
    import torch
    from capsule.training.determinism.torch_flags import TorchFlags, apply
    apply(TorchFlags.of(torch_flags))
import runpy
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.fixture
def explained(tmp_path):
    """Return a function that runs a program twice under instruments and explains it."""

    def work(program, *, torch=False, **settings):
        spec = parsed(PROGRAM, **settings)
        (tmp_path / "train.py").write_text(textwrap.dedent(program))
        flags = spec.determinism.model_dump() if torch else {}
        folders = [tmp_path / name / "instruments" for name in ("first", "second")]
        running = [
            subprocess.Popen(
                [sys.executable, "-c", WATCHED.format(flags=flags)],
                cwd=tmp_path,
                env={
                    **environment_variables(spec),
                    "CAPSULE_DIAGNOSE": str(folder),
                    "CAPSULE_SEED": "1",
                    "PYTHONPATH": str(PACKAGE.parent),
                },
                stdout=subprocess.PIPE,
            )
            for folder in folders
        ]
        printed = [process.communicate()[0] for process in running]
        reports = [read_reports(folder.parent) for folder in folders]
        findings = operator_findings(
            [report for run in reports for report in run],
            failed=any(process.returncode for process in running),
        )
        if printed[0] != printed[1]:
            findings += line_findings(reports[0][0], reports[1][0], spec)
        return Explained(printed[0] == printed[1], findings)

    return work


@dataclass(frozen=True)
class Explained:
    equal: bool
    findings: list[Finding]

    def places(self, level="error"):
        return [(item.code, str(item.where)) for item in self.findings if item.level == level]

    def one(self, code):
        (item,) = (item for item in self.findings if item.code == code)
        return item


@pytest.fixture
def diagnosed(tmp_path):
    """Return a function that diagnoses a spec, or a program, from beginning to end."""

    def work(program=None, *, spec=PROGRAM, steps=64, torch=True, **settings):
        project = tmp_path / "project"
        project.mkdir()
        if program is not None:
            (project / "train.py").write_text(textwrap.dedent(program))
        lock = locked(parsed(spec, **settings), project)
        engine = LocalEngine(tmp_path, project, torch=torch)
        return diagnose(lock, engine, tmp_path / "runs", steps=steps, reporter=SilentReporter())

    return work
