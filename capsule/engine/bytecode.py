"""The bytecode of what runs import, made once per image by the image's own interpreter.

An image has no bytecode, and a run may not write any. So each process of a run would compile
torch's sources, which takes 2 seconds of processor time, and another 3 seconds if a program makes
one of torch's optimizers, which import torch's compiler. Instead, a task with the confinement of a
run imports what runs import, and writes the bytecode to its run directory. Capsule keeps it in the
cache, and runs see it read-only: :mod:`capsule.training.determinism.child_processes` has every
interpreter look there. The bytecode is executed only where its sources would be, so it needs no
more trust than the image. An interpreter compares the size and the time of a source with those in
the bytecode, and compiles the source itself if they differ.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from capsule.engine.data import Mounts
from capsule.engine.interface import RUN_DIRECTORY, Engine, Task
from capsule.experiment.beneath import entries_beneath, open_beneath
from capsule.experiment.canonical import canonical_json, sha256_hex
from capsule.experiment.lock import Lock
from capsule.experiment.trainers import CommandTrainer
from capsule.host.errors import CapsuleError
from capsule.host.reporter import Progress
from capsule.image.assembly.assemble import Image
from capsule.image.cache import Cache
from capsule.image.distribution import distribution_of

FOLDER = "/bytecode"  # where a task sees it; the training code knows it, too
KIND = "bytecode"  # the folder of the cache

_LAYOUT = 2  # number of the way in which it is made, a part of its key
_LIMITS = {"disk_mb": 512, "minutes": 10}
# Without site (-S), whose hook for torch demands the settings of a run. Whatever a trainer needs
# only sometimes is compiled without an import.
_COMPILE = """\
import compileall, importlib, sys
sys.path.append(sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module(name)
for name in ("capsule", "gymnasium", "ale_py"):
    compileall.compile_dir(f"{sys.argv[1]}/{name}", quiet=2)
"""
_IMPORTED = ("capsule.training.__main__", "torch")
_BY_OPTIMIZERS = "torch._dynamo"  # Capsule's trainers have optimizers of their own


def prepare_bytecode(
    engine: Engine, lock: Lock, image: Image, cache: Cache, progress: Progress
) -> Mounts:
    """Return what to mount so that the runs of a lock find bytecode, and make it if necessary.

    Args:
        engine: Where runs are executed; it has prepared the image.
        lock: The locked experiment.
        image: Its image.
        cache: Keeps the bytecode.
        progress: Told if it has to be made, and if it cannot be.

    Returns:
        The folder of the bytecode and its place, to be mounted read-only. Nothing is to be mounted
        for an image without torch, or if the cache cannot be written.

    Raises:
        CapsuleError: CAP-E012, making it was interrupted; CAP-E… as :meth:`Engine.run` raises it.
    """
    if not _has_torch(lock) or not os.access(cache.root, os.W_OK):
        return []
    modules = _modules(lock)

    def make(folder: Path) -> None:
        progress("compiling the modules that runs import")
        written = folder.with_name("run")
        written.mkdir()
        folder.mkdir()
        ended = engine.run(_task(lock, modules, written))
        if ended.reason == "interrupted":
            raise CapsuleError("CAP-E012", "the run was interrupted", fix="Start it again.")
        if ended.status == 0:
            _keep(written, folder)
        else:
            progress(
                f"compiling ended with status {ended.status}; each process compiles them itself"
            )

    # No code of a project is executed, so a change of it needs no other bytecode.
    layers = [layer.diff_id for layer in image.layers if layer.name != "project"]
    key = sha256_hex(canonical_json([_LAYOUT, *modules, *layers]))
    return [(cache.recorded_folder(KIND, key, make), FOLDER)]


def _has_torch(lock: Lock) -> bool:
    return any(wheel.name == "torch" for wheel in lock.image.wheels)


def _modules(lock: Lock) -> tuple[str, ...]:
    """Return the modules that a run of a lock imports, or may import."""
    program = isinstance(lock.spec.trainer, CommandTrainer)
    return (*_IMPORTED, _BY_OPTIMIZERS) if program else _IMPORTED


def _task(lock: Lock, modules: tuple[str, ...], run_directory: Path) -> Task:
    """Return the task that writes the bytecode to ``bytecode`` in its run directory."""
    distribution = distribution_of(lock.spec.image)
    options = ("-I", "-S", "-X", f"pycache_prefix={RUN_DIRECTORY}/bytecode")
    site = f"/{distribution.site}"
    return Task(
        arguments=(distribution.interpreter, *options, "-c", _COMPILE, site, *modules),
        run_directory=run_directory,
        environment={},
        limits=lock.spec.limits.model_copy(update=_LIMITS),
    )


def _keep(run_directory: Path, kept: Path) -> None:
    """Copy the bytecode, and nothing else that a task may have written."""
    for entry in entries_beneath(run_directory):
        folder, _, name = entry.path.partition("/")
        if folder == "bytecode" and name.endswith(".pyc") and stat.S_ISREG(entry.facts.st_mode):
            target = kept / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with open_beneath(run_directory, entry.path) as source, target.open("xb") as copy:
                shutil.copyfileobj(source, copy)
    # A container's user may be another one than the owner, and this process may have any umask.
    for path in (kept, *kept.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
