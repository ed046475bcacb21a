"""Machines that are not there: real trainings on stand-ins for other processors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import capsule
from capsule.engine.interface import Exit, Task
from capsule.experiment import contract
from capsule.experiment.canonical import canonical_json
from capsule.experiment.spec import Numerics
from capsule.experiment.variables import maths_variables
from capsule.machine.fingerprint import Fingerprint

PACKAGE = Path(capsule.__file__).parent
NATIVE = str(PACKAGE / "native" / "lib").removeprefix("/")

# The code that 'native' takes on a processor with AVX2 and FMA, and on one without them. Both are
# pinned, so that a stand-in gives the same bits wherever the tests run (docs/numerics.md).
NEW: Numerics = "portable-v3"
OLD: Numerics = "portable-v2"
# Capsule's own layers need AVX2 and FMA, and leave the work to torch without them.
WITHOUT_CHAINS = textwrap.dedent(
    """\
    import sys
    from importlib.machinery import PathFinder

    class Finder(PathFinder):
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            found = super().find_spec(name, path, target)
            if name == "capsule.training.layers.kernels":
                execute = found.loader.exec_module

                def exec_module(module):
                    execute(module)
                    module.has_products = lambda: False

                found.loader.exec_module = exec_module
            return found

    sys.meta_path.insert(0, Finder)
    """
)


def copy(source: Path, target: Path) -> None:
    """Copy a run directory, in which the journal of entropy has room for a GiB and little in it."""
    target.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", "--sparse=always", f"{source}/.", target], check=True)


@dataclass(frozen=True)
class StandIn:
    """An engine that runs a task with the tests' interpreter, as a certain machine would.

    What it once trained it gives again, since that is what it would obtain.

    Attributes:
        folder: For what it needs on disk; another for each stand-in.
        fingerprint: What the machine says it is.
        code: The profile whose code its processor takes: NEW or OLD.
        fault: Fields of the trainer that it gets wrong.
    """

    folder: Path
    fingerprint: Fingerprint
    code: Numerics = NEW
    fault: dict[str, Any] = field(default_factory=dict)
    name: str = "process"

    def describe(self) -> dict[str, str]:
        return {"name": self.name}

    def check(self, lock):
        """Nothing: it can run everything."""

    def prepare(self, lock, image, cache, *, progress):
        """Nothing: the tests' environment has everything."""

    def run(self, task: Task, on_poll=lambda: None) -> Exit:
        finished = self.folder / "finished"
        if not finished.exists():
            self._train(task)
            copy(task.run_directory, finished)
        copy(finished, task.run_directory)
        on_poll()
        return Exit(0, "exited")

    def _train(self, task: Task) -> None:
        site = self.folder / "site"
        site.mkdir(parents=True, exist_ok=True)
        (site / "sitecustomize.py").write_text(WITHOUT_CHAINS if self.code == OLD else "")
        job = task.run_directory / contract.JOB
        document = json.loads(job.read_bytes())
        document["spec"]["trainer"].update(self.fault)
        job.write_bytes(canonical_json(document))
        environment = {
            **task.environment,
            **maths_variables(self.code, None),
            "PATH": f"{Path(sys.executable).parent}:{os.defpath}",
            "PYTHONPATH": f"{site}:{PACKAGE.parent}",
        }
        command = replace(task, native=NATIVE).command(
            run_directory=str(task.run_directory), prefix=""
        )
        words = [sys.executable if word == "python3.11" else word for word in command]
        # Native runs preload no shim for the parts of the libraries that cannot be pinned.
        at = words.index("--")
        words[at:at] = ["--preload", f"/{NATIVE}/libcapsule-math.so"]
        with (task.run_directory / contract.LOG).open("wb") as log:
            subprocess.run(words, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True)
