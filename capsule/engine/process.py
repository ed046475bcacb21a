"""The plain-process engine: for machines without a container engine.

It runs the locked interpreter, wheels and training code with the locked variables, but on this
machine's C library: of the Debian packages of the lock, it uses the interpreter's alone. That is a
declared relaxation, ``engine=process``, of every claim made with it.

Where the kernel allows it, a task has namespaces of its own: it sees its run directory, its
environment and its source tree at fixed paths, a private ``/tmp``, no other process and no network.
Where it does not, the run reads that back, and ``engine.namespaces=none`` is declared, too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import capsule
from capsule.engine.data import Mounts, data_mounts, data_variables, link_data
from capsule.engine.environment import prepare_environment
from capsule.engine.gpu import driver_folder, require_driver, visible_devices
from capsule.engine.interface import Exit, Task
from capsule.engine.memory_events import oom_kills
from capsule.engine.supervise import (
    KILL_SECONDS,
    interrupts,
    supervise,
    with_output,
    write_log,
)
from capsule.experiment import contract
from capsule.experiment.lock import Lock, LockedProject
from capsule.host.errors import CapsuleError
from capsule.host.owner import temporary_folder
from capsule.host.reporter import Progress
from capsule.image.assembly.assemble import Image
from capsule.image.assembly.unpack import unpack_layer
from capsule.image.cache import Cache
from capsule.image.resolution.project import FOLDER, project_archive
from capsule.native import native_part

_LOG_SECONDS = 5.0
_ENCLOSED_ENVIRONMENT = "/capsule"
_ENCLOSED_HOME = "/tmp"  # noqa: S108 - private


class ProcessEngine:
    """Runs tasks as processes of the caller, in an environment made by uv."""

    def __init__(self) -> None:
        self._environment: Path | None = None
        self._project: Path | None = None
        self._encloses = False

    @property
    def name(self) -> Literal["process"]:
        """The engine's name."""
        return "process"

    def describe(self) -> dict[str, str]:
        """Return the name, and Capsule's version: there is no other program to name."""
        return {"name": self.name, "version": capsule.__version__}

    def check(self, lock: Lock) -> None:
        """See :class:`capsule.engine.interface.Engine`."""
        if lock.spec.accelerator.kind == "cuda":
            require_driver()

    def prepare(
        self,
        lock: Lock,
        image: Image | None,  # noqa: ARG002 - other engines need it
        cache: Cache,
        *,
        progress: Progress,
    ) -> None:
        """Make the Python environment of the lock, once per set of packages and code.

        Raises:
            CapsuleError: CAP-E013 a wheel is missing or damaged, CAP-E014
                the training code is not the locked one, CAP-E015 uv cannot make the environment
                (the interpreter or a wheel does not fit this machine), CAP-I103 to CAP-I108 a
                package of the interpreter is missing or damaged, CAP-I110 the source tree is not
                the locked one, CAP-I112 it is missing; CAP-E020, the cache is mounted with
                ``noexec``.
        """
        cache.require_programs()
        self._environment = prepare_environment(lock, cache, progress)
        self._project = _unpacked(lock.project, cache) if lock.project else None
        refusal = namespaces_refused()
        self._encloses = refusal is None
        if refusal is not None:
            progress(
                "this machine allows no separate namespaces, so the run shares its /tmp, process "
                f"numbers and network: a declared relaxation ({refusal})"
            )

    def run(self, task: Task, on_poll: Callable[[], None] = lambda: None) -> Exit:
        """Execute a task with nothing of the caller's environment, in namespaces of its own.

        Time, disk and memory are limited by watching; the number of processes is not. A task with
        a Ray cluster shares the network, ``/tmp`` and ``/dev/shm`` with it, so it has no
        namespaces.

        Raises:
            ValueError: The task is to have another host name, which takes a container.
            CapsuleError: CAP-E005 the process does not start, CAP-E007 and CAP-E009
                (``supervise``), CAP-E041 the task left its folder so that no log can be written
                there, CAP-X003 the disk is full or fails.
        """
        if self._environment is None:
            raise RuntimeError("prepare() was not called")
        if task.hostname is not None:
            raise ValueError("a plain process has no host name of its own choice")
        with interrupts() as interruptions, ExitStack() as stack:
            if self._encloses and task.cluster is None:
                mounts = stack.enter_context(data_mounts(task.data))
                start = enclosed_start(task, self._environment, self._project, mounts)
            else:
                home = stack.enter_context(temporary_folder("capsule-home-"))
                start = plain_start(task, self._environment, self._project, str(home))
            running = stack.enter_context(started(start, task))
            ended = supervise(running, task, interruptions, on_poll)
        return with_output(ended, running.unkept)


@dataclass(frozen=True)
class Start:
    """How a task is started.

    Attributes:
        command: Program and arguments, absolute or on this process's ``PATH``.
        environment: All variables.
        folder: Working folder of the command.
        enclosed: Whether its first descendant is the first process of a namespace.
        descriptors: Those of this process that the command gets.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str
    enclosed: bool
    descriptors: tuple[int, ...] = ()


def namespaces_refused() -> str | None:
    """Return why this kernel gives tasks no namespaces of their own; None if it does."""
    done = subprocess.run(
        [native_part("capsule-enclose"), "--probe"], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return None
    return done.stderr.strip().removeprefix("capsule-enclose: ") or f"status {done.returncode}"


def enclosed_start(task: Task, environment: Path, project: Path | None, data: Mounts) -> Start:
    """Start a task in namespaces of its own, where everything has a fixed path."""
    shown = {_ENCLOSED_ENVIRONMENT: environment}
    if project is not None:
        shown[contract.PROJECT_FOLDER] = project
    options = [f"--writable={task.run_directory.resolve()}={contract.RUN_FOLDER}"]
    options += [f"--read-only={folder.resolve()}={path}" for path, folder in shown.items()]
    options += [f"--read-only={path}={to}" for path, to in data]
    command = task.command(run_directory=contract.RUN_FOLDER, prefix=_ENCLOSED_ENVIRONMENT)
    temporary = f"--temporary={task.limits.temporary_mb}"
    return Start(
        (str(native_part("capsule-enclose")), temporary, *options, "--", *command),
        {
            **task_environment(task, _ENCLOSED_ENVIRONMENT, _ENCLOSED_HOME),
            **data_variables(task.data),
        },
        "/",
        enclosed=True,
    )


def plain_start(task: Task, environment: Path, project: Path | None, home: str) -> Start:
    """Start a task as a process like any other, which ends with Capsule."""
    # The signal at the parent's death would be cleared by a program that gains privileges
    # (prctl(2)), which --no-new-privs excludes.
    guard = ("setpriv", "--pdeathsig", "KILL", "--no-new-privs", "--", "prlimit", "--core=0:0")
    run_directory = str(task.run_directory.resolve())
    command = task.command(run_directory=run_directory, prefix=str(environment))
    variables = task_environment(task, str(environment), home) | {"TMPDIR": home}
    variables |= link_data(task.data, Path(home) / "data")
    if project is not None:
        variables |= {contract.PROJECT_VARIABLE: str(project)}
    return Start((*guard, *command), variables, home, enclosed=False)


class RunningProcess:
    """A started process and its descendants (:class:`capsule.engine.supervise.Running`).

    Attributes:
        first: The process that gets SIGTERM, if it is not the started one.
        unkept: Why its output could not be kept, if so. Set after its end.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], limit_bytes: int, *, enclosed: bool
    ) -> None:
        self._process = process
        self._limit_bytes = limit_bytes
        self._enclosed = enclosed
        self._oom_kills = oom_kills() or 0
        self.first: int | None = None
        self.unkept: CapsuleError | None = None

    @property
    def number(self) -> int:
        """The number of the started process."""
        return self._process.pid

    def wait(self, seconds: float) -> int | None:
        """See :class:`capsule.engine.supervise.Running`."""
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        # Popen gives -n for an end by signal n; containers give 128 + n.
        return status if status >= 0 else 128 - status

    def terminate(self) -> None:
        """See :class:`capsule.engine.supervise.Running`."""
        if self.first is None:
            self._process.terminate()
        else:
            with suppress(ProcessLookupError):
                os.kill(self.first, signal.SIGTERM)

    def kill(self) -> None:
        """See :class:`capsule.engine.supervise.Running`."""
        found = descendants(self._process.pid) if self._process.poll() is None else []
        # A process is killed before its children. A shell whose command was killed would otherwise
        # take its next command, and might end with status 0. An enclosure is not killed. It ends
        # with the status of the task, once the kernel has ended all that was in the namespace.
        if not (self._enclosed and found):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def exceeds_memory(self) -> bool:
        """See :class:`capsule.engine.supervise.Running`."""
        process = self._process.pid
        return memory_of([process, *descendants(process)]) > self._limit_bytes

    def was_out_of_memory(self) -> str | None:
        """See :class:`capsule.engine.supervise.Running`."""
        # The kernel does not say which process it was. The task is in the group, and has failed.
        if (oom_kills() or 0) > self._oom_kills:
            return "the kernel killed a process of this control group for its memory (oom_kill)"
        return None


def task_environment(task: Task, environment: str, home: str) -> dict[str, str]:
    """Return all variables of a task: its own, and what the image would set besides."""
    return {
        **task.environment,
        # The machine's devices are visible to every task. Without a GPU in it, CUDA shows none.
        **visible_devices(task.gpus),
        **(driver_folder(os.environ) if task.gpus else {}),
        "HOME": home,
        "LOGNAME": "capsule",
        "PATH": f"{environment}/bin:/usr/local/bin:/usr/bin:/bin",
        "USER": "capsule",
    }


def descendants(process: int) -> list[int]:
    """Return the children of a process, then their children, and so on."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # processes end at any moment
            # The name of a program, in parentheses, may itself have blanks and parentheses.
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found = [process]
    for each in found:
        found += children.get(each, [])
    return found[1:]


def memory_of(processes: Iterable[int]) -> int:
    """Return the memory of processes in bytes, shared pages split among them."""
    total = 0
    for process in processes:
        with suppress(OSError):  # it ended, or does not show its memory (the launcher)
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total << 10


@contextmanager
def started(start: Start, task: Task) -> Iterator[RunningProcess]:
    """Start a task; afterwards nothing of it is left and its output is kept.

    Raises:
        CapsuleError: CAP-E005, the process does not start.
    """
    bound = () if task.processors is None else ("taskset", "--cpu-list", task.processors)
    try:
        process = subprocess.Popen(
            (*bound, *start.command),
            cwd=start.folder,
            env=start.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Ctrl-C on the terminal reaches Capsule alone, which then ends the task in its own way.
            start_new_session=True,
            # That of containers, whatever the caller's is.
            umask=0o022,
            pass_fds=start.descriptors,
        )
    except OSError as error:
        raise CapsuleError(
            "CAP-E005",
            f"the process cannot be started: {error}",
            fix="Install util-linux (setpriv).",
        ) from error
    memory = task.limits.memory_mb << 20
    running = RunningProcess(process, memory, enclosed=start.enclosed)
    log = _Log(process, task.run_directory / contract.LOG)
    log.start()
    try:
        yield running
    finally:
        running.kill()
        # Bounded, because a process that waits for a dead disk does not end, which supervise()
        # reports.
        running.wait(KILL_SECONDS)
        # Bounded, because a process that got away may keep the pipe open for ever.
        if log.ended.wait(_LOG_SECONDS):
            # A slow disk may take longer to write the output, which the caller is about to read.
            log.join()
        running.unkept = log.error


class _Log(threading.Thread):
    """Keeps the output of a process.

    Attributes:
        ended: Set when there is no more output, which is then written to the file.
        error: Why it could not be kept, if so.
    """

    def __init__(self, process: subprocess.Popen[bytes], path: Path) -> None:
        super().__init__(daemon=True)
        if process.stdout is None:
            raise ValueError("output is not a pipe")
        self._stream, self._path = process.stdout, path
        self.ended = threading.Event()
        self.error: CapsuleError | None = None

    def run(self) -> None:
        """See :class:`threading.Thread`."""
        try:
            write_log(self._chunks(), self._path)
        except CapsuleError as error:
            self.error = error

    def _chunks(self) -> Iterator[bytes]:
        with self._stream as stream:
            yield from iter(lambda: os.read(stream.fileno(), 1 << 16), b"")
        self.ended.set()


def _unpacked(project: LockedProject, cache: Cache) -> Path:
    """Return a folder with the files of a source tree, from which a task imports."""

    def make(folder: Path) -> None:
        archive = project_archive(project, cache)
        unpack_layer(archive, "the archive of the source tree", folder, FOLDER)

    return cache.recorded_folder("projects", project.sha256, make)
