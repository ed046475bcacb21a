"""bubblewrap: runs the locked image without a daemon or root, where Docker is not allowed.

The image's layers are unpacked into a folder of the cache, which is the root of a run, read-only.
The run sees the same files, variables, paths and process numbers as in a container, so its claims
are the same. What is confined less than by a container engine is printed before it starts and
recorded in the bundle's observations: see :meth:`BubblewrapEngine.describe`.
"""

from __future__ import annotations

import io
import json
import os
import resource
import select
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from capsule.engine.containers import resource_limits
from capsule.engine.data import Mounts
from capsule.engine.gpu import no_gpu
from capsule.engine.interface import Task
from capsule.engine.process import RunningProcess, Start, started
from capsule.engine.seccomp_filter import compiled_profile
from capsule.engine.supervise import Interrupts, starting
from capsule.engine.unpacked import (
    PROTECTED,
    UnpackedImageEngine,
    not_started,
    program_command,
    program_variables,
)
from capsule.experiment.lock import Lock
from capsule.host.errors import CapsuleError
from capsule.image.assembly.assemble import TASK_USER, Image
from capsule.native import native_part

_NAMESPACES = ("user", "ipc", "pid", "net", "uts", "cgroup-try")
_CONFINED = (
    *(f"--unshare-{name}" for name in _NAMESPACES),
    *("--uid", str(TASK_USER), "--gid", str(TASK_USER), "--cap-drop", "ALL"),
    # The launcher is the first process of its namespace, as in a container.
    *("--as-pid-1", "--die-with-parent"),
)
# bubblewrap would end by these signals, and the task with it, before the task has saved its state:
# schedulers and shutdowns send them to every process. Capsule sends the task its SIGTERM.
_IGNORING_SIGNALS = ("sh", "-c", "trap '' HUP INT TERM; exec \"$@\"", "sh")
# What container engines do not show of /proc.
_MASKED_FOLDERS = ("acpi", "asound", "scsi")
_MASKED_FILES = ("interrupts", "kcore", "keys", "latency_stats", "sched_debug", "timer_list")
_POLL_SECONDS = 0.1
_FIX = (
    "Install bubblewrap 0.7 or newer (apt-get install bubblewrap), and let users make user "
    "namespaces (sysctl kernel.unprivileged_userns_clone, user.max_user_namespaces, and on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns); or use another --engine."
)


class BubblewrapEngine(UnpackedImageEngine):
    """Runs tasks in namespaces that bubblewrap makes, in the unpacked image."""

    def __init__(self) -> None:
        """Find bubblewrap, and read back how it confines a program here.

        Raises:
            CapsuleError: CAP-E001, there is none, or the kernel gives it no namespaces.
        """
        super().__init__()
        found = shutil.which("bwrap")
        if found is None:
            raise CapsuleError("CAP-E001", "bwrap is not on the PATH", fix=_FIX)
        self._program = found
        self._filter = compiled_profile()
        self._facts = self._probe()

    @property
    def name(self) -> Literal["bwrap"]:
        """The engine's name."""
        return "bwrap"

    def check(self, lock: Lock) -> None:
        """See :class:`capsule.engine.interface.Engine`."""
        if lock.spec.accelerator.kind == "cuda":
            raise no_gpu(f"Capsule's engine {self.name} gives no GPU to a run")

    def describe(self) -> dict[str, str]:
        """Return bubblewrap's version, and what it confines less than a container engine.

        ``seccomp`` is ``profile`` or ``none``, as a program read it back. ``memory`` is
        ``watched``: once a second, by Capsule. ``processes`` is ``limited`` by the kernel, or
        ``unlimited`` for root. ``temporary`` is ``executable``: programs can be executed from
        ``/tmp`` and ``/dev/shm``.
        """
        return {"name": self.name, **self._facts}

    @contextmanager
    def _started(
        self, task: Task, image: Image, mounts: Mounts, interruptions: Interrupts
    ) -> Iterator[RunningProcess]:
        """Start a task, which waits in its namespaces until its limits are set from outside.

        There, the limit of processes counts the task's own. Set before, it would count all that
        the user has on this machine.
        """
        with ExitStack() as stack:
            tell, told = _pipe(stack)
            wait, release = _pipe(stack)
            descriptors = {
                "--info-fd": told.fileno(),
                "--block-fd": wait.fileno(),
                **self._filter_option(stack),
            }
            beginning = os.open(native_part("capsule-enclose"), os.O_RDONLY)
            stack.callback(os.close, beginning)
            start = self._start(task, image, mounts, descriptors, beginning)
            running = stack.enter_context(started(start, task))
            # Otherwise _first_process() would never see the end of the pipe.
            told.close()
            first = _first_process(tell, starting(task, interruptions))
            if first is None and interruptions.count:
                running.kill()  # bubblewrap ignores SIGTERM
                yield running
                return
            if first is None:
                running.wait(1)
                stack.close()  # what bwrap printed is written to the log
                raise running.unkept or not_started("bwrap", task, _FIX)
            _limit(first, {**resource_limits(task.limits), "nproc": task.limits.processes})
            running.first = first
            release.write(b"1")
            yield running

    def _start(
        self,
        task: Task,
        image: Image,
        mounts: Mounts,
        descriptors: dict[str, int],
        beginning: int,
    ) -> Start:
        memory = _memory(task.limits.temporary_mb)
        system = "/sys/devices/system"  # where C libraries look for processors
        # bwrap makes these one after the other, so a folder becomes read-only after all that is
        # mounted below it.
        folders = (
            *("--ro-bind", str(self._root), "/", "--proc", "/proc", "--dev", "/dev"),
            *_guarded_proc(),
            *(*memory, "/dev/shm", *memory, "/tmp"),  # noqa: S108 - private
            *("--tmpfs", "/sys", "--ro-bind", system, system, "--remount-ro", "/sys"),
            *("--remount-ro", "/dev", "--bind", str(task.run_directory.resolve()), "/out"),
            *(word for path, to in mounts for word in ("--ro-bind", str(path), to)),
            *("--chdir", "/tmp"),  # noqa: S108 - private
        )
        variables = program_variables(task, image)
        words = [word for pair in variables.items() for word in ("--setenv", *pair)]
        options = [word for name, fd in descriptors.items() for word in (name, str(fd))]
        return Start(
            (
                *(*_IGNORING_SIGNALS, self._program, *_CONFINED),
                *("--hostname", variables["HOSTNAME"], *folders),
                *(*options, "--clearenv", *words, "--"),
                # The task does not inherit that signals are ignored.
                *(f"/proc/self/fd/{beginning}", f"--default-signals={beginning}", "--"),
                *program_command(task),
            ),
            {"PATH": os.environ.get("PATH", os.defpath)},
            "/",
            enclosed=True,
            descriptors=(*descriptors.values(), beginning),
        )

    def _filter_option(self, stack: ExitStack) -> dict[str, int]:
        """Return the option for the seccomp profile, with a descriptor from which it is read."""
        if self._filter is None:
            return {}
        descriptor = os.memfd_create("seccomp")
        stack.callback(os.close, descriptor)
        os.write(descriptor, self._filter)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return {"--seccomp": descriptor}

    def _probe(self) -> dict[str, str]:
        """Have a program report how it is confined, and return the facts of the engine."""
        with ExitStack() as stack:
            options = self._filter_option(stack)
            words = [word for name, fd in options.items() for word in (name, str(fd))]
            # With the options of a run, some of which bubblewrap before 0.7 does not have.
            shown = (
                *("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"),
                *(*_memory(1), "/tmp", "--remount-ro", "/dev"),  # noqa: S108 - private
                *("--clearenv", "--setenv", "PATH", os.environ.get("PATH", os.defpath)),
            )
            done = subprocess.run(
                [self._program, *_CONFINED, *shown, *words, "--", "cat", "/proc/self/status"],
                capture_output=True,
                text=True,
                check=False,
                pass_fds=tuple(options.values()),
            )
        if done.returncode != 0:
            said = " ".join(done.stderr.split())
            raise CapsuleError("CAP-E001", f"bwrap cannot make namespaces here: {said}", fix=_FIX)
        status = dict(line.split(":\t", 1) for line in done.stdout.splitlines())
        if int(status["CapEff"], 16) or int(status["CapBnd"], 16) or status["NoNewPrivs"] != "1":
            raise CapsuleError(
                "CAP-E001", "a program under bwrap has capabilities, or may get them", fix=_FIX
            )
        version = subprocess.run(
            [self._program, "--version"], capture_output=True, text=True, check=True
        )
        return {
            "version": version.stdout.split()[-1],
            "seccomp": "profile" if status["Seccomp"] == "2" else "none",
            "memory": "watched",
            "processes": "limited" if os.getuid() else "unlimited",
            "temporary": "executable",
        }

    def _losses(self) -> list[str]:
        losses = ["memory is watched once a second", "programs can be executed from /tmp"]
        if self._facts["seccomp"] == "none":
            losses.append("system calls are not filtered, because libseccomp.so.2 is missing")
        if self._facts["processes"] == "unlimited":
            losses.append("the number of processes is not limited, and the user is root outside")
        return losses


def _memory(mebibytes: int) -> tuple[str, ...]:
    """Return the options for a file system in memory, but for the folder that they precede."""
    return ("--perms", "1777", "--size", str(mebibytes << 20), "--tmpfs")


def _guarded_proc() -> Iterator[str]:
    """Yield the options that protect what of the machine a task's own ``/proc`` shows."""
    for name in PROTECTED:
        yield from ("--ro-bind-try", f"/proc/{name}", f"/proc/{name}")
    for name in _MASKED_FOLDERS:
        if Path("/proc", name).is_dir():
            yield from ("--tmpfs", f"/proc/{name}", "--remount-ro", f"/proc/{name}")
    for name in _MASKED_FILES:
        if Path("/proc", name).exists():
            yield from ("--ro-bind", "/dev/null", f"/proc/{name}")


def _pipe(stack: ExitStack) -> tuple[io.FileIO, io.FileIO]:
    """Return the ends of a pipe, for reading and for writing, which the stack closes."""
    reading, writing = os.pipe()
    return stack.enter_context(io.FileIO(reading)), stack.enter_context(io.FileIO(writing, "w"))


def _first_process(tell: io.FileIO, waiting: Iterable[None]) -> int | None:
    """Return the number of the task's first process outside.

    None if bubblewrap ended before it told that, or ``waiting`` did.
    """
    for _ in waiting:
        if select.select([tell], [], [], _POLL_SECONDS)[0]:
            text = tell.readall()
            return int(json.loads(text)["child-pid"]) if text else None
    return None


def _limit(process: int, limits: dict[str, int]) -> None:
    """Set the resource limits of a process, and read them back."""
    for name, limit in limits.items():
        number = getattr(resource, f"RLIMIT_{name.upper()}")
        _, hard = resource.prlimit(process, number)
        wanted = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.prlimit(process, number, (wanted, wanted))
        if resource.prlimit(process, number) != (wanted, wanted):
            raise CapsuleError(
                "CAP-E005", f"the limit {name} of the task cannot be set to {wanted}", fix=_FIX
            )
