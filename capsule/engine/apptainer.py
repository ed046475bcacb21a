"""Apptainer: runs the locked image on clusters that have neither Docker nor bubblewrap.

The image's layers are unpacked into a folder of the cache, as for bubblewrap, which Apptainer runs
as a sandbox. :mod:`capsule.engine.confine` confines what Apptainer itself does not. What still is
confined less than by a container engine is printed before a run starts and recorded in the bundle's
observations: see :meth:`ApptainerEngine.describe`.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

from capsule.engine import confine
from capsule.engine.containers import resource_limits
from capsule.engine.data import Mounts
from capsule.engine.gpu import SEARCHED, require_driver, visible_devices
from capsule.engine.interface import Task
from capsule.engine.process import RunningProcess, Start, descendants, started
from capsule.engine.seccomp_filter import compiled_profile
from capsule.engine.supervise import Interrupts, starting
from capsule.engine.unpacked import (
    PROTECTED,
    UnpackedImageEngine,
    not_started,
    program_command,
    program_variables,
)
from capsule.experiment import contract
from capsule.experiment.lock import Lock
from capsule.host.errors import CapsuleError
from capsule.host.owner import temporary_folder
from capsule.image.assembly.assemble import TASK_USER, Image

_PROGRAMS = ("apptainer", "singularity")  # SingularityCE has the same command line
# Without --no-init, a process of Apptainer would be the first of the namespace, where the launcher
# has to be. --no-mount leaves out the /sys and the binds that the administrator has configured.
_CONFINED = (
    *("--userns", "--containall", "--no-init", "--no-privs", "--cleanenv", "--no-umask"),
    *("--no-home", "--no-mount", "bind-paths,sys", "--net", "--network", "none"),
)
_LIBRARIES = "/.singularity.d/libs"  # where --nv binds those of NVIDIA's driver
_PYTHON = "/usr/bin/python3"  # of the image
_TEMPORARY = "/tmp"  # noqa: S108 - private
_POLL_SECONDS = 0.02
# Apptainer ends with 1 for an option that it does not have, and with 255 for other failures;
# capsule.engine.confine ends with 125.
_NOT_STARTED = (1, 125, 255)
_FIX = (
    "Install Apptainer 1.1 or newer, and let users make user namespaces (sysctl "
    "kernel.unprivileged_userns_clone, user.max_user_namespaces); or use another --engine."
)


class ApptainerEngine(UnpackedImageEngine):
    """Runs tasks in containers that Apptainer makes of the unpacked image, without root."""

    def __init__(self) -> None:
        """Find Apptainer.

        Raises:
            CapsuleError: CAP-E001, there is none, it does not work, or the user is root.
        """
        super().__init__()
        found = next(filter(None, map(shutil.which, _PROGRAMS)), None)
        if found is None:
            raise CapsuleError("CAP-E001", "apptainer is not on the PATH", fix=_FIX)
        if os.getuid() == 0:
            raise CapsuleError(
                "CAP-E001",
                "the engine apptainer is not available to root, whom it would not confine securely",
                fix="Run Capsule as an ordinary user, or use another --engine.",
            )
        self._program = found
        self._version = _version(found)
        self._filter = compiled_profile()

    @property
    def name(self) -> Literal["apptainer"]:
        """The engine's name."""
        return "apptainer"

    def check(self, lock: Lock) -> None:
        """See :class:`capsule.engine.interface.Engine`."""
        if lock.spec.accelerator.kind == "cuda":
            require_driver()

    def describe(self) -> dict[str, str]:
        """Return Apptainer's version, and what it confines less than a container engine.

        ``seccomp`` is ``profile`` or ``none``. ``memory`` is ``watched``: once a second, by
        Capsule. ``temporary`` is ``unlimited``: ``/tmp`` is a folder on disk, from which programs
        can be executed. ``user`` is ``own``: programs see the number of the user who runs Capsule.
        As in a container, programs have no capabilities and no network.
        """
        return {
            "name": self.name,
            "version": self._version,
            "seccomp": "none" if self._filter is None else "profile",
            "memory": "watched",
            "temporary": "unlimited",
            "user": "own",
        }

    def _losses(self) -> list[str]:
        losses = [
            "memory is watched once a second",
            f"{_TEMPORARY} is on disk and not limited, and programs can be executed from it",
            "programs see your user id",
        ]
        if self._filter is None:
            losses.append("system calls are not filtered, because libseccomp.so.2 is missing")
        return losses

    @contextmanager
    def _started(
        self, task: Task, image: Image, mounts: Mounts, interruptions: Interrupts
    ) -> Iterator[RunningProcess]:
        with ExitStack() as stack:
            scratch = stack.enter_context(temporary_folder("capsule-apptainer-"))
            start = self._start(task, image, mounts, scratch)
            running = stack.enter_context(started(start, task))
            # Unlike bwrap, Apptainer does not report the number of the first process, so /proc is
            # searched.
            for _ in starting(task, interruptions):
                if running.first is not None or running.wait(_POLL_SECONDS) is not None:
                    break
                running.first = _first_process(descendants(running.number))
            # A task with any other status was started, and ended before it was seen.
            unstarted = running.first is None and running.wait(0) in _NOT_STARTED
            if unstarted and not interruptions.count:
                stack.close()  # what Apptainer printed is written to the log
                raise running.unkept or not_started("Apptainer", task, _FIX)
            yield running

    def _accounts(self, scratch: Path) -> Iterator[str]:
        """Yield mounts of the image's accounts, in which its user has the number of this one.

        Apptainer would add this user's name and home directory.
        """
        user, group = os.getuid(), os.getgid()
        for name, before, after in (
            ("passwd", f":{TASK_USER}:{TASK_USER}:", f":{user}:{group}:"),
            ("group", f":{TASK_USER}:", f":{group}:"),
        ):
            accounts = (self._root / "etc" / name).read_text()
            (scratch / name).write_text(accounts.replace(before, after))
            yield _mount(scratch / name, f"/etc/{name}")

    def _start(self, task: Task, image: Image, mounts: Mounts, scratch: Path) -> Start:
        (scratch / "tmp").mkdir()
        variables, options = program_variables(task, image), list(_CONFINED)
        if task.gpus:
            # Apptainer binds the driver's libraries and the files of all devices; Capsule chooses.
            variables |= {**visible_devices(task.gpus), SEARCHED: _LIBRARIES}
            options.append("--nv")
        shown = (
            _mount(task.run_directory.resolve(), contract.RUN_FOLDER, writable=True),
            *self._accounts(scratch),
            _mount(scratch / "tmp", _TEMPORARY, writable=True),
            *(_mount(path, path) for path in _protected()),
            *(_mount(path, to) for path, to in mounts),
        )
        asked = {
            "command": program_command(task),
            "variables": variables,
            "limits": {**resource_limits(task.limits), "nproc": task.limits.processes},
            "filter": base64.b64encode(self._filter or b"").decode(),
        }
        inside = (_PYTHON, "-I", "-S", "-c", Path(confine.__file__).read_text(), json.dumps(asked))
        return Start(
            (
                *(self._program, "--silent", "exec", *options),
                *("--hostname", variables["HOSTNAME"], "--pwd", _TEMPORARY),
                *(word for mount in shown for word in ("--mount", mount)),
                *(str(self._root), *inside),
            ),
            # No variable APPTAINER_… or SINGULARITY_… of the caller's, which would add binds and
            # options.
            {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ},
            "/",
            enclosed=True,
        )


def _mount(path: str | Path, to: str, *, writable: bool = False) -> str:
    """Return the value of an option ``--mount``: a line of CSV, so that a path may have any name.

    ``--bind`` splits its value at every comma and colon.
    """
    fields = ["type=bind", f"source={path}", f"destination={to}", *([] if writable else ["ro"])]
    line = io.StringIO()
    csv.writer(line, quoting=csv.QUOTE_ALL, lineterminator="").writerow(fields)
    return line.getvalue()


def _protected() -> Iterator[str]:
    """Yield what is shown read-only: where C libraries look for processors, and parts of /proc."""
    yield "/sys/devices/system"
    yield from (path for name in PROTECTED if Path(path := f"/proc/{name}").exists())


def _version(program: str) -> str:
    """Return Apptainer's version, such as ``1.4.5``."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = " ".join(done.stderr.split())
        raise CapsuleError("CAP-E001", f"{program} does not work: {said}", fix=_FIX)
    return done.stdout.split()[-1]


def _first_process(processes: Iterable[int]) -> int | None:
    """Return the process that is the first of its namespace; None if there is none yet."""
    for process in processes:
        with suppress(OSError):  # processes end at any moment
            for line in Path(f"/proc/{process}/status").read_text().splitlines():
                # The numbers of a process in all namespaces that it is in, the innermost last
                # (proc(5)).
                if line.startswith("NSpid:") and line.split()[2:] and line.split()[-1] == "1":
                    return process
    return None
