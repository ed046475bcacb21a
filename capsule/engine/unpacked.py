"""What engines without a daemon share: they run the locked image as a folder of the cache."""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from capsule.engine.bytecode import prepare_bytecode
from capsule.engine.data import Mounts, data_mounts, data_variables
from capsule.engine.interface import Engine, Exit, Task
from capsule.engine.process import RunningProcess
from capsule.engine.supervise import (
    Interrupts,
    interrupts,
    last_lines,
    supervise,
    with_output,
)
from capsule.experiment import contract
from capsule.experiment.beneath import give_folder
from capsule.experiment.lock import Lock
from capsule.host.errors import CapsuleError
from capsule.host.reporter import Progress
from capsule.image.assembly.assemble import Image
from capsule.image.assembly.unpack import unpacked_root
from capsule.image.cache import Cache
from capsule.image.distribution import PREFIX

# What container engines show of /proc read-only, or not at all. Other programs leave what is below
# /proc/sys and /proc/irq to root, whom the kernel lets write there without any capability.
PROTECTED = ("bus", "fs", "irq", "sys", "sysrq-trigger")


class UnpackedImageEngine(Engine):
    """Runs tasks in the unpacked image, which is the read-only root of a task."""

    def __init__(self) -> None:
        self._image: Image | None = None
        self._bytecode: Mounts = []
        self._root = Path()

    @abstractmethod
    def _losses(self) -> Sequence[str]:
        """Return what a container engine would confine more, in words."""

    @abstractmethod
    def _started(
        self, task: Task, image: Image, mounts: Mounts, interruptions: Interrupts
    ) -> AbstractContextManager[RunningProcess]:
        """Start a task with what is mounted read-only; afterwards nothing of it is left.

        If it is interrupted before the task has started, :func:`supervise` ends it.
        """

    def prepare(self, lock: Lock, image: Image | None, cache: Cache, *, progress: Progress) -> None:
        """Unpack the image, once per set of layers.

        Raises:
            CapsuleError: CAP-E004, CAP-I107 and CAP-I110 (:func:`unpacked_root`); CAP-E020, the
                cache is mounted with ``noexec``; CAP-E… as :func:`prepare_bytecode` raises it.
        """
        if image is None:
            raise ValueError(f"the engine {self.name} needs an image")
        cache.require_programs()
        self._root = unpacked_root(image, cache, progress)
        self._image = image
        losses = "; ".join(self._losses())
        progress(f"engine {self.name}: confines a run less than a container engine: {losses}")
        self._bytecode = prepare_bytecode(self, lock, image, cache, progress)

    def run(self, task: Task, on_poll: Callable[[], None] = lambda: None) -> Exit:
        """Execute a task in the unpacked image, with no network and no capabilities.

        Raises:
            CapsuleError: CAP-E005 it does not start, CAP-E007 and CAP-E009 (``supervise``),
                CAP-E041 the task left its folder so that no log can be written there, CAP-X003
                the disk is full or fails.
        """
        if self._image is None:
            raise RuntimeError("prepare() was not called")
        if os.getuid() == 0:
            # A container engine may have executed an earlier attempt, and given the folder to a
            # user that is not root. Without capabilities, root cannot write there.
            give_folder(task.run_directory, 0)
        with (
            interrupts() as interruptions,
            data_mounts(task.data) as data,
            self._started(task, self._image, [*self._bytecode, *data], interruptions) as running,
        ):
            ended = supervise(running, task, interruptions, on_poll)
        return with_output(replace(ended, image=self._image.config_digest), running.unkept)


def not_started(program: str, task: Task, fix: str) -> CapsuleError:
    """Return the error of a task that a program could not start, with the last line it printed.

    The log itself may be in a temporary folder, which is removed before the user can read it.
    """
    said = "".join(last_lines(task.run_directory / contract.LOG, 1))
    message = f"{program} cannot start the task; last output: {said!r}"
    return CapsuleError("CAP-E005", message, fix=fix)


def program_variables(task: Task, image: Image) -> dict[str, str]:
    """Return the variables of a task: the image's and its own."""
    variables = dict(word.split("=", 1) for word in json.loads(image.config)["config"]["Env"])
    own = {**task.environment, **data_variables(task.data)}
    # Container engines set HOSTNAME as well, and claims must not depend on the engine.
    return {**variables, "HOSTNAME": task.hostname or "capsule", **own}


def program_command(task: Task) -> list[str]:
    """Return the command of a task."""
    return task.command(run_directory=contract.RUN_FOLDER, prefix=PREFIX)
